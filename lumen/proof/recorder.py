"""The recorder: a callback that notes what each step of a training computes, and changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.callbacks import Callback
from lumen.proof.digests import generators
from lumen.proof.modules import Modules
from lumen.proof.operators import Operators
from lumen.proof.trace import Key, StepTrace, Trace

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class Recorder(Callback):
    """Notes digests of all that the steps of a training compute, in `trace`; every process notes its own.

    Of a compiled task the modules are not looked into. It costs a hash of each tensor, and waits for the device.

    Args:
        last: Number of the last step to record, after which the training stops; None: it goes on as ever.
        first: Number of the first step to record, from 1.
        operators_at: Number of the step of which each operator is recorded too.
        keep: Asked for each entry whether its value is to be kept too.

    Attributes:
        trace: The record so far.
    """

    def __init__(
        self,
        last: int | None = None,
        *,
        first: int = 1,
        operators_at: int | None = None,
        keep: Callable[[Key], bool] | None = None,
    ) -> None:
        self.trace = Trace()
        self._last, self._first, self._operators_at, self._keep = last, first, operators_at, keep
        self._modules, self._operators = Modules(self._note, self._states), Operators(self._called)
        self._hook: Any = None
        self._step: StepTrace | None = None
        self._micro, self._phase, self._is_noting, self._sees_operators = -1, "operator", False, False

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Begin to look."""
        if not trainer.compilation.setting:
            self._modules.watch(task)

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Note what the micro-batch is."""
        if trainer.global_step + 1 < self._first:
            return
        if self._step is None:
            self._begin(trainer, task)
        self._micro += 1
        requests = trainer.run.loaders.requests
        if requests is not None and self._micro < len(requests):
            self._note("order", "", " ".join(map(str, requests[self._micro].indices)))
        self._note("batch", "", batch)
        self._modules.begin()
        self._watch_operators(trainer.global_step + 1 == self._operators_at)

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Note the loss, as it goes into the backward."""
        if self._step is not None:
            self._modules.draws("training_step")
            self._note("loss", "", loss)
            self._phase = "backward operator"

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """The backward of the micro-batch is over."""
        if self._step is not None:
            self._modules.draws("backward")
            self._phase, self._modules.current = "operator", ""

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Note the complete gradients, and wait for the optimizer."""
        if self._step is not None:
            self._note_gradients(task, "gradient")
            self._wait_no_longer()  # for another optimizer
            self._hook = optimizer.register_step_pre_hook(lambda *_: self._updates(trainer, task, optimizer))

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what an update has made, if there was one."""
        if self._step is None:
            return
        self._modules.end()
        self._watch_operators(False)
        self._wait_no_longer()
        if trainer.global_step == self._step.step:
            for name, parameter in task.named_parameters():
                self._note("parameter", name, parameter, step=True)
            for name, buffer in task.named_buffers():
                self._note("buffer", name, buffer, step=True)

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Note what was logged, and close the step."""
        if self._step is not None:
            for name, value in trainer.newest_values.items():
                self._note("logged", name, torch.tensor(value, dtype=torch.float64), step=True)
            self._step = None
        if self._last is not None and trainer.global_step >= self._last:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Leave the task as it was."""
        self._watch_operators(False)
        self._modules.leave_alone()
        self._wait_no_longer()

    # ------------------------------------------------------------------ notes

    def _begin(self, trainer: Trainer, task: TaskModule) -> None:
        self._step, self._micro = StepTrace(trainer.global_step + 1, trainer.current_epoch), -1
        if not self.trace.steps:
            for name, parameter in task.named_parameters():
                self._note("initial parameter", name, parameter, step=True)
            for name, buffer in task.named_buffers():
                self._note("initial buffer", name, buffer, step=True)
            names: dict[Any, str] = {parameter: name for name, parameter in task.named_parameters()}
            for optimizer in trainer.optimizers:
                for owner, state in optimizer.state.items():
                    for key, value in state.items():
                        self._note("initial optimizer state", f"{names.get(owner)} {key}", value, step=True)
        self.trace.steps.append(self._step)

    def _updates(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to move: all that hooks and schedules have set is set."""
        if trainer.gradient_clip_val is not None:
            self._note_gradients(task, "clipped gradient")
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    shown = value if isinstance(value, torch.Tensor) else repr(value)
                    self._note("setting", f"groups[{number}].{name}", shown, step=True)
        self._phase = "update operator"

    def _note_gradients(self, task: TaskModule, kind: str) -> None:
        for name, parameter in task.named_parameters():
            if parameter.grad is not None:
                self._note(kind, name, parameter.grad, step=True)

    def _note(self, kind: str, place: str, value: Any, *, step: bool = False) -> None:
        if self._step is not None:
            self._is_noting = True
            self._step.note(-1 if step else self._micro, kind, place, value, self._keep)
            self._is_noting = False

    def _states(self) -> dict[str, str]:
        self._is_noting = True
        states = generators()
        self._is_noting = False
        return states

    def _called(self, name: str, returned: Any) -> None:
        if not self._is_noting:
            self._note(self._phase, f"{self._modules.current} {name}".strip(), returned)

    def _watch_operators(self, wanted: bool) -> None:
        if wanted != self._sees_operators:
            self._sees_operators, self._phase = wanted, "operator"
            if wanted:
                self._operators.__enter__()  # type: ignore[no-untyped-call]
            else:
                self._operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _wait_no_longer(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
