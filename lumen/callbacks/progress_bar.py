"""Progress bar: a live bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, final

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.callbacks.display import (
    Board,
    Display,
    NoDisplay,
    ProgressLine,
    choose_display,
    format_duration,
    format_megabytes,
    format_number,
    format_speed,
)
from lumen.callbacks.early_stopping import BestValueTracker, find_monitor
from lumen.callbacks.throughput import Throughput, TimeEstimator, measure_memory_mb
from lumen.console import log_to_files, logger
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.metrics.step_values import HostCopy, is_for_progress_bar
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    import torch

_SPEED_WINDOW_S = 10.0
_NAMES = {"sanity": "sanity check", "validate": "validation"}  # Displayed names of stages; others have their own name.
_MAX_DEFAULT_VALUES = 3  # Number of values shown for an evaluation that logs no value with prog_bar=True.


class ProgressBar(Callback):
    """Callback that shows the step, values logged with `prog_bar=True` (else the loss), speed, memory and time left.

    Epochs are counted from 1: `epoch 2/30` is in progress, or complete if its bar is full. The bar covers the epoch, or
    the run if the run has at most one epoch. Speeds are means over the last 10 seconds, without evaluations. `data` is
    the share of time spent waiting for the loader. Memory is the peak of allocated tensors on CUDA, otherwise the RAM
    of the process. Between two refreshes a step costs one reading of the clock; the bar never synchronizes with a CUDA
    device.

    In a terminal, each validation leaves a line above the bar. The line marks the value that a `ModelCheckpoint` (or
    else an `EarlyStopping`) monitors if it is the best so far. The last picture shows the step at which the run ended,
    also after an error or a signal.

    Args:
        refresh_per_second: Refreshes per second in a terminal, > 0; fewer if drawing would take more than 1 % of the
            time. In a notebook, at most 2, each replacing the previous picture.
        plain_every_s: Seconds between two lines in `run.log`, and in the output without a terminal or notebook, >= 0.
            There is an extra line after each validation and at the end.

    A subclass may define `get_metrics` to choose and format the values of training.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "refresh_rate": "Use refresh_per_second, which counts in time; for no bar, Trainer(enable_progress_bar=False).",
        "console_kwargs": "The bar writes to stderr, or to the output of a notebook's cell.",
        "process_position": "Printed text stays above the bar.",
        "theme": "The bar has the terminal's own colours.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[int | None, ...]]] = {
        "refresh_rate": (None, 1, 100), "leave": (False, True), "process_position": (0,), "console_kwargs": (None,),
    }  # fmt: skip

    @check_arguments
    def __init__(self, refresh_per_second: float = 10.0, plain_every_s: float = 10.0) -> None:
        if not refresh_per_second > 0:
            raise ConfigError(f"ProgressBar: refresh_per_second must be more than 0, found {refresh_per_second}.")
        check_at_least(0, "ProgressBar", plain_every_s=plain_every_s)
        self.refresh_per_second = refresh_per_second
        self.plain_every_s = plain_every_s
        self._is_enabled = True
        self._trainer: CallbackTrainer | None = None
        self._task: TaskModule | None = None
        self._reset_state()

    def _reset_state(self) -> None:
        self._display: Display = NoDisplay()
        self._board: Board = {}
        self._due_at_s = math.inf
        self._log_due_at_s = perf_counter() + self.plain_every_s
        self._is_new_validation = False  # True from the end of a validation to the end of its step
        self._throughput = Throughput(_SPEED_WINDOW_S)
        self._training = False
        self._time_left = TimeEstimator()
        self._best_step: int | None = None  # step of the newest validation, if it gave the best value so far
        self._pending_reading: tuple[ProgressLine, HostCopy[str]] | None = None
        self._step_values: dict[str, float] = {}
        self._values: dict[str, Any] = {}  # values of training, as Lumen would show them
        self._epoch_names: dict[str, None] = {}  # an ordered set
        self._evaluation = _EvaluationProgress("", None)

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Choose a display."""
        self._reset_state()
        self._trainer, self._task = trainer, task
        if trainer.is_global_zero and self._is_enabled:
            self._display = choose_display(1 / self.refresh_per_second, self.plain_every_s)

    # ------------------------------------------------------------------ for subclasses

    def get_metrics(self, trainer: CallbackTrainer, task: TaskModule) -> dict[str, Any]:
        """Return the values to show next to the bar of training, by name.

        An override may remove, rename and add entries; a value may be a number or a formatted string. Lumen calls this
        at each refresh, in the first process, once there is a value.

        Args:
            trainer: The trainer of the run.
            task: The task in training.

        Returns:
            The values that Lumen would show, as floats: those of the newest step and of the newest epochs.
        """
        return dict(self._values)

    def disable(self) -> None:
        """Show nothing from the next run on."""
        self._is_enabled = False

    def enable(self) -> None:
        """Show the bar from the next run on."""
        self._is_enabled = True

    @property
    def is_enabled(self) -> bool:
        """True if the bar is shown."""
        return self._is_enabled

    @property
    def is_disabled(self) -> bool:
        """True if the bar is not shown."""
        return not self._is_enabled

    @property
    def trainer(self) -> CallbackTrainer:
        """Trainer of the run in progress.

        Raises:
            ConfigError: No run is in progress.
        """
        if self._trainer is None:
            raise ConfigError("ProgressBar.trainer: no run is in progress. Read it in hooks.")
        return self._trainer

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of a training epoch; infinite if the loader has no length."""
        return self.trainer.num_training_batches

    def print(self, *args: Any, sep: str = " ") -> None:
        """Print a line above the bar, in the first process.

        Args:
            args: The objects to print.
            sep: Text between the objects.
        """
        if self._trainer is None or self._trainer.is_global_zero:
            print(*args, sep=sep)

    # ------------------------------------------------------------------ training

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Compute the length of the run and show the first line."""
        self._count_steps(trainer, 0, 0)
        self._training = True
        self._began_at_s = perf_counter()
        self._time_left.start(trainer)
        self._best = BestValueTracker(find_monitor(trainer))
        self._throughput.start(trainer)
        self._refresh_now(trainer, wait=True)
        self._display.draw(self._board)
        self._due_at_s = self._began_at_s + self._display.interval_s

    def on_train_epoch_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Count the run's steps again, because the size of the data may have changed."""
        self._count_steps(trainer, trainer.global_step, trainer.current_epoch)

    def _count_steps(self, trainer: CallbackTrainer, done: int, epochs: int) -> None:
        """Set the number of the run's steps, `done` of which were made in whole epochs."""
        plan, per_epoch = trainer.plan, trainer.steps_per_epoch
        lengths, by_epochs = trainer.run.loaders.get_epoch_lengths(), None
        if lengths is not None and plan.max_epochs is not None:
            by_epochs = done + lengths.count_steps_before(plan.max_epochs) - lengths.count_steps_before(epochs)
        totals = [total for total in (plan.max_steps, by_epochs) if total is not None]
        self._total_steps = min(totals, default=None)
        self._bar_is_epoch = per_epoch is not None and (self._total_steps is None or per_epoch < self._total_steps)

    def on_step_checkpoint(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Show the step if a refresh is due, or if the step had a validation."""
        if trainer.run.ending.is_last_step:  # `on_train_end` or `on_exception` shows the last line.
            return
        if self._is_new_validation:
            self._is_new_validation = False
            self._refresh_now(trainer, wait=True)
            self._show_board(keeps=True)
            return
        if perf_counter() < self._due_at_s:
            return
        if self._pending_reading is None:
            self._start_reading(trainer)
        if self._finish_reading():
            self._show_board()
        else:
            self._due_at_s = 0.0  # The values are still being copied: try again after the next step.

    def on_train_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Show the step at which the run ended."""
        self._refresh_now(trainer, wait=True)
        self._show_end(self._board["training"], "took", self._began_at_s)

    def _show_end(self, line: ProgressLine, what: str, began_at_s: float) -> None:
        """Show the last picture, with what happened to the run, and close the display."""
        line.fraction, line.tail = None, f"{what} {format_duration(perf_counter() - began_at_s)}"
        line.stays = True
        self._show_board(is_last=True)
        self._close_display()

    def _refresh_now(self, trainer: CallbackTrainer, *, wait: bool = False) -> None:
        self._start_reading(trainer)
        self._finish_reading(wait=wait)

    def _start_reading(self, trainer: CallbackTrainer) -> None:
        """Record the progress of the run and begin to copy its values to the host."""
        self._epoch_names |= dict.fromkeys(trainer.run.log.train.list_epoch_names(is_for_progress_bar))
        self._pending_reading = self._make_progress_line(trainer), HostCopy(_get_step_values(trainer))

    def _finish_reading(self, *, wait: bool = False) -> bool:
        """Put the recorded progress on the board if its values have arrived."""
        if self._pending_reading is None or not (wait or self._pending_reading[1].is_ready()):
            return False
        line, host_copy = self._pending_reading
        self._pending_reading = None
        self._step_values |= host_copy.read()
        self._values = self._step_values | line.values
        assert self._task is not None
        shows = self._values and not isinstance(self._display, NoDisplay)  # An override may need the logged values.
        line.values = self.get_metrics(self.trainer, self._task) if shows else self._values
        self._board["training"] = line
        return True

    def _show_board(self, *, keeps: bool = False, is_last: bool = False) -> None:
        """Show the board, and write its line to `run.log` if due.

        Args:
            keeps: True if a terminal keeps a line of this board above its picture.
            is_last: True if this is the last board.
        """
        if (keeps or is_last or perf_counter() >= self._log_due_at_s) and not isinstance(self._display, NoDisplay):
            line = [*self._board.values()][-1]
            log_to_files(logger.makeRecord(logger.name, logging.INFO, __file__, 0, "%s", (line,), None))
            self._log_due_at_s = perf_counter() + self.plain_every_s
        (self._display.keep if keeps else self._display.show)(self._board)
        self._due_at_s = perf_counter() + self._display.interval_s

    def _make_progress_line(self, trainer: CallbackTrainer) -> ProgressLine:
        progress, rates = trainer.progress, self._throughput.measure(trainer)
        left_s = self._time_left.estimate(trainer, self._total_steps)
        newest, costs = trainer.run.values.newest, [format_megabytes(measure_memory_mb(trainer.strategy.device))]
        if rates.steps_per_s:
            samples = f"{format_number(rates.samples_per_s, 3)} samples/s"
            waiting = f"data {100 * rates.data_wait_share:.0f} %"
            costs = [format_speed(rates.steps_per_s, "step"), samples, waiting, *costs]
        epoch = _format_done_of_total(progress.epochs_begun, trainer.plan.max_epochs)
        return ProgressLine(
            head=f"step {_format_done_of_total(progress.step, self._total_steps)} · epoch {epoch}",
            fraction=self._get_fraction(trainer),
            tail="" if left_s is None else f"{format_duration(math.ceil(left_s))} left",
            values={name: newest[name] for name in self._epoch_names if name in newest},
            costs=costs,
            best=self._best.name if self._best_step == progress.step else None,
        )

    def _get_fraction(self, trainer: CallbackTrainer) -> float | None:
        """Return the completed fraction of the epoch, or else of the run, 0 to 1; None if the length is unknown."""
        progress, plan = trainer.progress, trainer.plan
        if self._bar_is_epoch:
            complete = progress.epoch > 0 and not progress.in_epoch
            return 1.0 if complete else progress.batches / max(trainer.num_training_batches, 1)
        if self._total_steps is not None:
            return progress.step / max(self._total_steps, 1)
        return None if plan.max_time_s is None else progress.elapsed_s / plan.max_time_s

    # ------------------------------------------------------------------ evaluations

    def on_validation_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Show that an evaluation begins."""
        self._time_left.pause(trainer)
        if self._training:
            self._refresh_now(trainer)
        self._throughput.pause(trainer)
        stage = trainer.run.stage
        self._evaluation = _EvaluationProgress(
            _NAMES.get(stage, stage), trainer.run.loaders.count_evaluation_batches(stage)
        )
        self._board["evaluation"] = self._evaluation.make_line()
        self._display.draw(self._board)
        self._due_at_s = perf_counter() + self._display.interval_s

    def on_validation_batch_end(
        self,
        trainer: CallbackTrainer,
        task: TaskModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch."""
        together = trainer.strategy.data_world_size  # The other processes complete their batches at the same time.
        done = self._evaluation.done + together
        self._evaluation.done = done if self._evaluation.total is None else min(done, self._evaluation.total)
        if perf_counter() >= self._due_at_s:
            self._finish_reading()
            self._board["evaluation"] = self._evaluation.make_line()
            self._show_board()

    def on_validation_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Show the values, or that a prediction is complete."""
        self._resume_clocks(trainer)
        if self._training or trainer.sanity_checking:
            del self._board["evaluation"]
            self._display.draw(self._board)
            if self._training:
                self._note_validation(trainer)
        else:
            newest = trainer.run.values.newest
            line = self._evaluation.make_line({name: newest[name] for name in _get_evaluation_names(trainer)})
            self._board["evaluation"] = line
            self._show_end(line, "took", self._evaluation.began_at_s)

    def _resume_clocks(self, trainer: CallbackTrainer) -> None:
        self._throughput.resume(trainer)
        self._time_left.resume(trainer)

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def _note_validation(self, trainer: CallbackTrainer) -> None:
        """Show the values of the validation from here on, and record if the monitored value is the best so far."""
        names, values, monitor = _get_evaluation_names(trainer), trainer.run.values, self._best.name
        if monitor is not None and monitor in values.updated and monitor not in names:
            names = [*names, monitor]
        is_best = self._best.has_new_best({name: values.newest[name] for name in names})
        self._best_step = trainer.global_step if is_best else None
        self._epoch_names |= dict.fromkeys(names)
        self._is_new_validation = True

    # ------------------------------------------------------------------ the end

    def on_exception(self, trainer: CallbackTrainer, task: TaskModule, exception: BaseException) -> None:
        """Show the step at which a failed or stopped run ended, and restore the terminal."""
        what = "failed" if isinstance(exception, Exception) else "stopped"
        if self._board and not isinstance(self._display, NoDisplay):
            evaluation = self._board.pop("evaluation", None)
            if self._training:
                if evaluation is not None:
                    self._resume_clocks(trainer)
                    what += " in the validation"
                in_step = trainer.run.log.in_train_step
                self._make_last_line(trainer, has_values=not in_step)
                what += f" in step {trainer.global_step + 1}" if in_step else ""
                self._show_end(self._board["training"], f"{what} after", self._began_at_s)
            else:
                line = self._board["evaluation"] = self._evaluation.make_line()
                self._show_end(line, f"{what} after", self._evaluation.began_at_s)
        self._close_display()

    def _make_last_line(self, trainer: CallbackTrainer, *, has_values: bool) -> None:
        """Put the progress of a run that ends early on the board, without values that are not of its last step.

        Args:
            trainer: The trainer of the run.
            has_values: False within a step, whose values replace those of the last complete step.
        """
        self._pending_reading, self._step_values = None, {}
        self._board["training"] = self._make_progress_line(trainer)
        if has_values:
            with suppress(Exception):  # A failed device has no values.
                self._refresh_now(trainer, wait=trainer.world_size == 1)  # Other ranks may never reach a collective.

    def teardown(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Restore the terminal."""
        self._close_display()
        self._trainer = self._task = None

    def _close_display(self) -> None:
        self._display.close()
        self._board.clear()
        self._training = False
        self._due_at_s = math.inf


def _get_evaluation_names(trainer: CallbackTrainer) -> list[str]:
    """Return the names of the evaluation that ends, logged with `prog_bar=True`; if there are none, the first three."""
    metrics = trainer.run.log.stage
    if metrics is None or not trainer.run.values.should_show:
        return []
    return metrics.list_epoch_names(is_for_progress_bar) or metrics.list_epoch_names()[:_MAX_DEFAULT_VALUES]


@final
class _EvaluationProgress:
    """Evaluation in progress."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.began_at_s = perf_counter()

    def make_line(self, values: dict[str, float] | None = None) -> ProgressLine:
        """Return the line that shows the evaluation."""
        seconds, fraction, tail = perf_counter() - self.began_at_s, None, ""
        if self.total:
            fraction = self.done / self.total
            left_s = (self.total - self.done) * seconds / self.done if self.done else None
            tail = "" if left_s is None else f"{format_duration(math.ceil(left_s))} left"
        return ProgressLine(
            f"{self.name} {_format_done_of_total(self.done, self.total)}", fraction, tail, values or {}, []
        )


def _format_done_of_total(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def _get_step_values(trainer: CallbackTrainer) -> dict[str, float | torch.Tensor]:
    """Return the values that the newest training step logged with `prog_bar=True`, else its loss."""
    values: dict[str, float | torch.Tensor] = trainer.run.log.train.compute_step_values(is_for_progress_bar)
    loss = trainer.run.step.loss
    return values if values or loss is None else {"loss": loss}
