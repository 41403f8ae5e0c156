"""The trainer of a run as tasks and callbacks see it: types alone, so that they need no import of `lumen.trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from lumen.distributed.processes import Processes
from lumen.loggers import Logger


class Placement(Protocol):
    """The strategy of a run as a task sees it: where the task is."""

    device: torch.device

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The devices of the run as a grid, or None."""


class AttachedRun(Protocol):
    """The run that a task is attached to: a `lumen.run.run.Run`, which is floors above."""

    stage: str
    processes: Processes
    log: Any
    step: Any
    optim: Any

    @property
    def strategy(self) -> Placement:
        """The strategy, which says where the task is."""


class RunningTrainer(Protocol):
    """What a task may read of the trainer of its run. `lumen.Trainer` has more, and says what each name means.

    Attributes:
        loggers: The loggers of the run, without `metrics.csv`.
        should_stop: Set to True, it ends training at the end of the step in progress.
    """

    loggers: list[Logger]
    should_stop: bool

    @property
    def logger(self) -> Logger | None:
        """The first logger, or None."""

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`."""

    @property
    def current_epoch(self) -> int:
        """Epochs completed by the newest `fit`."""

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 without a limit."""

    @property
    def max_epochs(self) -> int:
        """The limit of epochs; -1 without a limit."""

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch; infinite for a loader without a length."""

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""

    @property
    def world_size(self) -> int:
        """Processes of the run."""

    @property
    def global_rank(self) -> int:
        """Number of this process."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the task."""

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest logged values, by name."""

    @property
    def log_dir(self) -> str | None:
        """The directory of the run, or None."""


if TYPE_CHECKING:

    class AnyTrainer(RunningTrainer, Any, Protocol):  # type: ignore[misc]  # the base `Any` is on purpose
        """The trainer that tasks and hooks are given, which type checkers accept as a `lumen.Trainer` too.

        An override may annotate `trainer: lumen.Trainer`, and a function that takes one may be given `self.trainer`.
        The base `Any` permits both; names that are not listed above have no type.
        """
