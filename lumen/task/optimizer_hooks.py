"""Optimizer methods of a task: calls of manual optimization, and overridable parts of automatic optimization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lumen.errors import ConfigError, TrainingError
from lumen.internals.optimizers import ForwardingOptimizer
from lumen.task.data_module import Attached


class OptimizerHooks(Attached):
    """Methods that a task calls in manual optimization, and methods of an optimizer step that it may override.

    With `automatic_optimization = False` the task's `training_step` calls `manual_backward`, and `step` and `zero_grad`
    of `self.optimizers()`. A call of `training_step` counts as one step if any optimizer has stepped in it.
    `max_steps`, `global_step`, validations and checkpoints count these steps. The batch is the whole step: each of
    several processes gets a part of it, and `manual_backward` computes the gradient of the whole batch. All processes
    must therefore call the same methods in the same order.

    With automatic optimization a task may override `backward`, `optimizer_step`, `optimizer_zero_grad`,
    `configure_gradient_clipping` and `lr_scheduler_step`. Lumen's promises then hold only if the overrides do the same
    on every process, and again after a resume.
    """

    automatic_optimization: bool

    # ------------------------------------------------------------------ manual optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several in the order of `configure_optimizers`.

        Args:
            use_pl_optimizer: True: return views of torch's optimizers, whose attribute `optimizer` is torch's. In
                manual optimization these skip updates whose gradients overflowed in fp16, as the run does. False:
                return torch's optimizers, to read them.
        """
        optim = self._get_fit_run("self.optimizers()").optim
        found = optim.optimizers
        if use_pl_optimizer:
            found = [ForwardingOptimizer(each) for each in found] if optim.manual is None else optim.manual.handles
        return list(found) if len(found) > 1 else found[0]

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several, or None."""
        schedulers = [config.scheduler for config in self._get_fit_run("self.lr_schedulers()").optim.schedulers]
        return schedulers if len(schedulers) > 1 else next(iter(schedulers), None)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss, over the whole batch of all processes, to the gradients of the parameters.

        Collective: every rank must call this equally often, with the loss of its own part of the batch.

        Args:
            loss: The mean over the samples of the batch, or over units if the task has `batch_weight`.
            args: Positional arguments of `torch.Tensor.backward`.
            kwargs: Keyword arguments of `torch.Tensor.backward`, such as `retain_graph` and `create_graph`.

        Raises:
            TrainingError: The task uses automatic optimization, or the loss has no gradient.
            NonFiniteLoss: The loss is NaN or infinite.
        """
        if self._run is None or not self._run.stage:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            return
        self._get_manual_optimization("manual_backward").backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Freeze the parameters of all other optimizers, except for shared ones, until `untoggle_optimizer`."""
        self._get_manual_optimization("toggle_optimizer").toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Restore `requires_grad` of all parameters from before `toggle_optimizer`."""
        self._get_manual_optimization("untoggle_optimizer").untoggle()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Train only this optimizer's parameters within the context."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of an optimizer's parameters. Collective under FSDP: every rank must call this.

        Args:
            optimizer: An optimizer from `self.optimizers()`.
            gradient_clip_val: Largest norm or element; None: no clipping.
            gradient_clip_algorithm: "norm", the default, or "value".

        Raises:
            ConfigError: The algorithm is unknown.
        """
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ConfigError(f'clip_gradients: expected "norm" or "value", found {gradient_clip_algorithm!r}.')
        if gradient_clip_val is None:
            return
        run = self._get_fit_run("clip_gradients")
        if gradient_clip_algorithm == "value":
            run.optim.clip_grad_value(gradient_clip_val, optimizer)
        else:
            run.step.store_norm(run.optim.clip_grad_norm(gradient_clip_val, optimizer))

    def _get_fit_run(self, caller: str) -> Any:
        """Return the run, or raise an error outside of training."""
        if self._run is None or getattr(self._run.optim, "optimizer", None) is None:
            raise ConfigError(
                f"{caller}: there is no optimizer. Optimizers exist during fit, after configure_optimizers."
            )
        return self._run

    def _get_manual_optimization(self, caller: str) -> Any:
        manual = self._get_fit_run(caller).optim.manual
        if manual is None:
            raise TrainingError(
                f"{caller} is for manual optimization, but {type(self).__name__} uses automatic optimization. Set "
                "self.automatic_optimization = False in __init__; or return the loss from training_step, and remove "
                "this call."
            )
        return manual

    # ------------------------------------------------------------------ what may be overridden

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a loss; in fp16 the loss is scaled."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Update the parameters with complete and clipped gradients. Not called in manual optimization.

        Args:
            epoch: The epoch in progress, from 0.
            batch_idx: Index of the step's last micro-batch in this process.
            optimizer: The optimizer, whose `step` makes the update. Without a call of `step` the step does not count.
            optimizer_closure: Function that returns the step's loss, which is already computed.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of the previous step when a step begins. Not called in manual optimization."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the complete gradients of each step. Not called in manual optimization.

        Args:
            optimizer: The optimizer that trains.
            gradient_clip_val: The trainer's `gradient_clip_val`.
            gradient_clip_algorithm: The trainer's algorithm: "norm" or "value"; None without clipping.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: float | None) -> None:
        """Step a scheduler when its step is due. Not called in manual optimization.

        Args:
            scheduler: The scheduler to step.
            metric: The value of the monitor of `ReduceLROnPlateau`; None for other schedulers.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)
