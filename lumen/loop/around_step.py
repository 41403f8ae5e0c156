"""What a step does around its forwards and backwards: weighs its micro-batches, and keeps some unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lumen.data.nested import fill
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import TrainingError
from lumen.internals.tensors import own_buffers
from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import metric_states, restore_metrics
from lumen.run.run import Run


class EpochSkipped(Exception):
    """A hook ended the epoch."""


class RolledBack(Exception):
    """Hooks of all processes asked to go back to a checkpoint.

    Args:
        run: The run that trains.
        window: Its newest window, which is used.
        before: How many windows of its size before it are left out then.
        after: How many after it.

    Attributes:
        left_out: The micro-batches of the run, from and to, that are not to be trained on.
    """

    def __init__(self, run: Run, window: AccumulationWindow, before: int, after: int) -> None:
        super().__init__()
        end, size = run.progress.micro_batches, len(window.sizes)
        self.left_out = [max(0, end - (before + 1) * size), end + after * size]


def is_left_out(run: Run) -> bool:
    """Whether the next step is one of those that are not trained on."""
    return any(begin <= run.progress.micro_batches < end for begin, end in run.progress.left_out)


def leave_out(run: Run, window: AccumulationWindow) -> bool:
    """Use a step's batches for nothing. Returns False: it makes no update."""
    run.step.begin()
    for _ in window:  # what was asked of a loader's workers comes in order
        pass
    run.progress.advance(window, updated=False)
    run.step.end(window)
    return False


def weigh(run: Run, window: AccumulationWindow) -> Iterable[MicroBatch]:
    """The micro-batches of a step, weighed as far as is known; fetched all at once only if the task weighs them."""
    micro_batches: Iterable[MicroBatch] = window
    planned: float = window.samples
    if run.step.weighting.by_task:
        micro_batches = list(window)
        for micro in micro_batches:
            micro.weight = 0.0 if micro.is_dummy else float(run.task.batch_weight(micro.batch))
        (total,) = run.processes.sum([sum(micro.weight for micro in micro_batches)])
        planned = total * run.strategy.data_world_size / run.processes.world_size  # a data rank counts once
    run.step.weighting.begin(planned, len(window.sizes), run.progress.weight_guess)
    return micro_batches


def refuse_own_backward(run: Run, before: Sequence[torch.Tensor | None]) -> None:
    """Find out whether `training_step` has touched gradients, while the first step of a run is made.

    Args:
        run: The run that trains.
        before: The gradients before it was called.

    Raises:
        TrainingError: `training_step` has called backward or zero_grad itself.
    """
    for old, new in zip(before, run.optim.gradients(), strict=False):
        if old is not new:
            did = "a backward" if new is not None else "zero_grad"
            raise TrainingError(
                f"training_step has called {did} itself: the gradients of the optimizer's parameters are not what they "
                "were before. Lumen calls zero_grad, backward and the optimizer's step: return the loss, or the sum of "
                "several. For gradients that are used within the step call torch.autograd.grad, which leaves those of "
                "parameters alone."
            )


def refuse_synced_norms(run: Run) -> None:
    """Where BatchNorm sees the batches of all processes, one without a batch has no part that changes nothing."""
    if run.processes.world_size == 1:
        return
    if any(isinstance(module, torch.nn.SyncBatchNorm) and module.training for module in run.task.modules()):
        raise TrainingError(
            f"rank {run.processes.rank} has no loss in step {run.progress.step + 1}, but SyncBatchNorm needs a forward "
            "and a backward of every process. Use drop_last=True and a global batch that is a multiple of the "
            "processes', return no None from training_step, or use a norm that does not depend on the batch."
        )


def mark(run: Run) -> Callable[[], None]:
    """Return what puts back what a forward changes from here on: metrics and buffers."""
    accumulated = metric_states(run.task)
    places = [(own, own.copy()) for module in run.task.modules() if (own := own_buffers(module))]
    values = [(buffer, buffer.detach().clone()) for buffer in run.task.buffers()]

    def put_back() -> None:
        restore_metrics(accumulated)
        for buffers, held in places:  # an assignment has put another tensor there
            buffers.clear()
            buffers.update(held)
        with torch.no_grad():
            for buffer, before in values:
                fill(buffer, before)

    return put_back


@contextmanager
def unnoticed(run: Run) -> Iterator[None]:
    """The context of a forward that is no part of the run: what it logs, counts and moves is put back."""
    metrics, put_back = run.log.stage, mark(run)
    run.log.stage = StageMetrics()
    try:
        yield
    finally:
        run.log.stage = metrics
        put_back()
