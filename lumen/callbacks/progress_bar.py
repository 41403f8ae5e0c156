"""Show how a run goes: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.callbacks.base import Callback
from lumen.callbacks.display import Board, Display, Line, Live, NoDisplay, Plain, duration, number, size, speed
from lumen.callbacks.throughput import Throughput, memory_mb
from lumen.errors import ConfigError
from lumen.metrics import LogOptions, StageMetrics

if TYPE_CHECKING:
    from lumen.run import Run
    from lumen.task import TaskModule
    from lumen.trainer import Trainer

_SPEED_WINDOW_S = 10.0
_UNASKED_VALUES = 3  # of an evaluation that logs nothing with prog_bar=True


@final
class ProgressBar(Callback):
    """Shows the step, what was logged with `prog_bar=True` (else the loss), speed, memory and the time left.

    The bar is that of the epoch in progress, or of the run if that has no more than one epoch. Speeds are those of the
    last 10 seconds, evaluations left out; `data` is the share of time spent waiting for the loader; memory is on CUDA
    the peak of what tensors took, elsewhere what the process holds in RAM. Between two looks a step costs one reading
    of the clock, and a CUDA device is never waited for.

    Args:
        refresh_per_second: Looks per second in a terminal, > 0; fewer where drawing would take more than 1 % of the
            time.
        plain_every_s: Without a terminal: seconds between two lines, >= 0. There is always one after a validation and
            one at the end.
    """

    def __init__(self, refresh_per_second: float = 10.0, plain_every_s: float = 10.0) -> None:
        if not refresh_per_second > 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be more than 0, found {refresh_per_second}.")
        if not plain_every_s >= 0:
            raise ConfigError(f"ProgressBar: plain_every_s must be at least 0, found {plain_every_s}.")
        self.refresh_per_second = refresh_per_second
        self.plain_every_s = plain_every_s
        self._forget()

    def _forget(self) -> None:
        self._display: Display = NoDisplay()
        self._board = Board()
        self._due_at_s = math.inf
        self._throughput = Throughput(_SPEED_WINDOW_S)
        self._training = False
        self._total_steps: int | None = None
        self._bar_is_epoch = False
        self._began_at_s = 0.0
        self._rated_from: tuple[float, int] | None = None
        self._look: tuple[Line, _Arrival] | None = None
        self._step_values: dict[str, float] = {}
        self._epoch_names: dict[str, None] = {}  # a set that keeps its order
        self._evaluation = ""
        self._batches = 0
        self._total_batches: int | None = None

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Choose a display."""
        self._forget()
        if trainer.is_global_zero:
            self._display = Live(1 / self.refresh_per_second) if Live.is_possible() else Plain(self.plain_every_s)

    # ------------------------------------------------------------------ training

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Find out how long the run is."""
        run, plan = trainer.run, trainer.plan
        assert run.train_feed is not None
        per_epoch = run.train_feed.steps(plan.limit("train", run.train_feed))
        totals = (plan.max_steps, per_epoch and plan.max_epochs and per_epoch * plan.max_epochs)
        self._total_steps = min((total for total in totals if total is not None), default=None)
        self._bar_is_epoch = per_epoch is not None and (self._total_steps is None or per_epoch < self._total_steps)
        self._training = True
        self._began_at_s = perf_counter()
        self._throughput.start(run)
        self._take_look(trainer)
        self._take_in_look()
        self._display.draw(self._board)
        self._due_at_s = self._began_at_s + self._display.interval_s

    def on_boundary(self, trainer: Trainer, task: TaskModule) -> None:
        """Show the step if it is time to."""
        if perf_counter() < self._due_at_s:
            return
        if self._look is None:
            self._take_look(trainer)
        if self._take_in_look():
            self._show()
        else:
            self._due_at_s = 0.0  # the values are on their way: look again after the next step

    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Show where the run ended."""
        self._take_look(trainer)
        self._take_in_look(wait=True)
        line = self._board.training
        assert line is not None
        line.fraction, line.tail = None, f"took {duration(perf_counter() - self._began_at_s)}"
        self._show()
        self._close()

    def _take_look(self, trainer: Trainer) -> None:
        """Note where the run is and ask for its values."""
        run = trainer.run
        values: Mapping[str, float | torch.Tensor] = run.train_metrics.step_values(_asked_for)
        if not values and run.last_loss is not None:
            values = {"loss": run.last_loss}
        self._epoch_names |= dict.fromkeys(run.train_metrics.epoch_names(_asked_for))
        self._look = self._position(trainer), _Arrival(values)

    def _take_in_look(self, *, wait: bool = False) -> bool:
        """Put what was looked at last on the board, if its values are here."""
        if self._look is None or not (wait or self._look[1].is_here()):
            return False
        line, arrival = self._look
        self._look = None
        self._step_values |= arrival.read()
        line.values = self._step_values | line.values
        self._board.training = line
        return True

    def _show(self) -> None:
        self._display.show(self._board)
        self._due_at_s = perf_counter() + self._display.interval_s

    def _position(self, trainer: Trainer) -> Line:
        run = trainer.run
        progress, plan = run.progress, run.plan
        step = f"step {_of(progress.step, self._total_steps)}"
        epoch = f"epoch {_of(progress.epoch, plan.max_epochs)}"
        left_s = self._seconds_left(run)
        rates = self._throughput.measure(run)
        speeds = [speed(rates.steps_per_s, "step"), f"{number(rates.samples_per_s, 3)} samples/s"]
        return Line(
            heads=[step, epoch] if self._bar_is_epoch else [epoch, step],
            fraction=self._fraction(trainer),
            tail="" if left_s is None else f"{duration(left_s)} left",
            values={name: run.metrics[name] for name in self._epoch_names if name in run.metrics},
            costs=[*(speeds if rates.steps_per_s else []), f"data {rates.data_wait_share:.0%}"],
        )
