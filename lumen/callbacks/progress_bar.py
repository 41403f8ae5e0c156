"""Progress bar: a live bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any, ClassVar, final

from lumen.callbacks.base import Callback
from lumen.callbacks.display import Board, Display, Line, NoDisplay, choose_display, duration, number, size, speed
from lumen.callbacks.early_stopping import BestSoFar, monitored
from lumen.callbacks.throughput import Throughput, TimeLeft, memory_mb
from lumen.callbacks.used_trainer import UsedTrainer
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked
from lumen.metrics.step_values import HostCopy, for_the_bar
from lumen.task.task_module import TaskModule

_SPEED_WINDOW_S = 10.0
_NAMES = {"sanity": "sanity check", "validate": "validation"}  # Displayed names of stages; others have their own name.
_UNASKED_VALUES = 3  # Number of values shown for an evaluation that logs no value with prog_bar=True.


@final
class ProgressBar(Callback):
    """Callback that shows the step, values logged with `prog_bar=True` (else the loss), speed, memory and time left.

    Epochs are counted from 1: `epoch 2/30` is in progress, or complete if its bar is full. The bar covers the epoch, or
    the run if the run has at most one epoch. Speeds are means over the last 10 seconds, without evaluations. `data` is
    the share of time spent waiting for the loader. Memory is the peak of allocated tensors on CUDA, otherwise the RAM
    of the process. Between two refreshes a step costs one reading of the clock; the bar never synchronizes with a CUDA
    device.

    In a terminal, each validation leaves a line above the bar. The line marks the value that a `ModelCheckpoint` (or
    else an `EarlyStopping`) monitors if it is the best so far.

    Args:
        refresh_per_second: Refreshes per second in a terminal, > 0; fewer if drawing would take more than 1 % of the
            time. In a notebook, at most 2, each replacing the previous picture.
        plain_every_s: Without a terminal or notebook: seconds between two lines, >= 0. There is an extra line at the
            end and after a validation, except if an earlier validation got its line less than this time before.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "refresh_rate": "refresh_per_second counts in time, not in batches.",
        "console_kwargs": "It writes to stderr, in a notebook to its output.",
        "leave": "The last picture of training always stays.",
        "process_position": "Whatever is printed meanwhile stays above the bar.",
        "theme": "The bar has the terminal's own colours.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[int | None, ...]]] = {
        "refresh_rate": (None, 1, 100), "leave": (False,), "process_position": (0,), "console_kwargs": (None,),
    }  # fmt: skip

    @checked
    def __init__(self, refresh_per_second: float = 10.0, plain_every_s: float = 10.0) -> None:
        if not refresh_per_second > 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be more than 0, found {refresh_per_second}.")
        at_least(0, "ProgressBar", plain_every_s=plain_every_s)
        self.refresh_per_second = refresh_per_second
        self.plain_every_s = plain_every_s
        self._forget()

    def _forget(self) -> None:
        self._display: Display = NoDisplay()
        self._board: Board = {}
        self._due_at_s = math.inf
        self._validation_due_at_s = 0.0
        self._throughput = Throughput(_SPEED_WINDOW_S)
        self._training = False
        self._time_left = TimeLeft()
        self._best_step: int | None = None  # step of the newest validation, if it gave the best value so far
        self._look: tuple[Line, HostCopy[str]] | None = None
        self._step_values: dict[str, float] = {}
        self._epoch_names: dict[str, None] = {}  # an ordered set
        self._evaluation = _Pass("", None)

    def setup(self, trainer: UsedTrainer, task: TaskModule, stage: str) -> None:
        """Choose a display."""
        self._forget()
        if trainer.is_global_zero:
            self._display = choose_display(1 / self.refresh_per_second, self.plain_every_s)

    # ------------------------------------------------------------------ training

    def on_train_start(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Compute the length of the run and show the first line."""
        self._count_steps(trainer, 0, 0)
        self._training = True
        self._began_at_s = perf_counter()
        self._time_left = TimeLeft(trainer.global_step)
        self._best = BestSoFar(monitored(trainer))
        self._throughput.start(trainer)
        self._look_now(trainer, wait=True)
        self._display.draw(self._board)
        self._due_at_s = self._began_at_s + self._display.interval_s

    def on_train_epoch_start(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Count the run's steps again, because the size of the data may have changed."""
        self._count_steps(trainer, trainer.global_step, trainer.current_epoch)

    def _count_steps(self, trainer: UsedTrainer, done: int, epochs: int) -> None:
        """Set the number of the run's steps, `done` of which were made in whole epochs."""
        plan, per_epoch = trainer.plan, trainer.steps_per_epoch
        lengths, by_epochs = trainer.run.loaders.epoch_lengths(), None
        if lengths is not None and plan.max_epochs is not None:
            by_epochs = done + lengths.until(plan.max_epochs) - lengths.until(epochs)
        totals = [total for total in (plan.max_steps, by_epochs) if total is not None]
        self._total_steps = min(totals, default=None)
        self._bar_is_epoch = per_epoch is not None and (self._total_steps is None or per_epoch < self._total_steps)

    def on_step_checkpoint(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Show the step if a refresh is due."""
        if perf_counter() < self._due_at_s or trainer.run.ending.is_here:  # `on_train_end` shows the last line.
            return
        if self._look is None:
            self._take_look(trainer)
        if self._take_in_look():
            self._show()
        else:
            self._due_at_s = 0.0  # The values are still being copied: try again after the next step.

    def on_train_end(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Show the step at which the run ended."""
        self._look_now(trainer, wait=True)
        line = self._board["training"]
        line.fraction, line.tail = None, f"took {duration(perf_counter() - self._began_at_s)}"
        self._show()
        self._close()

    def _look_now(self, trainer: UsedTrainer, *, wait: bool = False) -> None:
        self._take_look(trainer)
        self._take_in_look(wait=wait)

    def _take_look(self, trainer: UsedTrainer) -> None:
        """Record the progress of the run and begin to copy its values to the host."""
        self._epoch_names |= dict.fromkeys(trainer.run.log.train.epoch_names(for_the_bar))
        self._look = self._position(trainer), HostCopy(trainer.progress_bar_metrics)

    def _take_in_look(self, *, wait: bool = False) -> bool:
        """Put the recorded progress on the board if its values have arrived."""
        if self._look is None or not (wait or self._look[1].is_here()):
            return False
        line, host_copy = self._look
        self._look = None
        self._step_values |= host_copy.read()
        line.values = self._step_values | line.values
        self._board["training"] = line
        return True

    def _show(self) -> None:
        self._display.show(self._board)
        self._due_at_s = perf_counter() + self._display.interval_s

    def _position(self, trainer: UsedTrainer) -> Line:
        progress, rates = trainer.progress, self._throughput.measure(trainer)
        left_s = self._time_left.estimate(trainer, self._total_steps)
        newest, costs = trainer.run.values.newest, [size(memory_mb(trainer.strategy.device))]
        if rates.steps_per_s:
            samples = f"{number(rates.samples_per_s, 3)} samples/s"
            waiting = f"data {100 * rates.data_wait_share:.0f} %"
            costs = [speed(rates.steps_per_s, "step"), samples, waiting, *costs]
        epoch = _of(progress.epochs_begun, trainer.plan.max_epochs)
        return Line(
            head=f"step {_of(progress.step, self._total_steps)} · epoch {epoch}",
            fraction=self._fraction(trainer),
            tail="" if left_s is None else f"{duration(math.ceil(left_s))} left",
            values={name: newest[name] for name in self._epoch_names if name in newest},
            costs=costs,
            best=self._best.name if self._best_step == progress.step else None,
        )

    def _fraction(self, trainer: UsedTrainer) -> float | None:
        """Return the completed fraction of the epoch, or else of the run, 0 to 1; None if the length is unknown."""
        progress, plan = trainer.progress, trainer.plan
        if self._bar_is_epoch:
            complete = progress.epoch > 0 and not progress.in_epoch
            return 1.0 if complete else progress.batches / max(trainer.num_training_batches, 1)
        if self._total_steps is not None:
            return progress.step / max(self._total_steps, 1)
        return None if plan.max_time_s is None else progress.elapsed_s / plan.max_time_s

    # ------------------------------------------------------------------ evaluations

    def on_validation_start(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Show that an evaluation begins."""
        self._time_left.pause()
        if self._training:
            self._look_now(trainer)
        self._throughput.pause()
        stage = trainer.run.stage
        self._evaluation = _Pass(_NAMES.get(stage, stage), trainer.run.loaders.evaluation_batches(stage))
        self._board["evaluation"] = self._evaluation.line()
        self._display.draw(self._board)
        self._due_at_s = perf_counter() + self._display.interval_s

    def on_validation_batch_end(
        self, trainer: UsedTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count a batch."""
        together = trainer.strategy.data_world_size  # The other processes complete their batches at the same time.
        done = self._evaluation.done + together
        self._evaluation.done = done if self._evaluation.total is None else min(done, self._evaluation.total)
        if perf_counter() >= self._due_at_s:
            self._take_in_look()
            self._board["evaluation"] = self._evaluation.line()
            self._show()

    def on_validation_end(self, trainer: UsedTrainer, task: TaskModule) -> None:
        """Show the values, or that a prediction is complete."""
        self._throughput.resume()
        self._time_left.resume()
        if trainer.sanity_checking:
            del self._board["evaluation"]
            self._display.draw(self._board)
            return
        names = _evaluation_names(trainer)
        if self._training:
            self._epoch_names |= dict.fromkeys(names)
            del self._board["evaluation"]
            values = self._values_of_validation(trainer, names)
            self._look_now(trainer, wait=True)
            self._display.draw(self._board)
            training = self._board["training"]
            self._display.keep(Line(training.head, values=values, best=training.best))
            if (now := perf_counter()) >= self._validation_due_at_s:
                self._due_at_s, self._validation_due_at_s = 0.0, now + self._display.interval_s
        else:
            values = {name: trainer.run.values.newest[name] for name in names}
            self._board["evaluation"] = self._evaluation.line(values, over=True)
            self._show()
            self._close()

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def _values_of_validation(self, trainer: UsedTrainer, names: list[str]) -> dict[str, float]:
        """Return the named values and a new value of the monitor; record if the latter is the best so far."""
        newest, monitor = trainer.run.values.newest, self._best.name
        if monitor is not None and monitor in trainer.run.values.updated and monitor not in names:
            names = [*names, monitor]
        values = {name: newest[name] for name in names}
        self._best_step = trainer.global_step if self._best.is_here(values) else None
        return values

    # ------------------------------------------------------------------ the end

    def on_exception(self, trainer: UsedTrainer, task: TaskModule, exception: BaseException) -> None:
        """Show the step at which a stopped run ended, and restore the terminal."""
        if self._training and trainer.run.ending.vote.requested and not trainer.run.log.in_train_step:
            if self._board.pop("evaluation", None) is not None:
                self._throughput.resume()
                self._time_left.resume()
            self._look_now(trainer)
            self._show()
        self._close()

    def teardown(self, trainer: UsedTrainer, task: TaskModule, stage: str) -> None:
        """Restore the terminal."""
        self._close()

    def _close(self) -> None:
        self._display.close()
        self._training = False
        self._due_at_s = math.inf


def _evaluation_names(trainer: UsedTrainer) -> list[str]:
    """Return the names of the evaluation that ends, logged with `prog_bar=True`; if there are none, the first three."""
    metrics = trainer.run.log.stage
    if metrics is None or not trainer.run.values.are_shown:
        return []
    return metrics.epoch_names(for_the_bar) or metrics.epoch_names()[:_UNASKED_VALUES]


@final
class _Pass:
    """Evaluation in progress."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.began_at_s = perf_counter()

    def line(self, values: dict[str, float] | None = None, *, over: bool = False) -> Line:
        """Return the line that shows the evaluation."""
        seconds = perf_counter() - self.began_at_s
        fraction, tail = None, f"took {duration(seconds)}" if over else ""
        if self.total and not over:
            fraction = self.done / self.total
            left_s = (self.total - self.done) * seconds / self.done if self.done else None
            tail = "" if left_s is None else f"{duration(math.ceil(left_s))} left"
        return Line(f"{self.name} {_of(self.done, self.total)}", fraction, tail, values or {}, [])


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"
