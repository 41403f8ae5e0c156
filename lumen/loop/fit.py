"""Training loop: epochs, their steps and validations, until the run is over. `step` makes one optimizer step.

Every step ends in exactly one boundary, where the state of the run is complete: after the update and the validation,
and for the last step of an epoch after the end of that epoch. Lumen saves checkpoints and obeys stop requests only at a
boundary. Loggers may get the values of a step later, when the device has computed them, but before a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lumen.checkpoint.save.collect import check_additions, check_first_state
from lumen.console import logger as _log
from lumen.data.windows import AccumulationWindow
from lumen.errors import DataError, TrainingError
from lumen.loop.evaluate import evaluate, publish_values
from lumen.loop.manual import run_manual_step
from lumen.loop.step import EpochSkipped, train_step
from lumen.loop.step_in_parts import explain_step_error
from lumen.metrics.step_values import is_for_loggers
from lumen.metrics.torchmetrics_states import find_metrics
from lumen.random import preserve_generators
from lumen.run.configure_optimizers import check_parameters_held
from lumen.run.open_loaders import NO_TRAINING, open_loaders
from lumen.run.run import Run
from lumen.task.modes import SavedModes


class RolledBack(Exception):
    """Request by hooks of all processes to roll back to a checkpoint.

    Args:
        run: The run that trains.
        window: The newest window of the run, which is used.
        before: Number of windows of this size to leave out before the newest.
        after: Number of windows of this size to leave out after the newest.

    Attributes:
        excluded: The range (from, to) of the run's micro-batches to leave out.
    """

    def __init__(self, run: Run, window: AccumulationWindow, before: int, after: int) -> None:
        super().__init__()
        end, size = run.progress.micro_batches, len(window.sizes)
        self.excluded = [max(0, end - (before + 1) * size), end + after * size]


class StopRequested(Exception):
    """Stop of the run by a signal. A checkpoint of this step exists if checkpoints are on."""


def train_run(run: Run) -> list[int] | None:
    """Run epochs until a limit is reached, or a callback or a signal stops the run.

    Returns:
        The range (from, to) of the run's micro-batches to leave out if hooks requested a rollback; else None.

    Raises:
        StopRequested: A signal asked the run to stop.
    """
    run.log.share_metrics(run.task)
    modes = SavedModes(run.task)
    with modes.keep_choices():
        for hook in run.hooks.on_train_start:
            hook()
    modes.warn_if_left_in_eval(run.optim.built["evaluating"])
    if run.saves.is_enabled:
        check_additions(run)
    keeps_losses = any(callback.needs_step_loss for callback in run.hooks.callbacks)
    local_time = run.records.guard.local_time
    run.step.make_weighting(run.task, run.log.gather, local_time.start_sum, keeps_losses=keeps_losses)
    (has_metrics,) = run.ending.vote_now(bool(find_metrics(run.task)))
    run.log.note_metrics(has_metrics=has_metrics)
    run.ending.start_clock()
    run.records.goodput.begin_training(run.progress.step)
    ending = run.ending
    # The checkpoint is of the last step, but the process was killed before the end of the epoch.
    if ending.finished and run.progress.in_epoch:
        run.log.resume_epoch()
        end_epoch(run, complete=False)
    while not ending.finished:
        try:
            train_epoch(run)
        except RolledBack as rollback:
            return rollback.excluded
    run.records.goodput.enter_bucket("end")
    run.step.nonfinite.flush()
    run.records.guard.wait_for_comparison()
    run.processes.barrier()  # The files that one process has written exist for all processes from here on.
    for hook in run.hooks.on_train_end:
        hook()
    return None


def train_epoch(run: Run) -> None:
    """Run the rest of the epoch in progress, from its beginning or from the position of a checkpoint."""
    progress, plan, guard = run.progress, run.plan, run.records.guard
    is_new_epoch, weighted_before = not progress.in_epoch, run.step.weighted_windows
    if is_new_epoch:
        open_loaders(run)
        run.loaders.measure_training()
        progress.begin_epoch()
        run.log.begin_epoch()
        run.step.seed_hooks(0)
        run.log.call_hooks("on_train_epoch_start")
        check_parameters_held(run.task, run.optim.optimizer)  # Hooks may have replaced parameters.
    run.log.resume_epoch()

    adapter = run.loaders.measure_training()  # Hooks may have changed the data.
    limit = plan.get_limit("train", adapter)
    windows = adapter.iterate_windows(0 if plan.same_batches else progress.epoch, progress.position, limit)
    window, skipped = next(windows, None), limit == 0
    if window is None and is_new_epoch and not (progress.step or skipped):
        raise DataError(NO_TRAINING.format(adapter.explain_empty()))
    make_step = train_step if run.optim.manual is None else run_manual_step
    is_over = False
    if progress.validation_due:  # The checkpoint was saved during a validation.
        run.ending.end_epoch(complete=window is None)
        is_over = finish_step(run, updated=True, last=window is None)
    while window is not None and not is_over:
        try:
            if progress.left_out and is_excluded_step(run):
                # An epoch without a step is no error after a rollback.
                updated, is_new_epoch = skip_excluded_window(run, window), False
            else:
                updated = make_step(run, window)
        except EpochSkipped:
            run.log.end_step()
            skipped = True
            break
        except Exception as error:
            explain_step_error(run, error)
            raise
        if updated and run.saves.checks_update:
            check_first_state(run)
        if run.ending.rollback is not None:
            raise RolledBack(run, window, *run.ending.rollback)
        if run.records.pending is not None:  # The values of an earlier step have arrived meanwhile.
            run.records.write_pending_row()
        if guard.is_enabled:
            guard.finish_pending_comparison()
        if updated and progress.step % plan.log_every_n_steps == 0:
            run.records.log_step()
            guard.start_comparison()
        run.ending.decide_validation(window, run.loaders, updated=updated)
        is_over = finish_step(run, updated=updated, last=window.last)
        if guard.is_enabled:
            guard.local_time.start()
        window = None if is_over else next(windows, None)

    if is_new_epoch and not is_over and run.step.weighted_windows == weighted_before:
        report_empty_epoch(run, skipped=skipped)
    end_epoch(run, complete=not is_over)


def report_empty_epoch(run: Run, *, skipped: bool) -> None:
    """Warn that an epoch has made no optimizer step.

    Args:
        run: The run that trains.
        skipped: True if a hook or a limit of 0 batches has skipped the epoch.

    Raises:
        TrainingError: The run has made no step at all without being asked to skip, or would never end.
    """
    progress = run.progress
    if skipped:
        why = "a hook has ended the epoch before its first step, or limit_train_batches is 0."
    elif run.optim.manual is not None and progress.batches:
        why = (
            f"no optimizer has made a step in its {progress.batches} batches. With automatic_optimization = False, "
            "call self.manual_backward(loss) and step() of self.optimizers() in training_step."
        )
    elif progress.batches:
        why = (
            f"training_step returned None, or the weight 0, for all of its {progress.batches} micro-batches. Does it "
            "end with `return loss`?"
        )
    else:
        why = f"there was no batch: {run.loaders.measure_training().explain_empty()}."
    if run.plan.max_epochs is None or not (skipped or progress.step):
        endless = ", so training would never end" if run.plan.max_epochs is None else ""
        raise TrainingError(f"epoch {progress.epoch} made no optimizer step{endless}: {why}")
    _log.warning("epoch %d made no optimizer step: %s", progress.epoch, why)


def finish_step(run: Run, *, updated: bool, last: bool) -> bool:
    """Validate if due, then reach the boundary unless the epoch ends first. Returns True if the run is over."""
    validates = run.progress.validation_due
    if validates:
        with run.records.goodput.measure_bucket("evaluation"):
            complete = evaluate(run, "validate")
        if complete:
            run.ending.note_validation()
            run.values.note_validation()
    if run.progress.validation_due:
        run.records.keep_row()
        return reach_boundary(run)
    for scheduler in run.optim.schedulers if updated else ():
        if scheduler.monitor is not None and scheduler.moves_at(run.progress.step):
            run.values.show_step(scheduler, get_step_values(run))
            run.values.step_scheduler(scheduler)
    return False if last else reach_boundary(run, after_hooks=validates)


def reach_boundary(run: Run, *, after_hooks: bool = False) -> bool:
    """Let callbacks act on a complete step. Returns True if the run is over.

    Args:
        run: The run that trains.
        after_hooks: True if hooks in which a single rank may stop the run were called since the last vote.

    Raises:
        StopRequested: A signal asked the run to stop. Callbacks have saved their checkpoints.
    """
    if after_hooks:
        run.ending.vote_now()
    run.ending.read_clock()
    if run.ending.vote.now_s >= run.records.goodput.due_s:
        run.records.goodput.write_line(run.progress.step)
    for hook in run.hooks.on_step_end if not run.progress.validation_due else ():  # A resumed run ends the step.
        hook()
    if run.ending.is_vote_requested or run.ending.votes_each_step:
        run.ending.vote_now()
    if run.ending.decide_end():
        run.records.log_last_step()
    for hook in run.hooks.on_step_checkpoint:
        hook()
    run.resume_epoch_logging()
    if run.ending.vote.stop_signal is not None:
        run.records.write_pending_row()
        raise StopRequested
    return run.ending.finished


def end_epoch(run: Run, *, complete: bool) -> None:
    """End an epoch: call its hooks, publish its values, and step its schedulers.

    If the run ends in the middle of the epoch, `progress` keeps the position, so that a longer run can resume there.
    """
    progress = run.progress
    run.ending.end_epoch(complete=complete)
    run.records.write_pending_row()
    run.step.seed_hooks(1)
    run.log.set_weight(1)
    (has_values,) = run.ending.vote_now(run.log.train.has_values)
    values = publish_values(run, run.log.train, run.log.gather if has_values else None)
    if run.log.has_epoch_ends:
        run.log.call_hooks("on_train_epoch_end")
        values = publish_values(run, run.log.train, run.log.gather)  # These include the values that the hooks logged.
    run.records.write_values({name: values[name] for name in run.log.train.list_epoch_names(is_for_loggers)})
    run.log.train.reset_metrics()
    run.log.end_epoch()
    run.values.note_epoch()
    if complete:
        for scheduler in run.optim.schedulers:
            if scheduler.interval == "epoch" and (progress.epoch + 1) % scheduler.frequency == 0:
                run.values.step_scheduler(scheduler)
        progress.finish_epoch()
        reach_boundary(run, after_hooks=run.log.has_epoch_ends)


def run_sanity_check(run: Run) -> None:
    """Run the first validation batches before training, and drop their values.

    Raises:
        StopRequested: A signal asked the run to stop.
    """
    with preserve_generators():
        call_in_sanity_check(run, run.hooks.on_sanity_check_start)
        with run.records.goodput.measure_bucket("evaluation"):
            complete = evaluate(run, "sanity")
        call_in_sanity_check(run, run.hooks.on_sanity_check_end)
    run.values.discard_newest()
    if not complete:
        raise StopRequested


def call_in_sanity_check(run: Run, hooks: Iterable[Callable[[], Any]]) -> None:
    """Call hooks that see the stage "sanity"."""
    with run.in_stage("sanity", run.log.stage):
        for hook in hooks:
            hook()


def get_step_values(run: Run) -> dict[str, float]:
    """Return the values that the step in progress has logged. Waits for the device. Collective."""
    return {name: float(value) for name, value in run.log.train.compute_step_values(gather=run.log.gather).items()}


def is_excluded_step(run: Run) -> bool:
    """Return True if the next step is left out of the training."""
    return any(begin <= run.progress.micro_batches < end for begin, end in run.progress.left_out)


def skip_excluded_window(run: Run, window: AccumulationWindow) -> bool:
    """Read the batches of a step without training on them. Returns False, because no update is made."""
    for _ in window:  # The workers deliver requested batches in order, so all must be read.
        pass
    run.step.count_excluded(window)
    return False
