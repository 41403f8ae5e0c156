"""How a task moves its optimizers: the calls of manual optimization, and the steps of automatic one that may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from lumen.errors import ConfigError, TrainingError
from lumen.task.data_module import Attached


class OptimizerHooks(Attached):
    """What a task calls where it optimizes by hand, and what it may override of an optimizer's step.

    With `automatic_optimization = False` the task's `training_step` calls `manual_backward`, and `step` and `zero_grad`
    of `self.optimizers()`. Each call of `training_step` in which an optimizer has moved is one step, however many have
    and how often: that is what `max_steps`, `global_step`, validations and checkpoints count. A batch is the whole
    step: of several processes each is given a part of it, and `manual_backward` makes the gradient that of the whole
    batch. So all of them must call the same methods in the same order.

    With automatic optimization `backward`, `optimizer_step`, `optimizer_zero_grad`, `configure_gradient_clipping` and
    `lr_scheduler_step` may be overridden. What they then do to gradients and parameters is the user's: Lumen's
    promises hold for them where they do the same on every process, and again after a resume.
    """

    automatic_optimization: bool

    # ------------------------------------------------------------------ manual optimization

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them, in the order in which `configure_optimizers` returned them.

        Args:
            use_pl_optimizer: In manual optimization, what is returned moves the parameters as the run does: it leaves
                out updates whose gradients overflowed in fp16. False: torch's own, for a look at it.
        """
        run = self._in_fit("self.optimizers()")
        if run.optim.manual is None:
            return run.optim.optimizer
        found = run.optim.manual.handles if use_pl_optimizer else run.optim.optimizers
        return list(found) if len(found) > 1 else found[0]

    def lr_schedulers(self) -> Any:
        """None, the scheduler, or the list of schedulers."""
        schedulers = [config.scheduler for config in self._in_fit("self.lr_schedulers()").optim.schedulers]
        return schedulers if len(schedulers) > 1 else next(iter(schedulers), None)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of a loss to those of the parameters: that of the whole batch, of all processes.

        Collective: every rank must call this as often as the others, with the loss of its own part of the batch.

        Args:
            loss: The mean over the samples of the batch; over units if the task has `batch_weight`.
            args: Passed on to `torch.Tensor.backward`.
            kwargs: As `retain_graph` and `create_graph`.

        Raises:
            TrainingError: The task does not optimize by hand, or the loss has no gradient.
            NonFiniteLoss: The loss is NaN or infinite.
        """
        if self._run is None or not self._run.stage:
            loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]
            return
        self._by_hand("manual_backward").backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Freeze what the other optimizers move, and this one does not, until `untoggle_optimizer`."""
        self._by_hand("toggle_optimizer").toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Put `requires_grad` of all parameters back to what it was before `toggle_optimizer`."""
        self._by_hand("untoggle_optimizer").untoggle()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """The context in which only what this optimizer moves is trained."""
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
        """Clip the gradients of what an optimizer moves. Collective under FSDP: every rank must call this.

        Args:
            optimizer: One of `self.optimizers()`.
            gradient_clip_val: Largest norm or element; None: nothing is clipped.
            gradient_clip_algorithm: "norm", the default, or "value".

        Raises:
            ConfigError: There is no such algorithm.
        """
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ConfigError(f'clip_gradients: expected "norm" or "value", found {gradient_clip_algorithm!r}.')
        if gradient_clip_val is None:
            return
        run = self._in_fit("clip_gradients")
        if gradient_clip_algorithm == "value":
            run.optim.clip_grad_value(gradient_clip_val, optimizer)
        else:
            run.step.keep_norm(run.optim.clip_grad_norm(gradient_clip_val, optimizer))

    def _in_fit(self, what: str) -> Any:
        """The run, while it trains."""
        if self._run is None or getattr(self._run.optim, "optimizer", None) is None:
            raise ConfigError(f"{what}: there is no optimizer. It exists during fit, after configure_optimizers.")
        return self._run

    def _by_hand(self, what: str) -> Any:
        manual = self._in_fit(what).optim.manual
        if manual is None:
            raise TrainingError(
                f"{what} is for manual optimization, but {type(self).__name__} leaves the steps to Lumen: set "
                "self.automatic_optimization = False in __init__ to make them yourself; or return the loss from "
                "training_step, and leave this call out."
            )
        return manual

    # ------------------------------------------------------------------ what may be overridden

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Make the backward of a loss; in fp16 it is the scaled one."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Make an update, of gradients that are complete and clipped. Not called in manual optimization.

        Args:
            epoch: The epoch in progress, from 0.
            batch_idx: Of the step's last micro-batch in this process.
            optimizer: Its `step` makes the update; without a call there is none, and the step does not count.
            optimizer_closure: Returns the step's loss, which has been computed already.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the step before; a step begins. Not called in manual optimization."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the complete gradients of a step, in each step. Not called in manual optimization.

        Args:
            optimizer: The optimizer that trains.
            gradient_clip_val: The trainer's `gradient_clip_val`.
            gradient_clip_algorithm: The trainer's: "norm" or "value"; None where nothing is to be clipped.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: float | None) -> None:
        """Move a schedule, where it is due. Not called in manual optimization.

        Args:
            scheduler: The one that is due.
            metric: The value of a plateau's monitor; else None.
        """
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)
