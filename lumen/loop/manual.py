"""One step in manual optimization, where `training_step` calls backward and the optimizers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lumen.data.nested import detach_all
from lumen.data.windows import AccumulationWindow
from lumen.loop.micro_batch import begin_weighting, undo_forward_effects
from lumen.loop.step import EpochSkipped
from lumen.run.run import Run


def run_manual_step(run: Run, window: AccumulationWindow) -> bool:
    """Call `training_step`, in which the task steps its optimizers. Returns True if an optimizer made an update.

    Raises:
        EpochSkipped: A hook asked to end the epoch. `training_step` was not called.
    """
    hooks, manual, weighting = run.hooks, run.optim.manual, run.step.weighting
    assert manual is not None
    run.step.begin_step(window)
    (micro,) = begin_weighting(run, window)
    index = window.first_index // (1 if window.is_one_batch else run.strategy.data_world_size)  # equal on all processes
    run.step.seed_micro_batch(micro, index)
    batch = run.calls.move_to_device(micro.batch, micro.loader)
    if hooks.on_train_batch_start:
        leave_epoch(run, window, asked=not micro.is_dummy and _should_leave_epoch(run, batch, index))
    for hook in hooks.on_before_zero_grad:
        hook(run.optim.optimizer)
    run.strategy.begin_step()
    factor = weighting.get_loss_factor(micro.weight, None)
    manual.begin_step(factor, is_dummy=micro.is_dummy, has_weight=weighting.planned != 0.0)
    with (
        undo_forward_effects(run) if micro.is_dummy else nullcontext(),
        run.strategy.gradient_sync(last=True),
        run.precision.forward(),
    ):
        output = run.strategy.call(
            "training_step", *run.calls.get_arguments("training_step", batch, index, micro.loader)
        )
    weighting.start_sum(run.progress.should_stop)
    (wants_to_stop,) = weighting.finish_sum()
    if wants_to_stop or run.ending.is_stop_agreed:  # as in `update_parameters` of `step`
        run.ending.apply_vote(wants_to_stop=wants_to_stop)
    updated = manual.end_step()
    run.step.count_window(window, updated=updated, was_attempted=manual.was_attempted)
    for teacher in run.optim.teachers if updated else ():
        teacher.follow(run.progress.step - 1)
    if hooks.on_train_batch_end and not micro.is_dummy:
        output = detach_all(output)
        for hook in hooks.on_train_batch_end:
            hook(output, batch, index)
    run.log.end_step()
    return updated


def _should_leave_epoch(run: Run, batch: Any, index: int) -> bool:
    return any(hook(batch, index) == -1 for hook in run.hooks.on_train_batch_start)


def leave_epoch(run: Run, window: AccumulationWindow, *, asked: bool) -> None:
    """End the epoch on all processes if a hook of one asks for it, because the others would wait for that process.

    Raises:
        EpochSkipped: A hook of some process asked to end the epoch.
    """
    if run.processes.world_size > 1:
        (asked,) = run.ending.vote_now(asked)
    if asked:
        run.step.end_step(window)
        raise EpochSkipped
