"""Tuner: the searches, called by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, final

from lumen.callbacks import Callback
from lumen.console import logger as _log
from lumen.errors import ConfigError, DataError, NonFiniteLoss, TrainingError
from lumen.errors.arguments import at_least
from lumen.internals.memory import is_out_of_memory
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner import lr_search
from lumen.trainer.tuner.trial import Trials, has_anywhere, set_everywhere, source

if TYPE_CHECKING:
    from lumen.run.plan import Plan

Mode = Literal["power", "binsearch"]


@final
class LargestBatch(Callback):
    """Notes how large batches are.

    Attributes:
        samples: Of the largest so far.
    """

    def __init__(self) -> None:
        self.samples = 0

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Look at a batch."""
        self.samples = max(self.samples, trainer.run.log.batch_samples)


@final
class BatchSizeSearch:
    """Finds the largest micro-batch that fits into memory.

    Args:
        trials: The trainings of copies, one for each size that is tried.
        plan: The trainer's own, which says how large a step is.
        name: Of the attribute or hyperparameter.
        steps: Updates of each trial.
        max_trials: How many trials there may be.
    """

    def __init__(self, trials: Trials, plan: Plan, name: str, steps: int, max_trials: int) -> None:
        self._trials, self._name, self._steps, self._left = trials, name, steps, max_trials
        self._most = plan.global_batch_size
        self._accumulates = plan.global_batch_size is not None or plan.accumulates

    def find(self, init_val: int, mode: Mode, margin: float) -> int:
        """The batch size that is found.

        Args:
            init_val: The first one to try.
            mode: "power": doubled until memory ends; "binsearch": then halved between what fits and what does not.
            margin: This part less is used, where "binsearch" has met the end of memory.

        Raises:
            TrainingError: Not even one sample fits.
        """
        fits, too_large, size = 0, None, init_val if self._most is None else min(init_val, self._most)
        while self._left and (too_large is None or fits == 0):
            found = self._try(size)
            if found is None:
                too_large, size = size, size // 2
                if size == 0:
                    raise TrainingError("a batch of one sample does not fit into memory: no batch size does.")
                continue
            fits = found
            if found < size or too_large is not None or size == self._most:
                break
            size = size * 2 if self._most is None else min(size * 2, self._most)
        while mode == "binsearch" and too_large is not None and self._left and too_large - fits > 1:
            middle = (fits + too_large) // 2
            found = self._try(middle)
            fits, too_large = (fits, middle) if found is None else (found, too_large)
        if not fits:
            raise TrainingError(f"no batch size was found to fit: {size * 2} does not. Set max_trials larger.")
        if mode == "binsearch" and too_large is not None:
            fits = max(1, int(fits * (1 - margin)))
        _log.info("batch size: %d fits into memory%s", fits, f", {too_large} does not" if too_large is not None else "")
        return fits if self._most is None else _even(self._most, fits)

    def _try(self, size: int) -> int | None:
        """Train a little. Returns how large batches were; None if memory did not suffice."""
        self._left -= 1
        largest = LargestBatch()
        try:
            self._trials.run(
                largest, {self._name: size},
                max_steps=self._steps, accumulate={0: 1 + self._accumulates}, global_batch_size=None,
                halve_on_oom=False,
            )  # fmt: skip
        except (RuntimeError, DataError) as error:
            if isinstance(error, DataError):
                if size == 1 or largest.samples:
                    raise
                return None  # with drop_last there is no batch of this size
            if not is_out_of_memory(error):
                raise
            return None
        if largest.samples > size:
            raise ConfigError(
                f"{self._name} was set to {size}, but batches have {largest.samples} samples: the loader does not take "
                "its size from there. Write DataLoader(..., batch_size=self.hparams.batch_size), or as it is called."
            )
        return largest.samples


