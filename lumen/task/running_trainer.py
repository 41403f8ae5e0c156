"""Types of a run's trainer for tasks and callbacks, which avoid an import of `lumen.trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from lumen.distributed.processes import Processes
from lumen.loggers import Logger


class Placement(Protocol):
    """Strategy of a run for tasks: the device of the task."""

    device: torch.device

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Mesh of the run's devices, or None."""


class AttachedRun(Protocol):
    """Run that a task is attached to: a `lumen.run.run.Run`, whose package is a layer above."""

    stage: str
    processes: Processes
    log: Any
    step: Any
    optim: Any

    @property
    def strategy(self) -> Placement:
        """Strategy, which has the device of the task."""


class RunningTrainer(Protocol):
    """Trainer as a task may read it. `lumen.Trainer` has more members, and documents all names.

    Attributes:
        loggers: The given loggers, or the logger of `metrics.csv` by default; empty without loggers.
        should_stop: Request to end training after the step in progress, if True.
    """

    loggers: list[Logger]
    should_stop: bool

    @property
    def logger(self) -> Logger | None:
        """First logger, or None."""

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`."""

    @property
    def current_epoch(self) -> int:
        """Epochs completed by the newest `fit`."""

    @property
    def max_steps(self) -> int:
        """Limit of optimizer steps; -1: no limit."""

    @property
    def max_epochs(self) -> int:
        """Limit of epochs; -1: no limit."""

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch; infinite if the loader has no length."""

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""

    @property
    def global_rank(self) -> int:
        """Rank of this process, from 0."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the task."""

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Newest logged values, by name."""

    @property
    def log_dir(self) -> str | None:
        """Run directory, or None if the run writes nothing."""


if TYPE_CHECKING:

    class AnyTrainer(RunningTrainer, Any, Protocol):  # type: ignore[misc]  # the base `Any` is on purpose
        """Trainer for tasks and hooks, which type checkers also accept as a `lumen.Trainer`.

        An override may annotate `trainer: lumen.Trainer`, and a function with such an argument accepts `self.trainer`.
        The base `Any` permits both. Names that are not listed above have no type.
        """
