"""RunView: what callbacks and tasks may read of a run."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from lumen.callbacks import Callback, ModelCheckpoint
from lumen.checkpoint import Checkpoint, Saves
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError, TrainingError
from lumen.errors.lightning_names import ATTRIBUTES
from lumen.loggers import Logger
from lumen.metrics.log_call import LogOptions
from lumen.run.gradients import total_norm
from lumen.run.open_loaders import open_loaders
from lumen.run.plan import Plan
from lumen.run.progress import Progress
from lumen.run.run import Run
from lumen.run.step_context import Counters
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule

_UNASKED_VALUES = 3


class RunView(ABC):
    """What callbacks and tasks read of a trainer; nothing here changes a run, but for `should_stop`.

    It is apart from `Trainer`, its one child: what a callback may use is in one place, how a run is made in another.

    Attributes:
        plan: How long the run is and what happens when.
        strategy: On which devices tasks lie, and how a step is computed there.
        callbacks: Those that were given, and the default ones.
        loggers: Where its record goes beside `metrics.csv`, or that alone; empty: there is none.
        run_directory: Where it writes; None if it writes nothing.
    """

    plan: Plan
    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    run_directory: Path | None
    _run: Run | None
    _given_optimizers: Callable[[], Any] | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Say what is read in place of an attribute that only Lightning's trainer has.

        Raises:
            AttributeError: There is none of this name.
        """
        if hasattr(type(self), name):  # one that has failed for want of another
            object.__getattribute__(self, name)
        near = difflib.get_close_matches(name, [each for each in dir(type(self)) if not each.startswith("_")])
        hint = ATTRIBUTES.get(name) or (f"Did you mean {' or '.join(near)}?" if near else "")
        raise AttributeError(f"{type(self).__name__} has no attribute {name}. {hint}".rstrip())

    @property
    def run(self) -> Run:
        """The run in progress, or the last one.

        Raises:
            ConfigError: None has been started.
        """
        if self._run is None:
            raise ConfigError("this trainer has not started a run yet; call fit, validate, test or predict.")
        return self._run

    @property
    def global_step(self) -> int:
        """Optimizer updates completed."""
        return self.run.progress.step

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.run.progress.epoch

    @property
    def max_steps(self) -> int | None:
        """The limit, or None."""
        return self.plan.max_steps

    @property
    def max_epochs(self) -> int | None:
        """The limit, or None."""
        return self.plan.max_epochs

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every logged name: float64 without dimensions, on the CPU. Waits for the device.

        Those of an epoch or a validation are the same on every rank, of what all have seen; those of the step in
        progress are of this rank's micro-batches.
        """
        steps: dict[str, Any] = self.run.log.train.step_values()
        values = self.run.values.newest | steps if self.run.log.in_train_step else steps | self.run.values.newest
        return {name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}

    @property
    def epoch_metrics(self) -> dict[str, float]:
        """The newest values of epochs and validations, by name; the same on every rank."""
        return self.run.values.newest

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """What the newest training step has logged with `prog_bar=True`, else its loss. Waits for no device.

        Tensors have no dimensions, and lie where the step has put them; values are of this rank.
        """
        values: dict[str, float | torch.Tensor] = self.run.log.train.step_values(_for_the_bar)
        if not values and self.run.step.loss is not None:
            values = {"loss": self.run.step.loss}
        return values

    @property
    def progress_bar_names(self) -> list[str]:
        """Names of the training epoch in progress that were logged with `prog_bar=True`."""
        return self.run.log.train.epoch_names(_for_the_bar)

    @property
    def evaluation_names(self) -> list[str]:
        """Names of the evaluation that ends, of those logged with `prog_bar=True`; if none was, the first three."""
        metrics = self.run.log.stage
        if metrics is None:
            raise ConfigError("evaluation_names: there is no evaluation; they are known when it ends.")
        return metrics.epoch_names(_for_the_bar) or metrics.epoch_names()[:_UNASKED_VALUES]

    @property
    def fresh_metrics(self) -> set[str]:
        """Names with a value since the last boundary: from an epoch's end or a validation, not from single steps."""
        return self.run.values.updated

    def require_logged(self, who: str, monitor: str) -> None:
        """Refuse a monitor that has no value although everything that logs has had its turn since the run went on.

        Raises:
            ConfigError: It was never logged; names what was.
        """
        self.run.values.require(who, monitor)

    @property
    def should_stop(self) -> bool:
        """Set it to True, on one rank or on all, to end training at the end of the step in progress.

        That holds in every hook and step of the task and of callbacks. Elsewhere (in a thread, in the hooks of a
        callback that says `stops_at_steps = False`), several processes hear of it in the step after it.
        """
        return self.run.progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.run.ending.is_decided and not self.should_stop:
            raise TrainingError(
                "should_stop was set in on_step_checkpoint, where it is decided whether the run ends here. "
                "Set it in on_step_end."
            )
        self.run.progress.should_stop = value

    @property
    def may_stop(self) -> bool:
        """The minimum of steps and epochs is reached: `should_stop` ends the run."""
        return self.run.ending.may_stop

    @property
    def end_reason(self) -> str | None:
        """Why the run is over, in words; None: it is not, or it was interrupted."""
        return self.run.ending.limit_reached

    @property
    def stop_requested(self) -> bool:
        """A signal has asked this process to end: the run leaves once all know of it."""
        return self.run.ending.vote.requested is not None

    @property
    def is_ending(self) -> bool:
        """The boundary in progress is the run's last one; decided when `on_step_checkpoint` begins."""
        return self.run.ending.is_here

    def skip_update(self) -> None:
        """Make no update of the step in progress: its batches are used, but no step is counted, no schedule moves.

        To be called in `on_before_optimizer_step`, on every rank; elsewhere it is a `TrainingError`.
        """
        if not self.in_training_step or self.run.optim.is_updating:
            raise TrainingError("skip_update: no update is about to be made. Call it in on_before_optimizer_step.")
        self.run.step.skips_update = True

    def step_loss(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean loss of the step over all processes, in `on_before_optimizer_step`: a scalar tensor. Collective.

        Args:
            parts: What `on_before_backward` was given on this process in this step, detached.
        """
        own = torch.stack([*parts]).sum() if parts else torch.zeros((), device=self.strategy.device)
        return self.run.step.weighting.mean(own, self.strategy.reduce)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the step's gradient, in `on_before_optimizer_step` that before clipping: a scalar. Collective."""
        return total_norm(self.run.optim.parameters)

    @property
    def progress(self) -> Progress:
        """How far the run is; to be read only."""
        return self.run.progress

    @property
    def counters(self) -> Counters:
        """Samples and waiting of this part of the run; to be read only."""
        return self.run.step.counters

    @property
    def clock_s(self) -> float:
        """The time in seconds, the same on every rank at the end of a step: what may be decided by."""
        return self.run.ending.vote.now_s

    @property
    def checkpoints(self) -> Saves:
        """The checkpoints that the run writes: `save`, `settle`, and the one under way."""
        return self.run.saves

    @property
    def resumed_from(self) -> Checkpoint | None:
        """The checkpoint that `fit` goes on from; None: it began anew."""
        return self.run.checkpoint

    def request_agreement(self) -> None:
        """Have all processes agree, after `on_step_end`, whether the run ends at this boundary: before it is saved.

        To be called in `on_step_end`, on every rank.
        """
        self.run.ending.is_asked = True

    def log_system(self, values: Mapping[str, float]) -> None:
        """Give every logger values that no two runs share: times, speeds, memory."""
        for logger in self.run.records.loggers:
            logger.log_system(values, self.global_step)

    @property
    def validation_due(self) -> bool:
        """The step in progress has a validation that is not complete."""
        return self.run.progress.validation_due

    @property
    def in_training_step(self) -> bool:
        """A training step is not complete."""
        return self.run.log.in_train_step

    @property
    def batch_samples(self) -> int:
        """Samples of the micro-batch in progress."""
        return self.run.log.batch_samples

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: autocast's, else that of the parameters."""
        device = self.strategy.device
        with self.run.precision.forward():
            if torch.is_autocast_enabled(device.type):
                return torch.get_autocast_dtype(device.type)
        return self.run.optim.parameters[0].dtype

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""
        return self.run.stage == "sanity"

    @property
    def training(self) -> bool:
        """True during training steps."""
        return self.run.stage == "fit"

    @property
    def validating(self) -> bool:
        """True during validation."""
        return self.run.stage == "validate"

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self.run.stage == "test"

    @property
    def predicting(self) -> bool:
        """True during prediction."""
        return self.run.stage == "predict"

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, in a list; of a task that optimizes by hand all that it has."""
        if not hasattr(self.run.optim, "optimizer"):
            raise ConfigError("there is no optimizer: it exists during fit, once configure_optimizers has returned.")
        return list(self.run.optim.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers and when they step."""
        return list(self.run.optim.schedulers)

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run."""
        return self.run.loaders.datamodule

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str | None:
        """The run directory."""
        return None if self.run_directory is None else str(self.run_directory)

    @property
    def processes(self) -> Processes:
        """Who takes part in the run, and what of plain data they tell each other."""
        return self.strategy.processes

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.processes.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self.processes.node

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return self.processes.nodes

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""
        return self.processes.is_global_zero

    @property
    @abstractmethod
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The `ModelCheckpoint` that says which checkpoint is best."""

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules that need their length, as long as the data is now.

        Raises:
            ConfigError: Neither `max_steps` nor `max_epochs` with a loader of known length says so.
        """
        if self.run.loaders.train is None:
            open_loaders(self.run)
        assert self.run.loaders.train is not None
        return self.plan.total_steps(self.run.loaders.train)

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of a training epoch; None if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self.plan.batches("train", adapter)

    @property
    def num_evaluation_batches(self) -> int | None:
        """Batches of the evaluation in progress, of all loaders and ranks; None if a loader has no length."""
        counts = [self.plan.batches(self.run.stage, adapter) for adapter in self.run.loaders.evaluation]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a training epoch, as long as the data is now; None if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return adapter.steps(self.plan.limit("train", adapter))


def _for_the_bar(options: LogOptions) -> bool:
    return options.prog_bar