def _even(total: int, most: int) -> int:
    """The micro-batch that cuts a step into equal parts, of at most so many samples."""
    parts = -(-total // most)
    return -(-total // parts)


_RATE_NAMES = ("lr", "learning_rate")


@final
class Tuner:
    """Finds a learning rate, or a batch size that fits into memory, with a few steps of training.

    What is trained is a copy, by the trainer's settings, but without its callbacks, loggers and checkpoints. The task,
    the data, all random numbers and the trainer are afterwards as they were, but for the attribute that is set: `fit`
    gives the bits that it gives with this value written by hand. In `setup` of a callback, where neither loaders nor
    optimizers exist, a run may search for itself: that is what `LearningRateFinder` and `BatchSizeFinder` do.

    Args:
        trainer: The one that `fit` is to be called of; it has one process.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: lr_search.Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        configure_optimizers: Callable[[TaskModule], Any] | None = None,
    ) -> lr_search.LearningRateCurve:
        """Train with ever larger learning rates (Smith, Cyclical Learning Rates, 2015).

        Schedules do not move; parameter groups keep the ratios of their rates, and the rate is that of the first.

        Args:
            model: Of which a copy is trained, from the parameters that it has.
            train_dataloaders: A loader, several, or a data module; None: the task's, or those of the run in progress.
            datamodule: A data module, in place of loaders.
            min_lr: The first rate, more than 0.
            max_lr: The last rate.
            num_training: Steps, at least 2.
            mode: "exponential": each rate is a multiple of the one before; "linear": they have equal distances.
            early_stop_threshold: Stop when the smoothed loss is more than so many times the least one; None: never.
            update_attr: Set the attribute or hyperparameter to the suggestion.
            attr_name: Of the attribute or hyperparameter of the task. Default: `lr` or `learning_rate`.
            configure_optimizers: Makes the optimizer of a task, in place of its own method.

        Returns:
            The curve, with `suggestion()`, `results` and `plot()`.

        Raises:
            ConfigError: There are several processes, the task optimizes by hand, or it has no such attribute.
            TrainingError: There is no suggestion, but the attribute was to be set.
        """
        if not model.automatic_optimization:
            raise ConfigError(
                f"lr_find: {type(model).__name__} optimizes by hand, and which of its rates is meant is not known. "
                "Try rates in short runs."
            )
        rates = lr_search.rising(min_lr, max_lr, num_training, mode)
        trials = Trials(self._trainer, model, source(train_dataloaders, datamodule), configure_optimizers)
        if update_attr and trials.has_own_optimizer:
            raise ConfigError(
                "lr_find: the optimizer is not the task's but that of the config, or what fit was given as "
                "configure_optimizers. Set update_attr: false, and write the rate that is suggested there."
            )
        name = rate_name(model, attr_name) if update_attr else ""
        curve = lr_search.LearningRateCurve(mode)
        with suppress(NonFiniteLoss):  # the curve ends there
            trials.run(lr_search.RisingRate(curve, rates, early_stop_threshold), max_steps=num_training)
        trials.free()
        if update_attr:
            if (rate := curve.suggestion()) is None:
                raise TrainingError(
                    f"lr_find: no rate can be suggested: of {len(curve.results['lr'])} rates from {min_lr:g} on, but "
                    "for the first ten and the last, none lets the loss fall. Begin with a smaller min_lr, take more "
                    "steps, or set early_stop_threshold to None."
                )
            _log.info("learning rate: %g, set as %s", rate, " and ".join(set_everywhere([model], name, rate)))
        return curve

    def scale_batch_size(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        *,
        mode: Mode = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
    ) -> int:
        """Find the largest batch that training fits into memory, and set it.

        With `global_batch_size` that is the micro-batch, and training stays the same: only how each step is cut
        changes, so at most all of it is tried, and the size cuts it evenly. Without it a step becomes larger.

        Args:
            model: Of which copies are trained.
            train_dataloaders: A data module; None: the task's loader, or the data of the run in progress.
            datamodule: A data module.
            mode: "power": double until memory ends; "binsearch": then search between what fits and what does not.
            steps_per_trial: Updates of each trial, at least 1.
            init_val: The first size, at least 1.
            max_trials: How many trials there may be, at least 1.
            batch_arg_name: Of the attribute or hyperparameter of the task or the data module that the loader is made
                with.
            margin: With "binsearch" this part less is used, from 0 to 1.

        Returns:
            The size that was set.

        Raises:
            ConfigError: There are several processes, or nobody has such an attribute.
            TrainingError: Not even one sample fits.
        """
        at_least(1, steps_per_trial=steps_per_trial, init_val=init_val, max_trials=max_trials)
        if mode not in ("power", "binsearch") or not 0 <= margin < 1:
            raise ConfigError(
                f"scale_batch_size: expected the mode power or binsearch and a margin from 0 to 1, found {mode!r} and "
                f"{margin}."
            )
        trials = Trials(self._trainer, model, source(train_dataloaders, datamodule), None)
        if not has_anywhere(trials.owners, batch_arg_name):
            names = " and ".join(type(owner).__name__ for owner in trials.owners)
            raise ConfigError(
                f"scale_batch_size: {names} has no attribute or hyperparameter {batch_arg_name}. Make the loader in a "
                "data module or the task with a size from there, and name it as batch_arg_name."
            )
        plan = self._trainer.plan
        search = BatchSizeSearch(trials, plan, batch_arg_name, steps_per_trial, max_trials)
        size = search.find(init_val, mode, margin)
        trials.free()
        set_everywhere([*trials.owners], batch_arg_name, size)
        return size


def rate_name(model: TaskModule, given: str) -> str:
    """The attribute or hyperparameter that the rate is set as."""
    found = [name for name in ([given] if given else _RATE_NAMES) if has_anywhere([model], name)]
    if len(found) == 1:
        return found[0]
    problem = f"has no attribute or hyperparameter {given or ' or '.join(_RATE_NAMES)}" if not found else "has both"
    raise ConfigError(
        f"lr_find: {type(model).__name__} {problem}, from which configure_optimizers takes its rate. Name it as "
        "attr_name, or set update_attr: false and write the suggestion where the rate is set."
    )
