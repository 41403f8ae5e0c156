"""Type of the trainer in Lumen's own callbacks, which avoids an import of `lumen.trainer`."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol

import torch

from lumen.distributed.processes import Processes
from lumen.run.plan import Plan, Progress
from lumen.run.run import Run
from lumen.strategies import Strategy
from lumen.task.running_trainer import RunningTrainer

if TYPE_CHECKING:
    from lumen.callbacks.base import Callback
    from lumen.callbacks.model_checkpoint import ModelCheckpoint


class CallbackTrainer(RunningTrainer, Protocol):
    """Members of a trainer that Lumen's callbacks use, besides those of `RunningTrainer`.

    Attributes:
        plan: Length of the run and schedule of its validations, logs and saves.
        strategy: The strategy, which places tasks on devices and computes steps.
        callbacks: The callbacks of the run, in the order of their calls.
        run_directory: The directory that the run writes to, or None.
        fast_dev_run: The number of batches of a trial run; 0 in other runs.
        enable_checkpointing: True if the run saves checkpoints.
    """

    plan: Plan
    strategy: Strategy
    callbacks: list[Callback]
    run_directory: Path | None
    fast_dev_run: int
    enable_checkpointing: bool

    @property
    def run(self) -> Run:
        """Parts of the run in progress."""

    @property
    def progress(self) -> Progress:
        """Progress of the run; read only."""

    @property
    def processes(self) -> Processes:
        """Processes of the run."""

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """`ModelCheckpoint` that decides which checkpoint is best."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps in the present epoch."""

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Number of batches of each prediction loader."""

    @property
    def is_epoch_end(self) -> bool:
        """True if all batches of the epoch are done."""

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """Newest values for the progress bar."""

    def step_loss(self) -> torch.Tensor:
        """Return the mean loss of the step over all processes. Collective."""

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the step's gradient. Collective."""

    def request_stop_vote(self) -> None:
        """Have all processes agree, after `on_step_end`, on whether the run ends here."""

    def skip_update(self) -> None:
        """Skip the update of the step in progress."""

    def roll_back(self, before: int = 0, after: int = 0) -> None:
        """Undo the step in progress, and continue from a checkpoint without the step."""

    def save_checkpoint(self, filepath: str | PurePath) -> None:
        """Write a checkpoint of the run. Collective."""
