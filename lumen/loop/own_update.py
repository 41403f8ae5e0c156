"""The update of a step by the task's own `optimizer_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from lumen.data.windows import AccumulationWindow
from lumen.run.run import Run

Evaluate = Callable[[], Any]


def update_by_task(run: Run, window: AccumulationWindow, closure: Evaluate | None) -> bool:
    """Let the task's `optimizer_step` make the update. Returns False if there was none."""
    handle = OptimizerOfStep(run, closure)
    last = window.first_index + window.batches - 1
    run.task.optimizer_step(run.progress.epoch, last, handle, closure or handle.loss)
    if not handle.was_called:
        run.precision.leave_out(run.optim.optimizer)
    return handle.has_moved


@final
class OptimizerOfStep:
    """The run's optimizer as `optimizer_step` of a task has it: its attributes are the optimizer's.

    Args:
        run: The run that trains.
        closure: For an optimizer that evaluates the loss several times; None: this one does not.

    Attributes:
        has_moved: It has made an update.
        was_called: True once `step` was called.
    """

    def __init__(self, run: Run, closure: Evaluate | None) -> None:
        self._run, self._closure = run, closure
        self.has_moved = self.was_called = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.optim.optimizer, name)

    def step(self, closure: Evaluate | None = None) -> Any:
        """Update the parameters, unless gradients overflowed in fp16. Returns the loss that `closure` returned."""
        loss = None if closure in (None, self._closure) else closure()
        if not self.was_called:
            self.has_moved = self._run.precision.step(self._run.optim.optimizer, self._closure)
        elif self.has_moved:  # a scaler steps once: it would divide the gradients again
            self._run.optim.optimizer.step(self._closure)
        self.was_called = True
        return loss

    def loss(self) -> torch.Tensor | None:
        """The loss of the step's newest micro-batch, without its graph."""
        newest = self._run.step.loss
        return None if newest is None else newest.detach()
