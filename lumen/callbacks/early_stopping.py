"""Early stopping, and the best value so far of a run's monitor."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, final

import torch

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.callbacks.checkpoint_names import as_score
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.task.task_module import TaskModule


@final
class EarlyStopping(Callback):
    """Callback that stops training when the monitor has not improved for `patience` values.

    If `min_epochs` or `min_steps` of the trainer is not reached yet, training continues until then. A new best value in
    the meantime cancels the stop.

    Args:
        monitor: A logged name, such as `val_loss`. The callback checks each new value of an epoch or a validation, but
            not the values of single steps.
        min_delta: An improvement must be larger than this, >= 0.
        patience: Number of values without improvement to accept before training ends, >= 0.
        verbose: Log how each value compares, in the terminal and `run.log`; False: only at log_level DEBUG.
        mode: "min": smaller is better; "max": larger is better.
        strict: True: raise an error if the monitor was never logged by the end of an epoch with validation.
        check_finite: Stop at a NaN or infinite value.
        stopping_threshold: Stop at once when the value is better than this.
        divergence_threshold: Stop at once when the value is worse than this.
        check_on_train_epoch_end: True: check only at the end of an epoch, and only if there is a new value. Default:
            check each new value.
        log_rank_zero_only: Accepted for compatibility with Lightning: only the first process logs.

    Attributes:
        wait_count: Number of values since the best one.
        stopped_epoch: Epoch, from 0, in which the callback stopped training; 0 also without a stop.
        stopping_reason: "not_stopped", "stopping_threshold", "divergence_threshold", "patience_exhausted" or
            "non_finite_metric".
        stopping_reason_message: Reason for the stop as text, or None.
    """

    may_stop_at_steps = False  # `on_step_end` requests an agreement when it stops.

    @check_arguments
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = True,
    ) -> None:
        if min_delta < 0 or patience < 0:
            raise ConfigError(f"EarlyStopping: min_delta and patience must be >= 0, found {min_delta} and {patience}.")
        self.monitor, self.mode, self.min_delta, self.patience = monitor, mode, min_delta, patience
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end, self.log_rank_zero_only = check_on_train_epoch_end, log_rank_zero_only
        self._sign = 1.0 if mode == "min" else -1.0
        self._reset_state()

    def _reset_state(self) -> None:
        self._best = self._sign * math.inf
        self._unseen, self._epoch = False, 0
        self.wait_count = 0
        self._pending: str | None = None  # reason to stop once `min_epochs` and `min_steps` are reached
        self.stopped_epoch, self.stopping_reason = 0, "not_stopped"
        self.stopping_reason_message: str | None = None

    @property
    def best_score(self) -> torch.Tensor:
        """Best value of the monitor so far: a float64 tensor without dimensions; infinite before the first value."""
        return as_score(self._best)

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Reset the callback."""
        if stage == "fit":
            self._reset_state()

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Remember the epoch in which training begins."""
        self._epoch = trainer.current_epoch

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Check the monitor if it has a new value."""
        ends_epoch, self._epoch = trainer.current_epoch != self._epoch, trainer.current_epoch
        self._unseen |= self.monitor in trainer.run.values.updated
        if self._unseen and (ends_epoch or not self.check_on_train_epoch_end):
            self._unseen = False
            value = trainer.run.values.newest[self.monitor]
            judged = self._find_stop_reason(value)
            if judged is not None or self.wait_count == 0:  # A new best value cancels an earlier decision.
                self.stopping_reason, self._pending = judged or ("not_stopped", None)
            level, counted = logging.INFO if self.verbose else logging.DEBUG, (self.wait_count, self.patience)
            _log.log(level, "early stopping: %s %g, best %g, %d of %d values since", self.monitor, value,
                     self._best, *counted)  # fmt: skip
        if self._pending is not None and trainer.run.ending.is_minimum_reached:
            self.stopped_epoch = trainer.current_epoch - ends_epoch
            self.stopping_reason_message, self._pending = f"{self.monitor}: {self._pending}", None
            _log.info("early stopping: %s", self.stopping_reason_message)
            trainer.should_stop = True
            trainer.request_stop_vote()

    def on_train_epoch_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Raise an error if the monitor had no value in the previous epoch, whose checkpoint is saved by now."""
        if self.strict and trainer.current_epoch > 0:
            trainer.run.values.check_monitor("EarlyStopping", self.monitor)

    def on_train_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Raise an error if the monitor never had a value."""
        if self.strict:
            trainer.run.values.check_monitor("EarlyStopping", self.monitor)

    def _find_stop_reason(self, value: float) -> tuple[str, str] | None:
        """Return the reason to stop at this value, as an identifier and as text, or None."""
        distance = self._sign * value
        if self.check_finite and not math.isfinite(value):
            return "non_finite_metric", f"the value {value} is not finite"
        if self.divergence_threshold is not None and distance > self._sign * self.divergence_threshold:
            return "divergence_threshold", f"{value:g} diverged beyond {self.divergence_threshold:g}"
        if distance < self._sign * self._best - self.min_delta:
            self._best, self.wait_count = value, 0
        else:
            self.wait_count += 1
        if self.stopping_threshold is not None and distance < self._sign * self.stopping_threshold:
            return "stopping_threshold", f"{value:g} reached the threshold {self.stopping_threshold:g}"
        if self.wait_count == 0 or self.wait_count < self.patience:
            return None
        return "patience_exhausted", f"no improvement on {self._best:g} in the last {self.wait_count} values"

    @property
    def state_key(self) -> str:
        """Class name with monitor and mode, because the best value of a different monitor is not comparable."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of values since, and the reason of a stop."""
        return {
            "best_score": self._best,
            "wait_count": self.wait_count,
            "pending": self._pending,
            "unseen": self._unseen,
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason": self.stopping_reason,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value and the number of values since."""
        self._best = state["best_score"]
        self.wait_count = state["wait_count"]
        self._pending = state["pending"]
        self._unseen = state.get("unseen", False)
        self.stopped_epoch = state["stopped_epoch"]
        self.stopping_reason = state.get("stopping_reason", "not_stopped")
        self.stopping_reason_message = state["stopping_reason_message"]


class MonitorState(NamedTuple):
    """Logged name that says how good a run is.

    Attributes:
        name: Name of the logged value.
        mode: "min": smaller is better; "max": larger is better.
        best: Best value so far; None: no value yet.
    """

    name: str
    mode: str
    best: float | None


def find_monitor(trainer: CallbackTrainer) -> MonitorState | None:
    """Return the monitor of the deciding `ModelCheckpoint`, else of the first `EarlyStopping`, or None.

    Args:
        trainer: A trainer in `fit`, with all its callbacks.
    """
    saver = trainer.checkpoint_callback
    if saver is not None and saver.monitor is not None:
        score = saver.best_model_score
        return MonitorState(saver.monitor, saver.mode, None if score is None else float(score))
    stopper = next((each for each in trainer.callbacks if isinstance(each, EarlyStopping)), None)
    if stopper is None:
        return None
    best = float(stopper.best_score)
    return MonitorState(stopper.monitor, stopper.mode, best if math.isfinite(best) else None)


@final
class BestValueTracker:
    """Tracker of the best value of a run's monitor.

    Args:
        found: The monitor, with the best value of earlier parts of the run; None: no monitor.

    Attributes:
        name: The name of the monitor, or None.
    """

    def __init__(self, found: MonitorState | None) -> None:
        self.name = None if found is None else found.name
        self._sign = -1.0 if found is not None and found.mode == "max" else 1.0
        self._best = None if found is None else found.best

    def has_new_best(self, values: Mapping[str, float]) -> bool:
        """Return True if new values contain the best value of the monitor so far."""
        value = math.nan if self.name is None else values.get(self.name, math.nan)
        if math.isnan(value) or (self._best is not None and self._sign * value >= self._sign * self._best):
            return False
        self._best = value
        return True
