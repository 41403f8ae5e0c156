"""Tuner: searches for a learning rate or a batch size, called directly or by callbacks in `setup`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Literal, final

from lumen.callbacks import Callback
from lumen.console import logger as _log
from lumen.errors import ConfigError, DataError, NonFiniteLoss, TrainingError
from lumen.errors.arguments import check_arguments, check_at_least, refuse_unknown_arguments
from lumen.errors.lightning_names import INSTEAD_IN_TUNER
from lumen.internals.memory import is_out_of_memory
from lumen.run.open_loaders import choose_source
from lumen.run.plan import Plan
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer import lr_search
from lumen.trainer.trainer import Trainer
from lumen.trainer.trial import TrialRunner, has_on_owners, set_on_owners

Mode = Literal["power", "binsearch"]


@final
class BatchSizeCallback(Callback):
    """Callback that records the size of the largest batch.

    Attributes:
        samples: Samples of the largest batch so far.
    """

    def __init__(self) -> None:
        self.samples = 0

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Record the size of a batch."""
        self.samples = max(self.samples, trainer.run.log.batch_samples)


def _search_size(
    attempt: Callable[[int], int | None], most: int | None, first: int, trials: int, mode: Mode, margin: float
) -> int:
    """Return the largest micro-batch that fits into memory.

    Args:
        attempt: Function that trains a few steps with a size, and returns the size of its batches, or None if memory
            did not suffice.
        most: The size of a step, if known: larger batches are not tried.
        first: The first size to try.
        trials: Largest number of sizes to try.
        mode: "power": double until memory ends; "binsearch": then bisect between the sizes that fit and do not fit.
        margin: Fraction to subtract from the result, if "binsearch" has reached the end of memory.

    Raises:
        TrainingError: Not even one sample fits.
    """
    largest, too_large, size = 0, None, first if most is None else min(first, most)
    while trials and (too_large is None or largest == 0):
        size_found, trials = attempt(size), trials - 1
        if size_found is None:
            too_large, size = size, size // 2
            if size == 0:
                raise TrainingError("a batch of one sample does not fit into memory: no batch size does.")
            continue
        largest = size_found
        if size_found < size or too_large is not None or size == most:
            break
        size = size * 2 if most is None else min(size * 2, most)
    while mode == "binsearch" and too_large is not None and trials and too_large - largest > 1:
        middle, trials = (largest + too_large) // 2, trials - 1
        size_found = attempt(middle)
        largest, too_large = (largest, middle) if size_found is None else (size_found, too_large)
    if not largest:
        raise TrainingError(f"found no batch size that fits into memory: {size * 2} does not. Raise max_trials.")
    if mode == "binsearch" and too_large is not None:
        largest = max(1, int(largest * (1 - margin)))
    _log.info("batch size: %d fits into memory%s", largest, f", {too_large} does not" if too_large is not None else "")
    # A step of a known size is cut into equal parts of at most `fits` samples.
    return largest if most is None else -(-most // -(-most // largest))


def _try_size(trials: TrialRunner, plan: Plan, name: str, steps: int, size: int) -> int | None:
    """Train a copy for a few steps with a batch size. Return the size of its batches, or None if memory ran out."""
    largest, accumulates = BatchSizeCallback(), plan.global_batch_size is not None or plan.has_accumulation
    try:
        trials.run_trial(
            largest, {name: size}, max_steps=steps, accumulate={0: 1 + accumulates}, global_batch_size=None,
            halve_on_oom=False,
        )  # fmt: skip
    except DataError:
        if size == 1 or largest.samples:
            raise
        return None  # with drop_last, no batch has this size
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    if largest.samples > size:
        raise ConfigError(
            f"{name} was set to {size}, but batches have {largest.samples} samples: the loader does not use {name}. "
            f"Write DataLoader(..., batch_size=self.hparams.{name})."
        )
    return largest.samples


_RATE_NAMES = ("lr", "learning_rate")


@final
class Tuner:
    """Search for a learning rate, or for a batch size that fits into memory, with a few training steps.

    Lumen trains a copy with the trainer's settings, but without its callbacks, loggers and checkpoints. Afterwards the
    task, the data, all random numbers and the trainer are unchanged, except for the attribute that is set. `fit` is
    then bitwise identical to a `fit` with this value set by hand. A callback can also search in `setup`, before loaders
    and optimizers exist, as `LearningRateFinder` and `BatchSizeFinder` do.

    Args:
        trainer: The trainer for the later `fit`; it must have one process.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: lr_search.Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        *,
        configure_optimizers: Callable[[TaskModule], Any] | None = None,
        **unknown: Any,
    ) -> lr_search.LearningRateCurve:
        """Train with increasing learning rates (Smith, Cyclical Learning Rates, 2015).

        Schedules do not move. The rate is that of the first parameter group; other groups keep the ratios of their
        rates.

        Args:
            model: The task; Lumen trains a copy, beginning with its current parameters.
            train_dataloaders: A loader, several, or a data module; None: the task's loader, or the run's.
            val_dataloaders: Accepted for compatibility with Lightning: a search does not validate.
            dataloaders: Must be None: a search trains.
            datamodule: A data module, in place of loaders.
            method: Must be "fit": a search trains.
            min_lr: The first rate, more than 0.
            max_lr: The last rate.
            num_training: Number of steps, at least 2.
            mode: "exponential": the ratio of consecutive rates is constant; "linear": their difference is constant.
            early_stop_threshold: Factor of the smallest smoothed loss at which the search stops; None: never.
            update_attr: Set the attribute or hyperparameter to the suggestion.
            attr_name: Name of the task's attribute or hyperparameter. Default: `lr` or `learning_rate`.
            configure_optimizers: Function that builds the optimizer of a task, in place of the task's own method.
            unknown: Other arguments; each is an error.

        Returns:
            The curve, with `suggestion()`, `results` and `plot()`.

        Raises:
            ConfigError: The trainer has several processes, the task uses manual optimization, or it has no such
                attribute.
            TrainingError: The curve gives no suggestion for the attribute to set.
        """
        self._check_call("lr_find", method, dataloaders, unknown, LearningRateFinder)
        if not model.automatic_optimization:
            raise ConfigError(
                f"lr_find: {type(model).__name__} uses manual optimization, so the rate to search is unknown. "
                "Try rates in short runs."
            )
        rates = lr_search.make_rising_rates(min_lr, max_lr, num_training, mode)
        trials = TrialRunner(self._trainer, model, choose_source(train_dataloaders, datamodule), configure_optimizers)
        if update_attr and trials.run_configure is not None:
            raise ConfigError(
                "lr_find: the optimizer comes from the config or from fit(configure_optimizers=...), not from the "
                "task. Set update_attr: false, and write the suggested rate in the config or the function."
            )
        name = find_rate_name(model, attr_name) if update_attr else ""
        curve = lr_search.LearningRateCurve(mode)
        with suppress(NonFiniteLoss):  # the curve ends at this rate
            trials.run_trial(lr_search.RisingRateCallback(curve, rates, early_stop_threshold), max_steps=num_training)
        trials.free_memory()
        if update_attr:
            if (rate := curve.suggestion()) is None:
                raise TrainingError(
                    f"lr_find: found no rate to suggest. Of {len(curve.results['lr'])} rates from {min_lr:g} on, "
                    "without the first ten and the last, none lets the loss fall. Lower min_lr, raise num_training, or "
                    "set early_stop_threshold to None."
                )
            _log.info("learning rate: %g, set as %s", rate, " and ".join(set_on_owners([model], name, rate)))
        return curve

    def scale_batch_size(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: Mode = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        **unknown: Any,
    ) -> int:
        """Find the largest batch size that fits into memory, and set it.

        With `global_batch_size` the result is the micro-batch size, and training stays the same. It is at most
        `global_batch_size`, and cuts a step into equal parts. Without `global_batch_size` steps become larger.

        Args:
            model: The task to copy for each trial.
            train_dataloaders: A data module; None: the task's loader, or the data of the run in progress.
            val_dataloaders: Accepted for compatibility with Lightning: a search does not validate.
            dataloaders: Must be None: a search trains.
            datamodule: A data module.
            method: Must be "fit": a search trains.
            mode: "power": double until memory ends; "binsearch": then bisect between the sizes that fit and do not fit.
            steps_per_trial: Updates of each trial, at least 1.
            init_val: The first size, at least 1.
            max_trials: Largest number of trials, at least 1.
            batch_arg_name: Name of the task's or data module's attribute or hyperparameter from which the loader takes
                its size.
            margin: Fraction to subtract from the result of "binsearch", at least 0 and less than 1.
            unknown: Other arguments of Lightning's method; each is an error that says what to write.

        Returns:
            The size that was set.

        Raises:
            ConfigError: The trainer has several processes, or the attribute does not exist.
            TrainingError: Not even one sample fits.
        """
        self._check_call("scale_batch_size", method, dataloaders, unknown, BatchSizeFinder)
        check_at_least(1, steps_per_trial=steps_per_trial, init_val=init_val, max_trials=max_trials)
        if mode not in ("power", "binsearch") or not 0 <= margin < 1:
            raise ConfigError(
                f"scale_batch_size: expected the mode power or binsearch and a margin from 0 to 1, found {mode!r} and "
                f"{margin}."
            )
        trials = TrialRunner(self._trainer, model, choose_source(train_dataloaders, datamodule), None)
        if not has_on_owners(trials.owners, batch_arg_name):
            names = " and ".join(type(owner).__name__ for owner in trials.owners)
            raise ConfigError(
                f"scale_batch_size: {names} has no attribute or hyperparameter {batch_arg_name}. Store the batch size "
                "in the data module or the task, use it in the loader, and pass its name as batch_arg_name."
            )
        plan = self._trainer.plan
        attempt = partial(_try_size, trials, plan, batch_arg_name, steps_per_trial)
        size = _search_size(attempt, plan.global_batch_size, init_val, max_trials, mode, margin)
        trials.free_memory()
        set_on_owners([*trials.owners], batch_arg_name, size)
        return size

    def _check_call(
        self, name: str, method: str, dataloaders: Any, unknown: Mapping[str, Any], finder: type[Callback]
    ) -> None:
        """Refuse arguments that only Lightning has, and a second search in `fit`."""
        more = {"method": None if method == "fit" else method, "dataloaders": dataloaders}
        refuse_unknown_arguments(name, {**more, **unknown}, INSTEAD_IN_TUNER)
        if any(isinstance(each, finder) for each in self._trainer.callbacks) and self._trainer._status != "running":
            raise ConfigError(
                f"{name}: the trainer has a {finder.__name__} in callbacks, so fit would search again. Remove one of "
                "the two."
            )


def find_rate_name(model: TaskModule, attr_name: str) -> str:
    """Return the name of the task's attribute or hyperparameter for the rate."""
    found = [name for name in ([attr_name] if attr_name else _RATE_NAMES) if has_on_owners([model], name)]
    if len(found) == 1:
        return found[0]
    problem = f"has no attribute or hyperparameter {attr_name or ' or '.join(_RATE_NAMES)}" if not found else "has both"
    raise ConfigError(
        f"lr_find: {type(model).__name__} {problem}, which lr_find could set. Pass the name of the rate as attr_name. "
        "Or set update_attr: false, and write the suggested rate in your code."
    )


@final
class LearningRateFinder(Callback):
    """Callback that finds a learning rate when a run begins, and trains with it; see `Tuner.lr_find`.

    A run that resumes from a checkpoint uses the saved rate, and does not search.

    Args:
        min_lr: The first rate, more than 0.
        max_lr: The last rate.
        num_training_steps: Number of steps of the search, at least 2.
        mode: "exponential": the ratio of consecutive rates is constant; "linear": their difference is constant.
        early_stop_threshold: Factor of the smallest smoothed loss at which the search stops; None: never.
        update_attr: Set the attribute or hyperparameter; False: the run trains with its present rate.
        attr_name: Name of the task's attribute or hyperparameter. Default: `lr` or `learning_rate`.
        plot: Write the curve into the run directory: `lr_find.csv`, and `lr_find.png` if matplotlib is installed.

    Attributes:
        optimal_lr: The curve; None without a search.
    """

    @check_arguments
    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        *,
        plot: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = {
            "min_lr": min_lr, "max_lr": max_lr, "num_training": num_training_steps, "mode": mode,
            "early_stop_threshold": early_stop_threshold, "update_attr": update_attr, "attr_name": attr_name,
        }  # fmt: skip
        self._plot = plot
        self.optimal_lr: lr_search.LearningRateCurve | None = None
        self._found: Any = None  # the name, and the rate

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Search, unless the run resumes from a checkpoint."""
        if stage != "fit":
            return
        self.optimal_lr = self._found = None
        if trainer.run.checkpoint is not None:
            return
        self.optimal_lr = Tuner(trainer).lr_find(task, **self._settings)
        rate = self.optimal_lr.suggestion()
        if self._settings["update_attr"]:
            self._found = find_rate_name(task, self._settings["attr_name"]), rate
        elif rate is not None:
            _log.info("suggested learning rate: %g", rate)
        if self._plot and trainer.run_directory is not None:
            self.optimal_lr.write(trainer.run_directory / "lr_find.csv")
            if importlib.util.find_spec("matplotlib") is not None:
                from matplotlib.figure import Figure

                figure = self.optimal_lr.plot(suggest=True, ax=Figure().add_subplot())
                figure.savefig(trainer.run_directory / "lr_find.png", dpi=120)

    def on_save_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Save the rate that was found."""
        checkpoint["found"] = self._found

    def on_load_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Set the saved rate, before optimizers are built."""
        self._found = checkpoint.get("found")
        if self._found is not None:
            set_on_owners([task], *self._found)


@final
class BatchSizeFinder(Callback):
    """Callback that finds the largest batch size that fits into memory, and trains with it.

    The search is `Tuner.scale_batch_size`. With `global_batch_size` of the trainer the result is the micro-batch size,
    and training stays the same. Without it steps become larger. A run that resumes from a checkpoint uses the saved
    size, and does not search.

    Args:
        mode: "power": double until memory ends; "binsearch": then bisect between the sizes that fit and do not fit.
        steps_per_trial: Updates of each trial, at least 1.
        init_val: The first size, at least 1.
        max_trials: Largest number of trials, at least 1.
        batch_arg_name: Name of the task's or data module's attribute or hyperparameter from which the loader takes its
            size.
        margin: Fraction to subtract from the result of "binsearch", at least 0 and less than 1.

    Attributes:
        optimal_batch_size: The size; None without a search.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {"max_val": INSTEAD_IN_TUNER["max_val"]}

    @check_arguments
    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
    ) -> None:
        self._settings: dict[str, Any] = {
            "mode": mode, "steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials,
            "batch_arg_name": batch_arg_name, "margin": margin,
        }  # fmt: skip
        self.optimal_batch_size: int | None = None

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Search, unless the run resumes from a checkpoint."""
        if stage == "fit":
            self.optimal_batch_size = None
            if trainer.run.checkpoint is None:
                self.optimal_batch_size = Tuner(trainer).scale_batch_size(task, **self._settings)

    def on_save_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Save the size that was found."""
        checkpoint["found"] = self.optimal_batch_size

    def on_load_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Set the saved size, before loaders are created."""
        self.optimal_batch_size = checkpoint.get("found")
        if self.optimal_batch_size is not None:
            set_on_owners([task, trainer.datamodule], self._settings["batch_arg_name"], self.optimal_batch_size)
