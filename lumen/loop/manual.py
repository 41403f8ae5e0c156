"""One step in manual optimization, where `training_step` calls backward and the optimizers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from lumen.data.nested import detached
from lumen.data.windows import AccumulationWindow
from lumen.loop.micro_batch import unnoticed, weigh
from lumen.loop.step import EpochSkipped
from lumen.run.run import Run


def manual_step(run: Run, window: AccumulationWindow) -> bool:
    """Call `training_step`, in which the task steps its optimizers. Returns True if an optimizer made an update.

    Raises:
        EpochSkipped: A hook asked to end the epoch. `training_step` was not called.
    """
    hooks, manual, weighting = run.hooks, run.optim.manual, run.step.weighting
    assert manual is not None
    run.step.begin(window)
    (micro,) = weigh(run, window)
    index = window.first_index // (1 if window.whole else run.strategy.data_world_size)  # equal on all processes
    run.step.seed(micro, index)
    batch = run.calls.receive(micro.batch, micro.loader)
    if hooks.on_train_batch_start:
        leave_epoch(run, window, asked=not micro.is_dummy and _asks_to_leave(run, batch, index))
    for hook in hooks.on_before_zero_grad:
        hook(run.optim.optimizer)
    run.strategy.begin_step()
    factor = weighting.loss_factor(micro.weight, None)
    manual.begin(factor, is_dummy=micro.is_dummy, has_weight=weighting.planned != 0.0)
    with (
        unnoticed(run) if micro.is_dummy else nullcontext(),
        run.strategy.gradient_sync(last=True),
        run.precision.forward(),
    ):
        output = run.strategy.call("training_step", *run.calls.arguments("training_step", batch, index, micro.loader))
    weighting.begin_agreement(run.progress.should_stop)
    (wants_to_stop,) = weighting.agree()
    if wants_to_stop or run.ending.stop_agreed:  # Otherwise nothing has changed.
        run.ending.hear(wants_to_stop=wants_to_stop)
    updated = manual.end()
    run.step.count(window, updated=updated, tried=manual.has_tried)
    for teacher in run.optim.teachers if updated else ():
        teacher.follow(run.progress.step - 1)
    if hooks.on_train_batch_end and not micro.is_dummy:
        output = detached(output)
        for hook in hooks.on_train_batch_end:
            hook(output, batch, index)
    run.log.end_step()
    return updated


def _asks_to_leave(run: Run, batch: Any, index: int) -> bool:
    return any(hook(batch, index) == -1 for hook in run.hooks.on_train_batch_start)


def leave_epoch(run: Run, window: AccumulationWindow, *, asked: bool) -> None:
    """End the epoch on all processes if a hook of one asks for it, because the others would wait for that process.

    Raises:
        EpochSkipped: A hook of some process asked to end the epoch.
    """
    if run.processes.world_size > 1:
        (asked,) = run.ending.agree(asked)
    if asked:
        run.step.end(window)
        raise EpochSkipped
