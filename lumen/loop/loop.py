"""The order of things: training, evaluation, prediction, as plain functions; one optimizer step is in `step`.

Every step ends in exactly one boundary, at which nothing is half done: after its update and its validation, and for
the last step of an epoch after the end of that epoch. Checkpoints are made and stop requests obeyed only there. Only
what loggers get of the step may come later, where a device still computes it, but before anything is saved.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch

from lumen.checkpoint.collect import check_additions, logger_states
from lumen.data.adapter import Feed, Position
from lumen.data.nested import move
from lumen.data.windows import Window
from lumen.errors import DataError, TrainingError
from lumen.loop.step import EpochSkipped, train_step, unnoticed
from lumen.metrics.collector import StageMetrics, for_loggers
from lumen.metrics.stages import StatesApart
from lumen.metrics.torchmetrics_states import metrics_of
from lumen.random import EVALUATIONS, make_key, preserved_generators, seed_generators
from lumen.run.loaders import NO_TRAINING, open_feeds
from lumen.run.run import Run
from lumen.task.inference import ordinary_afterwards
from lumen.task.modes import Modes

_log = logging.getLogger("lumen")
T = TypeVar("T")
Numbered = tuple[Any, T]


class StopRequested(Exception):
    """The run was asked to leave; a checkpoint of this boundary exists if checkpoints are on."""


def train(run: Run) -> None:
    """Run epochs until a limit is reached, a callback stops the run, or it is asked to leave."""
    run.share_metrics()
    for hook in run.hooks.on_train_start:
        hook()
    if run.trainer.enable_checkpointing:
        check_additions(run)
    run.start_weighing()
    (run.has_metrics,) = run.agree(bool(metrics_of(run.task)))
    run.start_clock()
    run.finished = run.limit_reached is not None
    if run.finished and run.progress.in_epoch:  # killed between the last checkpoint and the end of its open epoch
        end_epoch(run, complete=False)
    while not run.finished:
        train_epoch(run)
    run.losses.flush()
    run.strategy.barrier()  # what one process has written is there for all
    for hook in run.hooks.on_train_end:
        hook()


def train_epoch(run: Run) -> None:
    """Run the rest of the epoch in progress, from wherever a checkpoint left it."""
    progress, plan = run.progress, run.plan
    fresh, weighted_before = not progress.in_epoch, run.weighted_windows
    if fresh:
        open_feeds(run)
        run.measure()
        progress.in_epoch = True
        run.train_metrics = run.stage_metrics = StageMetrics()
        run.seed_hooks(0)
        run.call_hooks("on_train_epoch_start")
    run.stage_metrics = run.train_metrics

    feed = run.measure()  # hooks may have changed the data
    limit = plan.limit("train", feed)
    windows = feed.windows(0 if plan.same_batches else progress.epoch, progress.position, limit)
    window, skipped = next(windows, None), limit == 0
    if window is None and fresh and not (progress.step or skipped):
        raise DataError(NO_TRAINING.format(feed.nothing()))
    over = progress.validation_due and finish_step(run, updated=True, last=window is None)  # saved while validating
    while window is not None and not over:
        try:
            updated = train_step(run, window)
        except EpochSkipped:
            run.in_train_step, skipped = False, True
            break
        run.write_row()  # of a step before, whose values have arrived meanwhile
        if updated and progress.step % plan.log_every_n_steps == 0:
            run.log_step()
        progress.validation_due = run.validation_due(window, updated=updated)
        over = finish_step(run, updated=updated, last=window.last)
        window = None if over else next(windows, None)

    if fresh and not over and run.weighted_windows == weighted_before:
        say_idle(run, skipped=skipped)
    end_epoch(run, complete=not over)


def say_idle(run: Run, *, skipped: bool) -> None:
    """Say that an epoch has made no step.

    Args:
        run: The run.
        skipped: As it was asked to, by a hook or a limit of 0 batches.

    Raises:
        TrainingError: None was ever made, or the run would never end.
    """
    progress = run.progress
    if skipped:
        why = "a hook has left it before its first step, or limit_train_batches is 0."
    elif progress.batches:
        why = (
            f"training_step returned None, or the weight 0, for all of its {progress.batches} micro-batches. Does it "
            "end with `return loss`?"
        )
    else:
        why = f"there was no batch: {run.measure().nothing()}."
    if run.plan.max_epochs is None or not (skipped or progress.step):
        endless = ", so training would never end" if run.plan.max_epochs is None else ""
        raise TrainingError(f"epoch {progress.epoch} made no optimizer step{endless}: {why}")
    _log.warning("epoch %d made no optimizer step: %s", progress.epoch, why)


def finish_step(run: Run, *, updated: bool, last: bool) -> bool:
    """Validate if it is due, then reach the boundary, unless the epoch's end comes first. Returns whether to end."""
    validates = run.progress.validation_due
    if validates:
        if evaluate(run, "validate", run.eval_feeds):
            run.validation_done()
        run.stage_metrics = run.train_metrics
    if run.progress.validation_due:
        run.keep_row()
        return reach_boundary(run)
    for scheduler in run.schedulers if updated else ():
        if scheduler.monitor is not None and scheduler.moves_at(run.progress.step):
            run.read_step_values(scheduler)
            run.move(scheduler)
    return False if last else reach_boundary(run, after_hooks=validates)


