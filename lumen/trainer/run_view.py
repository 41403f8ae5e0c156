"""RunView: what callbacks and tasks may read of a run."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NoReturn

import torch

from lumen.errors import ConfigError, TrainingError
from lumen.errors.lightning_names import ATTRIBUTES
from lumen.loggers import Logger
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule


class RunView(ABC):
    """What callbacks and tasks read of a trainer; nothing here changes a run, but for `should_stop`.

    Attributes:
        plan: How long the run is and what happens when.
        strategy: Processes, placement, communication.
        loggers: Where its record goes beside `metrics.csv`, or that alone; empty: there is none.
        run_directory: Where it writes; None if it writes nothing.
    """

    plan: Plan
    strategy: Strategy
    loggers: list[Logger]
    run_directory: Path | None
    _run: Run | None

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
        """Set it to True to end training at the next boundary."""
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
    def is_ending(self) -> bool:
        """The boundary in progress is the run's last one; decided when `on_step_checkpoint` begins."""
        return self.run.ending.is_here

    @property
    def validation_due(self) -> bool:
        """The step in progress has a validation that is not complete."""
        return self.run.progress.validation_due

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
        """The optimizer, in a list."""
        if not hasattr(self.run.optim, "optimizer"):
            raise ConfigError("there is no optimizer: it exists during fit, once configure_optimizers has returned.")
        return [self.run.optim.optimizer]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers and when they step."""
        return list(self.run.optim.schedulers)

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run."""
        return self.run.datamodule

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str | None:
        """The run directory."""
        return None if self.run_directory is None else str(self.run_directory)

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.strategy.world_size

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self.strategy.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self.strategy.processes.node

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return self.strategy.processes.nodes

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""
        return self.strategy.is_global_zero

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of a training epoch; None if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self.plan.batches("train", adapter)

    @property
    @abstractmethod
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules that need their length.

        Raises:
            ConfigError: Neither `max_steps` nor `max_epochs` with a loader of known length says so.
        """
