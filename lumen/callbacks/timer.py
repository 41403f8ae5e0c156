"""Timer of a run's stages, with an optional time limit for training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.run.plan import Duration, parse_duration_s
from lumen.task.task_module import TaskModule

_STAGES = ("train", "validate", "test", "predict")


@final
class Timer(Callback):
    """Callback that measures the time of each stage: "train", "validate", "test" and "predict".

    The time of training covers all resumed parts of a run, including validations. For the other stages, the most recent
    evaluation counts. `Trainer(max_time=...)` also ends a run after a time. This callback may wait for the end of the
    epoch, and respects `min_steps` and `min_epochs`.

    Args:
        duration: Time of training after which it ends: "DD:HH:MM:SS", a timedelta, or its keywords; None: only measure.
        interval: "step": stop at the end of the step; "epoch": stop at the end of the epoch.
    """

    may_stop_at_steps = False  # `on_step_end` requests an agreement when it stops.

    NEUTRAL: ClassVar[Mapping[str, tuple[bool, ...]]] = {"verbose": (True, False)}  # A stop is always logged.

    @check_arguments
    def __init__(self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step") -> None:
        self.interval = interval
        self._duration_s = None if duration is None else parse_duration_s("Timer: duration", duration)
        self._started_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._trained_s = 0.0  # seconds of training up to the end of the last step
        self._has_stopped = False
        self._trainer: CallbackTrainer | None = None

    def start_time(self, stage: str = "train") -> float | None:
        """Return the start of a stage in seconds of `time.monotonic`; None before it."""
        return self._started_s.get(_check_stage(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the end of a stage in seconds of `time.monotonic`; None before and during the stage."""
        return self._ended_s.get(_check_stage(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds of a stage: training up to its last complete step, other stages up to now or their end."""
        if _check_stage(stage) == "train":
            return self._trained_s
        if stage not in self._started_s:
            return 0.0
        return self._ended_s.get(stage, time.monotonic()) - self._started_s[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds left of `duration` for a stage, negative if it took longer; None without `duration`."""
        return None if self._duration_s is None else self._duration_s - self.time_elapsed(stage)

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Reset the callback."""
        if stage == "fit":
            self._trained_s, self._has_stopped, self._trainer = 0.0, False, trainer

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Start the clock; a resumed run may have no time left."""
        self._start_stage("train")
        self._stop_if_used_up(trainer)

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """End training if the time is used up; all ranks use the same clock."""
        if self._stop_if_used_up(trainer):
            trainer.request_stop_vote()

    def on_train_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Stop the clock."""
        self._ended_s["train"] = time.monotonic()

    def on_validation_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Start the clock of an evaluation."""
        self._start_stage(_get_evaluation_stage(trainer))

    def on_validation_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Stop the clock of an evaluation."""
        self._ended_s[_get_evaluation_stage(trainer)] = time.monotonic()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: CallbackTrainer, task: TaskModule, exception: BaseException) -> None:
        """Stop every clock."""
        for stage in self._started_s:
            self._ended_s.setdefault(stage, time.monotonic())

    def state_dict(self) -> dict[str, Any]:
        """Return a flag that says if this callback has stopped the run; checkpoints contain the elapsed time anyway."""
        return {"has_stopped": self._has_stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let a run that this callback has stopped continue if the time limit is longer now."""
        assert self._trainer is not None
        self._trained_s = self._trainer.progress.elapsed_s
        self._has_stopped = state["has_stopped"] and self._is_time_used_up()
        if state["has_stopped"] and not self._has_stopped:
            self._trainer.should_stop = False

    def _stop_if_used_up(self, trainer: CallbackTrainer) -> bool:
        """Set `trainer.should_stop` if the time is used up. Return True if it is used up, equal on all ranks."""
        progress = trainer.progress
        self._trained_s = progress.elapsed_s
        may_stop = self.interval == "step" or not progress.in_epoch
        if not (may_stop and self._is_time_used_up()):
            return False
        if not trainer.should_stop:
            _log.info("Timer: time limit of %g s of training reached (%.1f s)", self._duration_s, self._trained_s)
            trainer.should_stop = self._has_stopped = True
        return True

    def _is_time_used_up(self) -> bool:
        return self._duration_s is not None and self._trained_s >= self._duration_s

    def _start_stage(self, stage: str) -> None:
        self._started_s[stage] = time.monotonic()
        self._ended_s.pop(stage, None)


def _get_evaluation_stage(trainer: CallbackTrainer) -> str:
    return "validate" if trainer.sanity_checking else trainer.run.stage


def _check_stage(stage: str) -> str:
    if stage not in _STAGES:
        raise ConfigError(f"Timer: expected one of {', '.join(_STAGES)}, found {stage!r}.")
    return stage