def reach_boundary(run: Run, *, after_hooks: bool = False) -> bool:
    """Let callbacks act on a complete step. Returns whether the run is over.

    Args:
        run: The run.
        after_hooks: Hooks in which one rank is enough to stop the run may have been called since all have agreed.

    Raises:
        StopRequested: The run was asked to leave, and callbacks have saved what they save.
    """
    if after_hooks:
        run.agree()
    run.tick()
    metrics, run.stage_metrics = run.stage_metrics, None  # what is logged here would belong to no step
    for hook in run.hooks.on_boundary if not run.progress.validation_due else ():  # the step goes on when resumed
        hook()
    if run.is_saving:
        run.agree()  # nobody waits in vain for the others' share
    elif run.progress.should_stop:
        run.leave()
    run.finished, run.is_saving, run.is_decided = run.limit_reached is not None, False, True
    if run.finished:
        run.log_last_step()
    for hook in run.hooks.on_boundary_end:
        hook()
    run.is_decided, run.stage_metrics = False, metrics
    run.fresh.clear()
    if run.pulse.stop_signal is not None:
        run.write_row()
        raise StopRequested
    return run.finished


def end_epoch(run: Run, *, complete: bool) -> None:
    """Close an epoch: its hooks, its values, its schedulers.

    Where it is not complete, because the run ends in its middle, progress keeps its place for a longer run to go on.
    """
    progress = run.progress
    run.write_row()
    run.seed_hooks(1)
    run.batch_samples = 1
    (has_values,) = run.agree(run.train_metrics.has_values)
    values = run.publish(run.train_metrics, run.gather if has_values else None)
    if run.has_epoch_ends:
        run.call_hooks("on_train_epoch_end")
        values = run.publish(run.train_metrics, run.gather)  # once more: with what the hooks logged
    run.write({name: values[name] for name in run.train_metrics.epoch_names(for_loggers)})
    run.train_metrics.reset_metrics()
    run.stage_metrics, run.has_ended_epoch = None, True
    if complete:
        for scheduler in run.schedulers:
            if scheduler.interval == "epoch" and (progress.epoch + 1) % scheduler.frequency == 0:
                run.move(scheduler)
        progress.next_epoch()
        reach_boundary(run, after_hooks=run.has_epoch_ends)


def sanity_check(run: Run) -> None:
    """Run the first validation batches before training, and forget what they gave.

    Raises:
        StopRequested: The run was asked to leave.
    """
    with preserved_generators():
        for hook in run.hooks.on_sanity_check_start:
            hook()
        complete = evaluate(run, "sanity", run.eval_feeds)
        for hook in run.hooks.on_sanity_check_end:
            hook()
    run.forget_values()
    if not complete:
        raise StopRequested


def evaluate(run: Run, stage: str, feeds: list[Feed]) -> bool:
    """One pass over evaluation loaders: eval mode, no gradients; everything else is afterwards as it was before.

    So are the modes, but for those that a hook at its end has chosen.

    Args:
        run: The run.
        stage: "validate", "sanity", "test" or "predict".
        feeds: One per loader.

    Returns:
        False if the run was asked to leave: then nothing of the pass is published.
    """
    name = "validation" if stage in ("validate", "sanity") else stage
    task, hooks = run.task, run.hooks
    run.write_row()
    before, modes = (run.stage, run.stage_metrics), Modes(task)
    apart, run.records = StatesApart(task), logger_states(run)
    complete = False
    run.stage, run.stage_metrics = stage, StageMetrics()
    metrics, run.batch_samples = run.stage_metrics, 1
    rows: list[Numbered[dict[str, float | torch.Tensor]]] = []
    inference_mode = run.plan.inference_mode and run.strategy.inference_mode
    no_gradients: AbstractContextManager[Any] = torch.inference_mode() if inference_mode else torch.no_grad()
    ordinary = partial(ordinary_afterwards, task, vars(run).get("optimizer"))
    run.share_metrics()
    run.strategy.sync_buffers(task)
    run.pulse.change_pace()
    for feed in feeds:
        feed.measure()
    try:
        with preserved_generators(), torch.no_grad(), ordinary():
            task.eval()
            seed_generators(make_key(run.seed, EVALUATIONS[stage]))
            run.call_hooks(f"on_{name}_start")
            with ordinary(), no_gradients, run.strategy.evaluation():
                if not evaluate_feeds(run, stage, name, feeds, rows, modes, apart):
                    return False
                complete = True
            metrics.closed = True
            with modes.choosing():
                for hook in getattr(hooks, f"on_{name}_end"):
                    hook()
    finally:
        run.pulse.change_pace()
        metrics.reset_metrics()
        apart.restore(everything=not complete or stage == "sanity")
        run.loader_suffix, run.in_evaluation_pass = "", False
        run.stage, run.stage_metrics = before
        modes.restore()
    run.records = None
    return True


