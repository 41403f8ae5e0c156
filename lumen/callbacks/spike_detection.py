"""Detection of spikes in loss or gradient norm: skips the update, rolls back to a checkpoint, or ends the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

from torch.optim import Optimizer

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.console import logger as _log
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.task.task_module import TaskModule


@final
class SpikeDetection(Callback):
    """Callback that checks the loss or gradient norm of each step and prevents the update of a spike.

    A value is a spike if its distance above the mean of the last `window` values is at least `atol`, and at least
    `rtol` times the mean. Spikes do not enter the window. The update of a spike is skipped: its batches count as used,
    the step number does not increase and no schedule moves, as after an overflow in fp16. Values cover the whole step,
    all micro-batches and processes, so all processes decide alike. The window is saved: a resumed run decides like an
    uninterrupted run.

    On CUDA, each step waits for its value on the host. With several processes, monitoring the loss costs an all-reduce
    of one number. A loss that is not finite is not a spike: it raises an error, or is handled by the gradient scaler in
    fp16.

    Args:
        monitor: "loss": the step's mean loss; "grad_norm": the norm of its gradient before clipping.
        window: Number of values in the mean, at least 1.
        warmup: Values to see before the first decision, at least 1.
        atol: Least distance from the mean, >= 0; None: any.
        rtol: Least distance as a multiple of the mean, >= 0: 2.0 means a value three times as large; None: any.
        action: "skip": training continues with the next batches; "rollback": training resumes from a checkpoint,
            without the steps around the spike; "stop": training ends before the update.
        max_in_a_row: Number of consecutive spikes that are skipped. A longer series raises an error.
        before: Steps before a spike that a rollback leaves out with it, >= 0. The run resumes from the newest
            checkpoint before these steps, see `Trainer.roll_back`.
        after: Steps after the spike that a rollback leaves out too, >= 0.
        max_rollbacks: Number of rollbacks of a run; a further one raises an error.

    Attributes:
        spikes: Number of spikes; spikes before a rollback count only if the checkpoint includes them.

    Raises:
        ConfigError: A value is out of range, or neither `atol` nor `rtol` is given.
        TrainingError: The spikes in `fit` exceed `max_in_a_row` or `max_rollbacks`.
    """

    may_stop_at_steps = False  # `on_step_end` requests an agreement when it stops.

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "mode": "Leave it out: a loss spikes upwards.",
        "finite_only": "Leave it out: a loss that is not finite is always an error.",
        "exclude_batches_path": "Leave it out: the update is skipped at once, so the run need not restart.",
    }

    @check_arguments
    def __init__(
        self,
        monitor: Literal["loss", "grad_norm"] = "loss",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        action: Literal["skip", "rollback", "stop"] = "skip",
        max_in_a_row: int = 10,
        before: int = 100,
        after: int = 100,
        max_rollbacks: int = 3,
    ) -> None:
        check_at_least(1, window=window, warmup=warmup, max_in_a_row=max_in_a_row, max_rollbacks=max_rollbacks)
        check_at_least(0, before=before, after=after)
        if atol is None and rtol is None:
            raise ConfigError("SpikeDetection: set atol or rtol, the distance of a spike from the mean.")
        if min(atol or 0.0, rtol or 0.0) < 0:
            raise ConfigError(f"SpikeDetection: atol and rtol must be >= 0, found {atol} and {rtol}.")
        self.monitor, self.window, self.warmup, self.atol, self.rtol = monitor, window, warmup, atol, rtol
        self.needs_step_loss = monitor == "loss"
        self.action, self.max_in_a_row = action, max_in_a_row
        self.before, self.after, self.max_rollbacks = before, after, max_rollbacks
        self._reset_state()

    def _reset_state(self) -> None:
        self.spikes = 0
        self._values: list[float] = []
        self._seen = self._in_a_row = 0
        self._is_watching = self._should_stop = False

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Reset the callback."""
        if stage == "fit":
            self._reset_state()
            if not task.automatic_optimization:
                raise ConfigError(
                    "SpikeDetection: a task with automatic_optimization = False makes its updates itself. Decide in "
                    "training_step whether to call the optimizer's step, and remove this callback."
                )
            if self.action == "rollback" and not (trainer.enable_checkpointing or trainer.fast_dev_run):
                raise ConfigError(
                    "SpikeDetection(action='rollback') needs checkpoints, but this run saves none. Remove "
                    "enable_checkpointing=False, or use action='skip'."
                )

    def on_before_zero_grad(self, trainer: CallbackTrainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Note that a step begins."""
        self._is_watching = True

    def on_before_optimizer_step(self, trainer: CallbackTrainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Decide about the update, equally on every rank."""
        if not self._is_watching:  # An optimizer with a closure evaluates the same step again.
            return
        self._is_watching = False
        value = float(trainer.step_loss() if self.monitor == "loss" else trainer.gradient_norm())
        if not math.isfinite(value):
            return
        mean = sum(self._values) / max(len(self._values), 1)
        above, least = value - mean, max(self.atol or 0.0, (self.rtol or 0.0) * abs(mean))
        if self._seen >= self.warmup and above > 0 and above >= least:
            self._handle_spike(trainer, value, mean)
            return
        self._in_a_row = 0
        self._seen += 1
        self._values = [*self._values, value][-self.window :]

    def _handle_spike(self, trainer: CallbackTrainer, value: float, mean: float) -> None:
        self.spikes += 1
        self._in_a_row += 1
        description = f"{self.monitor} {value:g}, the mean of the last {len(self._values)} is {mean:g}"
        if self.action == "rollback" and not trainer.fast_dev_run:
            self._roll_back(trainer, description)
            return
        if self._in_a_row > self.max_in_a_row:
            raise TrainingError(
                f"SpikeDetection: {self._in_a_row} updates in a row after step {trainer.global_step} are spikes: "
                f"{description}. Training does not recover. Lower the learning rate, resume from an earlier "
                "checkpoint, or increase atol, rtol or max_in_a_row."
            )
        self._should_stop = self.action == "stop"
        _log.warning(
            "spike: %s: skipping the update after step %d%s",
            description, trainer.global_step, ", and ending the run" if self._should_stop else "",
        )  # fmt: skip
        trainer.skip_update()

    def _roll_back(self, trainer: CallbackTrainer, description: str) -> None:
        if len(trainer.progress.left_out) >= self.max_rollbacks:
            raise TrainingError(
                f"SpikeDetection: the run was rolled back {self.max_rollbacks} times, and there is a further spike "
                f"after step {trainer.global_step}: {description}. Lower the learning rate, exclude more steps "
                "(before, after), or increase atol, rtol or max_rollbacks."
            )
        _log.warning("spike: %s: rolling back, without the update after step %d", description, trainer.global_step)
        trainer.roll_back(self.before, self.after)

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """End the run after a spike if `action` is "stop"."""
        if self._should_stop:
            self._should_stop = False
            trainer.should_stop = True
            trainer.request_stop_vote()

    @property
    def state_key(self) -> str:
        """Class name with the monitor, because values of a different monitor are not comparable."""
        return self._generate_state_key(monitor=self.monitor)

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counts."""
        return {
            "values": self._values, "seen": self._seen, "in_a_row": self._in_a_row, "spikes": self.spikes,
            "should_stop": self._should_stop,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the window and the counts."""
        self._values = state["values"][-self.window :]
        self._seen, self._in_a_row, self.spikes = state["seen"], state["in_a_row"], state["spikes"]
        self._should_stop = state["should_stop"]
