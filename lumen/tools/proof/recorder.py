"""The record of a training, step by step: digests of what it computes, and the callback that notes them."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lumen.callbacks import Callback
from lumen.data.nested import convert, tensors
from lumen.data.rank_checks import pieces
from lumen.distributed.dtensor import is_sharded, local_tensor
from lumen.internals.tensors import TorchDispatchMode

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


def digest(value: Any) -> str:
    """Numbers and texts as they are written, also those in tensors without dimensions; of all else a hash, in hex.

    Args:
        value: Tensors, arrays and plain data, nested in any way. Of a sharded tensor this process's part counts, of
            what cannot be read (inside `torch.func.vmap`, say) dtype and shape.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        with suppress(RuntimeError):  # inside a transform of torch.func
            value = _local(value.detach()).item()
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return repr(value)
    code = hashlib.blake2b(digest_size=8)
    try:
        for piece in pieces(convert(value, _local)):
            code.update(piece)
    except (RuntimeError, TypeError):
        return f"{getattr(value, 'dtype', type(value).__name__)}{tuple(getattr(value, 'shape', ()))}"
    return code.hexdigest()


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value


def state_of(task: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the parameters, then the buffers, each as "parameter" or "buffer", its name, and the tensor."""
    yield from (("parameter", *named) for named in task.named_parameters())
    yield from (("buffer", *named) for named in task.named_buffers())


def optimizer_state(task: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str, Any]]:
    """Yield the state of optimizers: the name of a parameter, the name of a value, and the value."""
    names: dict[Any, str] = {parameter: name for name, parameter in task.named_parameters()}
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            yield from ((names.get(owner, "a parameter of nobody"), *item) for item in state.items())


def samples_of(trainer: Trainer, number: int) -> str | None:
    """Return the numbers of the samples in a micro-batch of the step; None: Lumen does not draw them."""
    requests = trainer.run.step.requests
    return None if requests is None or number >= len(requests) else " ".join(map(str, requests[number].indices))


def generators() -> dict[str, str]:
    """Digests of the states of the global generators: torch, its CUDA devices in use, numpy and `random`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys), position, has_gauss, gauss],
        "random": repr(random.getstate()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{number}": each.get_state() for number, each in enumerate(torch.cuda.default_generators)}
    return {name: digest([state]) for name, state in states.items()}


#: What is recorded of a step, roughly in the order in which it happens, and how a sentence names one at a place.
KINDS = {
    "initial parameter": "the parameter {} at the start",
    "initial buffer": "the buffer {} at the start",
    "initial optimizer state": "the optimizer's state at the start, {}",
    "order": "the samples of the batch",
    "batch": "the content of the batch, of the same samples",
    "random": "the random numbers that {} draws",
    "input": "what {} is given, which is computed between modules",
    "output": "the output of {}, of the same input",
    "operator": "operator {}",
    "loss": "the loss, of the same outputs of modules",
    "gradient of output": "the gradient that arrives at the output of {}",
    "gradient of input": "the gradient that the backward of {} returns",
    "backward operator": "backward operator {}",
    "gradient": "the gradient of {}",
    "clipped gradient": "the clipped gradient of {}",
    "setting": "the optimizer's {}",
    "update operator": "update operator {}",
    "parameter": "the parameter {} after the update",
    "buffer": "the buffer {} after the update",
    "logged": "the logged value {}",
}


class Key(NamedTuple):
    """What one entry of a record is of.

    Attributes:
        micro: Number of the micro-batch in its step, from 0, on this process; -1: the step as a whole.
        kind: One of `KINDS`.
        place: Name of a module, parameter, buffer, operator, setting or value; "" where there is only one.
        turn: How often there was such an entry before it in the micro-batch.
    """

    micro: int
    kind: str
    place: str
    turn: int


@final
@dataclass
class StepTrace:
    """What one step of a training has computed.

    Attributes:
        step: Its number: updates completed when it is complete, from 1. A skipped update leaves it to the next step.
        epoch: Number of its epoch, from 0.
        events: Digests in the order in which things happened.
        kept: Values of those events that were to be kept, on the CPU.
    """

    step: int
    epoch: int
    events: dict[Key, str] = field(default_factory=dict)
    kept: dict[Key, Any] = field(default_factory=dict)
    _turns: Counter[tuple[int, str, str]] = field(default_factory=Counter, repr=False)

    def note(self, micro: int, kind: str, place: str, value: Any, keep: Callable[[Key], bool] | None = None) -> None:
        """Add a value to the record."""
        turn = self._turns[micro, kind, place]
        self._turns[micro, kind, place] += 1
        key = Key(micro, kind, place, turn)
        self.events[key] = digest(value)
        if keep is not None and keep(key):
            self.kept[key] = convert(value, _copied)


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


_UNWRITTEN = ("empty", "new_empty", "resize", "set_")  # return memory in which nothing stands yet


@final
class Operators(TorchDispatchMode):
    """Tells what each operator returns, forward and backward, while it is entered.

    Args:
        tell: Called with the operator's name, as `aten.addmm`, and what it has returned.
    """

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator; the mode is off in here."""
        returned = func(*args, **(kwargs or {}))
        name = str(func).removesuffix(".default")
        library, _, plain = name.partition(".")
        if library != "profiler" and not plain.startswith(_UNWRITTEN):
            self._tell(name, returned)
        return returned


Note = Callable[[str, str, Any], None]
Keep = Callable[[Key], bool]


@final
class Modules:
    """Notes each call of a module of a task, while it is on; nothing of what they compute is changed.

    Args:
        note: Called with a kind of `KINDS`, a place and a value.
        states: Returns a digest of each global generator's state.

    Attributes:
        is_on: Whether calls are noted.
        current: Name of the innermost module that computes now, also in a backward; "" between them.
    """

    def __init__(self, note: Note, states: Callable[[], dict[str, str]]) -> None:
        self._note, self._states = note, states
        self._hooks = ExitStack()
        self._inside: list[str] = []
        self._roles: Any = WeakTensorKeyDictionary()
        self._drawn: dict[str, str] = {}
        self.is_on = False
        self.current = ""

    def watch(self, task: nn.Module) -> None:
        """Look at each call of a module of a task from now on."""
        for name, module in task.named_modules():
            name = name or "task"
            self._hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            self._hooks.enter_context(module.register_forward_hook(partial(self._leave, name), with_kwargs=True))

    def leave_alone(self) -> None:
        """Look at them no longer."""
        self.is_on = False
        self._hooks.close()
        self._roles.clear()

    def begin(self) -> None:
        """A micro-batch begins: generators are keyed."""
        self.is_on, self.current = True, ""
        self._inside.clear()
        self._drawn = self._states()

    def end(self) -> None:
        """What comes now is no part of a micro-batch."""
        self.is_on, self.current = False, ""
        self._roles.clear()

    def draws(self, place: str) -> None:
        """Note the states of generators that have moved since the last look, before and after."""
        now = self._states()
        moved = [f"{name} {self._drawn.get(name)} {now[name]}" for name in now if now[name] != self._drawn.get(name)]
        if moved:
            self._note("random", place, ", ".join(moved))
        self._drawn = now

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_on:
            self.draws(self._inside[-1] if self._inside else "training_step")
            self._inside.append(name)
            self.current = name
            given = [args, kwargs]
            self._note("input", name, given)
            self._watch_gradients(given, "gradient of input", name)

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        if self.is_on and name in self._inside:
            self.draws(name)
            while self._inside.pop() != name:  # one that ended by an error, which somebody has caught
                pass
            self._note("output", name, returned)
            self._watch_gradients(returned, "gradient of output", name)
            self.current = self._inside[-1] if self._inside else ""

    def _watch_gradients(self, value: Any, kind: str, name: str) -> None:
        """Note the gradients of the tensors in a value once they are known; a tensor has one hook for all modules."""
        for tensor in tensors(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                known = self._roles.get(tensor)
                if known is None or known[0] is not tensor.grad_fn:  # it was changed in place
                    known = self._roles[tensor] = tensor.grad_fn, []
                    tensor.register_hook(partial(self._arrived, known[1]))  # type: ignore[no-untyped-call]
                if (kind, name) not in known[1]:
                    known[1].append((kind, name))

    def _arrived(self, roles: list[tuple[str, str]], gradient: torch.Tensor) -> None:
        """Note a gradient: first as what the backward of those gave that took the tensor, then as what arrives."""
        if not self.is_on:
            return
        for kind, name in sorted(roles, key=lambda role: role[0] == "gradient of output"):
            self._note(kind, name, gradient)
        self.current = next((name for kind, name in roles if kind == "gradient of output"), "")  # the innermost


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
        trace: The record of each step so far, the earliest first.
    """

    def __init__(
        self, last: int | None = None, *, first: int = 1, operators_at: int | None = None, keep: Keep | None = None
    ) -> None:
        self.trace: list[StepTrace] = []
        self._last, self._first, self._operators_at, self._keep = last, first, operators_at, keep
        self._modules, self._operators, self._hook = Modules(self._note, self._states), ExitStack(), ExitStack()
        self._step: StepTrace | None = None
        self._micro, self._phase, self._is_noting = -1, "operator", False

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
        if (samples := samples_of(trainer, self._micro)) is not None:
            self._note("order", "", samples)
        self._note("batch", "", batch)
        self._modules.begin()
        self._operators.close()
        self._phase = "operator"
        if trainer.global_step + 1 == self._operators_at:
            self._operators.enter_context(Operators(self._called))

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
            self._hook.close()  # of another optimizer
            updates = optimizer.register_step_pre_hook(lambda *_: self._updates(trainer, task, optimizer))
            self._hook.enter_context(updates)

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note what an update has made, if there was one."""
        if self._step is None:
            return
        self._modules.end()
        self._operators.close()
        self._hook.close()
        if trainer.global_step == self._step.step:
            for kind, name, tensor in state_of(task):
                self._note(kind, name, tensor, step=True)

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
        self._operators.close()
        self._modules.leave_alone()
        self._hook.close()

    # ------------------------------------------------------------------ notes

    def _begin(self, trainer: Trainer, task: TaskModule) -> None:
        self._step, self._micro = StepTrace(trainer.global_step + 1, trainer.current_epoch), -1
        if not self.trace:
            for kind, name, tensor in state_of(task):
                self._note(f"initial {kind}", name, tensor, step=True)
            for name, key, value in optimizer_state(task, trainer.optimizers):
                self._note("initial optimizer state", f"{name} {key}", value, step=True)
        self.trace.append(self._step)

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