def evaluate_feeds(
    run: Run,
    stage: str,
    name: str,
    feeds: list[Feed],
    rows: list[Numbered[dict[str, float | torch.Tensor]]],
    modes: Modes,
    apart: StatesApart,
) -> bool:
    """The part of an evaluation in which the model is used, from its first hook to its values.

    Returns:
        False if the run was asked to leave.
    """
    metrics = run.stage_metrics
    assert metrics is not None
    run.call_hooks(f"on_{name}_epoch_start")
    apart.put_aside()
    for number, feed in enumerate(feeds):
        run.loader_suffix, run.in_evaluation_pass = loader_suffix(feeds, number), True
        outputs = evaluate_feed(run, stage, name, feed, number, rows)
        run.in_evaluation_pass = False
        if run.pulse.stop_signal is not None:
            return False
        if stage == "predict":
            run.predictions.append(in_order(run, outputs))
    run.loader_suffix, run.batch_samples = "", 1
    seed_generators(make_key(run.seed, EVALUATIONS[stage], 1))
    apart.settle(run.gather if run.has_metrics else None)
    with modes.choosing():
        run.call_hooks(f"on_{name}_epoch_end")
    values = run.publish(metrics, run.gather)
    if stage != "sanity" and run.is_logged:
        for row in in_order(run, rows):
            run.write(row)
        run.write({name: values[name] for name in metrics.epoch_names(for_loggers)})
    return True


def loader_suffix(feeds: list[Feed], number: int) -> str:
    """What is added to the names logged for one of several loaders: its name, or its number."""
    if len(feeds) == 1:
        return ""
    return f"/{feeds[number].name or f'dataloader_idx_{number}'}"


def in_order(run: Run, mine: list[Numbered[T]]) -> list[T]:
    """What all ranks have, by its number. Collective."""
    if run.gather is None:
        return [value for _, value in mine]
    numbered = chain.from_iterable(run.gather(move(mine, torch.device("cpu"))))
    return [value for _, value in sorted(numbered, key=itemgetter(0))]


def evaluate_feed(
    run: Run,
    stage: str,
    name: str,
    feed: Feed,
    dataloader_idx: int,
    rows: list[Numbered[dict[str, float | torch.Tensor]]],
) -> list[Numbered[Any]]:
    """Evaluate this rank's batches of one loader, adding a row of step values for each.

    Returns:
        What the steps returned, for predictions only.
    """
    hooks = run.hooks
    starts, ends = getattr(hooks, f"on_{name}_batch_start"), getattr(hooks, f"on_{name}_batch_end")
    step, domain, metrics = f"{name}_step", EVALUATIONS[stage], run.stage_metrics
    assert metrics is not None
    outputs: list[Numbered[Any]] = []
    window: Window | None = None
    limit = run.plan.limit(stage, feed)
    for window in feed.windows(0, Position(), limit):
        for micro in window:
            if micro.idle and micro.batch is None:
                continue
            metrics.window += 1
            run.batch_samples = micro.samples
            seed_generators(make_key(run.seed, domain, 2, dataloader_idx, micro.index))
            batch = run.receive(micro.batch, dataloader_idx)
            if micro.idle:  # it stands in for a batch of this rank, in a forward that all ranks make together
                with unnoticed(run), run.precision.forward():
                    run.call_step(step, batch, micro.index, dataloader_idx or micro.loader)
                continue
            for hook in starts:
                hook(batch, micro.index, dataloader_idx)
            with run.precision.forward():
                output = run.call_step(step, batch, micro.index, dataloader_idx or micro.loader)
            for hook in ends:
                hook(output, batch, micro.index, dataloader_idx)
            if stage == "predict":
                outputs.append((micro.index, run.to_host(output)))
            if row := metrics.step_values(for_loggers):
                rows.append(((dataloader_idx, micro.index), row))
        run.pulse.beat()
        if run.pulse.stop_signal is not None:
            break
    if window is None and limit != 0:
        run.say_empty(stage, feed)
    return outputs
