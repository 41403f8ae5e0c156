"""The optimizer of a run, with its parameters, gradients and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.optim import Optimizer

from lumen.internals.optimizers import StepGuard, drop_gradients
from lumen.optim import MultiOptimizer, needs_closure
from lumen.run.configure_optimizers import check_parameters_held, guard_steps
from lumen.run.gradients import (
    clip_grad_norm,
    clip_grad_value,
    list_parameters,
    remove_negative_zeros,
    scale_gradients,
)
from lumen.run.manual import ManualOptimization
from lumen.run.scheduler_config import SchedulerConfig
from lumen.task.hooks import OPTIMIZATION_METHODS, is_overridden
from lumen.task.task_module import TaskModule
from lumen.task.teacher import Teacher


@final
class Optimization:
    """The optimizer of `fit` and its schedulers. Before `fit` builds them and in other stages there is no optimizer.

    Args:
        task: The task, whose parameters the optimizer trains.

    Attributes:
        optimizer: The optimizer that trains the task. In manual optimization several are combined into one here.
        schedulers: Schedulers, each with the interval of its steps.
        manual: Manual optimization of the task; None in automatic optimization.
        needs_closure: True if the optimizer evaluates a step's loss several times.
        is_exact: True if gradients are summed in the order of micro-batches, and norms are computed from whole tensors.
        backward: The task's `backward` if the task overrides it; else None.
        overridden_hooks: Names of the parts of a step that the task overrides.
        built_groups: Names of the parameters in each group of the optimizer when it was built.
        teachers: Teachers, which follow modules of the task at each update.
        configured: The settings of the optimizer and the schedulers when they were built.
        built: The frozen parameters and the modules in eval mode when the optimizer was built.
    """

    optimizer: Optimizer

    def __init__(self, task: TaskModule) -> None:
        self._task = task
        self._held_count = 0  # number of the optimizer's parameters at the last check
        self._guards: list[StepGuard] = []
        self.schedulers: list[SchedulerConfig] = []
        self.manual: ManualOptimization | None = None
        self.needs_closure = self.is_exact = False
        self.backward: Callable[[torch.Tensor], None] | None = None
        self.overridden_hooks: frozenset[str] = frozenset()
        self.teachers: list[Teacher] = []
        self.built_groups: list[list[str]] = []
        self.configured: dict[str, Any] = {}
        self.built: dict[str, list[str]] = {}

    def set_optimizer(
        self,
        optimizer: Optimizer,
        schedulers: list[SchedulerConfig],
        *,
        is_exact: bool,
        may_step: Callable[[], bool],
        make_manual: Callable[[list[Optimizer]], ManualOptimization],
    ) -> None:
        """Take over the optimizer and schedulers from `configure_optimizers`.

        Args:
            optimizer: The optimizer that trains the task.
            schedulers: Configured schedulers of the optimizer.
            is_exact: True if gradients are summed in the order of micro-batches.
            may_step: Function that returns True if a call of an optimizer's `step` is allowed.
            make_manual: Function that makes the manual optimization of a list of optimizers.
        """
        task = self._task
        self.optimizer, self.schedulers, self.is_exact = optimizer, schedulers, is_exact
        self._guards = [
            guard_steps(each, may_step, is_manual=not task.automatic_optimization) for each in self.optimizers
        ]
        if not task.automatic_optimization:
            self.manual = make_manual(self.optimizers)
            return
        self.needs_closure = needs_closure(optimizer)
        self.overridden_hooks = frozenset(name for name in OPTIMIZATION_METHODS if is_overridden(task, name))
        self.backward = task.backward if "backward" in self.overridden_hooks else None
        if "lr_scheduler_step" in self.overridden_hooks:
            for config in schedulers:
                config.mover = task.lr_scheduler_step

    def record_built(self, groups: list[list[str]], configured: dict[str, Any], modes: dict[str, list[str]]) -> None:
        """Note the settings of the optimizer, the schedulers and the modules before a checkpoint is loaded.

        Args:
            groups: Names of the parameters in each group of the optimizer.
            configured: The settings of the optimizer and the schedulers.
            modes: The parameters that are frozen and the modules in eval mode.
        """
        self.built_groups, self.configured, self.built = groups, configured, modes

    def record_saved_settings(self, saved: dict[str, Any]) -> None:
        """Note the settings from a checkpoint, which replace the configured ones."""
        self.configured |= saved

    @contextmanager
    def select_schedulers(self, moves: Callable[[SchedulerConfig], bool]) -> Iterator[None]:
        """Step only some of the schedulers within the context."""
        every, self.schedulers = self.schedulers, [each for each in self.schedulers if moves(each)]
        try:
            yield
        finally:
            self.schedulers = every

    def record_saved_modes(self, saved: dict[str, list[str]]) -> None:
        """Note the modes from a checkpoint, which replace the modes of the built modules."""
        self.built = saved

    def drop_schedulers(self) -> None:
        """Step no scheduler in this run."""
        self.schedulers.clear()

    def set_teachers(self, teachers: list[Teacher]) -> None:
        """Let teachers follow the task in each update."""
        self.teachers = teachers

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that `configure_optimizers` returned."""
        several = isinstance(self.optimizer, MultiOptimizer) and not self._task.automatic_optimization
        return self.optimizer.optimizers if several else [self.optimizer]  # type: ignore[attr-defined]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Current parameters of the optimizer. Hooks may add parameters at any time."""
        return list_parameters(self.optimizer)

    def list_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of `parameters`."""
        return [parameter.grad for parameter in self.parameters]

    def zero_grad(self, epoch: int, batch_idx: int) -> None:
        """Drop the gradients of the step before, after a check that the optimizer holds only the task's parameters.

        Args:
            epoch: The epoch in progress.
            batch_idx: Index of the step's first micro-batch.
        """
        held = 0
        for group in self.optimizer.param_groups:
            held += len(group["params"])
        if held != self._held_count:
            check_parameters_held(self._task, self.optimizer)
            self._held_count = held
        if "optimizer_zero_grad" in self.overridden_hooks:
            self._task.optimizer_zero_grad(epoch, batch_idx, self.optimizer)
        else:
            drop_gradients(self.optimizer)

    def remove_negative_zeros(self) -> None:
        """Replace -0.0 in the gradients by 0.0."""
        remove_negative_zeros(self.parameters)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        scale_gradients(self.parameters, factor)

    def clip_grad_norm(self, max_norm: float, optimizer: Any = None) -> torch.Tensor:
        """Clip the gradients by their norm, or the gradients of one optimizer by their norm. Collective.

        Returns:
            The norm before clipping: a scalar tensor.
        """
        return clip_grad_norm(list_parameters(optimizer or self.optimizer), max_norm, exact=self.is_exact)

    def clip_grad_value(self, max_value: float, optimizer: Any = None) -> None:
        """Clamp the gradients, or the gradients of one optimizer, to [-max_value, max_value]."""
        clip_grad_value(list_parameters(optimizer or self.optimizer), max_value)

    def release(self) -> None:
        """Let the user call the optimizer's `step` again."""
        for each in self._guards:
            each.remove()
        if self.manual is not None:
            self.manual.untoggle()
