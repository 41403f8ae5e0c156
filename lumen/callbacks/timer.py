"""Measures how long the stages of a run take, and ends training when its time is used up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

from lumen.callbacks.base import Callback
from lumen.callbacks.used_trainer import UsedTrainer
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import checked
from lumen.run.plan import Duration, duration_s
from lumen.task.task_module import TaskModule

_STAGES = ("train", "validate", "test", "predict")


@final
class Timer(Callback):
    """Tells the time of each stage: "train", "validate", "test" and "predict".

    Training is timed over all resumed parts of a run, the validations in it included; of the other stages the last
    one counts. `Trainer(max_time=...)` ends a run after a time too; this one may wait for the end of the epoch, and
    the minimum of steps and epochs comes before it.

    Args:
        duration: Time of training after which it ends: "DD:HH:MM:SS", a timedelta, or its keywords; None: only measure.
        interval: "step" ends it at the next boundary, "epoch" at the end of the epoch.
    """

    stops_at_steps = False  # it asks for an agreement where it does

    NEUTRAL: ClassVar[Mapping[str, tuple[bool, ...]]] = {"verbose": (True, False)}  # that it stops is always said

    @checked
    def __init__(self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step") -> None:
        self.interval = interval
        self._duration_s = None if duration is None else duration_s("Timer: duration", duration)
        self._started_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._trained_s = 0.0  # up to the last boundary
        self._has_stopped = False
        self._trainer: UsedTrainer | None = None

    def start_time(self, stage: str = "train") -> float | None:
        """When a stage began, in seconds of `time.monotonic`; None before."""
        return self._started_s.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """When a stage ended, in seconds of `time.monotonic`; None before, and while it goes on."""
        return self._ended_s.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds that a stage has taken: training up to its last boundary, the others up to now or their end."""
        if _known(stage) == "train":
            return self._trained_s
        if stage not in self._started_s:
            return 0.0
        return self._ended_s.get(stage, time.monotonic()) - self._started_s[stage]

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds that a stage has left of the duration, negative if it took longer; None without one."""
        return None if self._duration_s is None else self._duration_s - self.time_elapsed(stage)

    def setup(self, trainer: UsedTrainer, task: TaskModule, stage: str) -> None:
        """Start anew."""
        if stage == "fit":
            self._trained_s, self._has_stopped, self._trainer = 0.0, False, trainer

    def on_train_start(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Start the clock; a resumed run may have no time left."""
        self._start("train")
        self._look(trainer)

    def on_step_end(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """End training if it is time to; the clock is that of all ranks."""
        if self._look(trainer):
            trainer.request_agreement()

    def on_train_end(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Stop the clock."""
        self._ended_s["train"] = time.monotonic()

    def on_validation_start(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Start the clock of an evaluation."""
        self._start(_of_evaluation(trainer))

    def on_validation_end(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Stop the clock of an evaluation."""
        self._ended_s[_of_evaluation(trainer)] = time.monotonic()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: UsedTrainer, task: TaskModule, exception: BaseException) -> None:
        """Stop every clock."""
        for stage in self._started_s:
            self._ended_s.setdefault(stage, time.monotonic())

    def state_dict(self) -> dict[str, Any]:
        """Whether this callback ended the run; its time is part of every checkpoint."""
        return {"has_stopped": self._has_stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let a run that was ended here go on if it has been given more time."""
        assert self._trainer is not None
        self._trained_s = self._trainer.progress.elapsed_s
        self._has_stopped = state["has_stopped"] and self._is_used_up()
        if state["has_stopped"] and not self._has_stopped:
            self._trainer.should_stop = False

    def _look(self, trainer: UsedTrainer) -> bool:
        """Wish to stop where it is time to. Returns whether that is new."""
        progress = trainer.progress
        self._trained_s = progress.elapsed_s
        asked = self.interval == "step" or not progress.in_epoch
        if not (asked and self._is_used_up()) or trainer.should_stop:
            return False
        _log.info("Timer: the %g s of training are used up (%.1f s)", self._duration_s, self._trained_s)
        trainer.should_stop = self._has_stopped = True
        return True

    def _is_used_up(self) -> bool:
        return self._duration_s is not None and self._trained_s >= self._duration_s

    def _start(self, stage: str) -> None:
        self._started_s[stage] = time.monotonic()
        self._ended_s.pop(stage, None)


def _of_evaluation(trainer: UsedTrainer) -> str:
    return "validate" if trainer.sanity_checking else trainer.run.stage


def _known(stage: str) -> str:
    if stage not in _STAGES:
        raise ConfigError(f"Timer: expected a stage out of {', '.join(_STAGES)}, found {stage!r}.")
    return stage
