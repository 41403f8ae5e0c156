"""The optimizer of a run, what it moves, and its schedules."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.optim import Optimizer

from lumen.internals.optimizers import StepGuard
from lumen.optim import needs_closure
from lumen.run.configure_optimizers import SchedulerConfig, check_held, guard
from lumen.run.gradients import clip_grad_norm, clip_grad_value, scale_gradients
from lumen.task.task_module import TaskModule

_ZERO_GRAD = Optimizer.zero_grad  # as it is now: somebody may replace it


@final
class Optimization:
    """The optimizer and its schedulers. There is none before `fit` has built it, and none in other stages.

    Args:
        task: The optimizer moves its parameters.

    Attributes:
        optimizer: The optimizer that trains the task.
        schedulers: When each is moved, by what.
        needs_closure: The optimizer evaluates a step's loss several times.
        is_updating: The run calls the optimizer's `step` now.
        built_groups: Names of the parameters in each of its groups, when it was built.
        configured: The settings of the optimizer and the schedulers when they were built.
        built: Which parameters were frozen and which modules in eval mode then.
    """

    optimizer: Optimizer

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._held = 0  # parameters of the optimizer that are known to be the task's
        self._guard: StepGuard | None = None
        self.schedulers: list[SchedulerConfig] = []
        self.needs_closure = False
        self.is_updating = False
        self.built_groups: list[list[str]] = []
        self.configured: dict[str, Any] = {}
        self.built: dict[str, list[str]] = {}

    def take(self, optimizer: Optimizer, schedulers: list[SchedulerConfig], *, in_step: Any) -> None:
        """Take what `configure_optimizers` gave.

        Args:
            optimizer: The optimizer that trains the task.
            schedulers: Configured schedulers of the optimizer.
            in_step: Tells whether a training step is in progress: then nobody but the run may move the optimizer.
        """
        self.optimizer, self.schedulers = optimizer, schedulers
        self.needs_closure = needs_closure(optimizer)
        self._guard = guard(optimizer, lambda: self.is_updating or not in_step())

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer moves now: hooks may add to its groups at any time."""
        held: list[torch.nn.Parameter] = []
        for group in self.optimizer.param_groups:
            held += group["params"]
        return held

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of `parameters`."""
        return [parameter.grad for parameter in self.parameters]

    def zero_grad(self) -> None:
        """Drop the gradients of the step before, once it is sure that the optimizer moves the task alone."""
        held = 0
        for group in self.optimizer.param_groups:
            held += len(group["params"])
        if held != self._held:
            check_held(self._task, self.optimizer)
            self._held = held
        if getattr(self.optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:  # as torch's does, at the cost of this alone
            for parameter in group["params"]:
                parameter.grad = None

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        scale_gradients(self.parameters, factor)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients by their norm. Returns the norm before: a scalar tensor. Collective."""
        return clip_grad_norm(self.parameters, max_norm)

    def clip_grad_value(self, max_value: float) -> None:
        """Clamp the gradients to [-max_value, max_value]."""
        clip_grad_value(self.parameters, max_value)

    def release(self) -> None:
        """Let the user call the optimizer's `step` again."""
        if self._guard is not None:
            self._guard.remove()
