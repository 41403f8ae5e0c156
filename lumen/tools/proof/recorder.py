"""Record of a training by step: digests of computed values, and the callback that records them."""

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
from lumen.data.nested import iterate_tensors, map_leaves
from lumen.data.rank_checks import iterate_bytes
from lumen.distributed.dtensor import get_local_tensor, is_sharded
from lumen.internals.tensors import TorchDispatchMode

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


def digest_value(value: Any) -> str:
    """Return numbers, strings and scalar tensors as text, and a hexadecimal hash of any other value.

    Args:
        value: Tensors, arrays and plain data, nested in any way. A sharded tensor counts by this process's shard, an
            unreadable tensor (inside `torch.func.vmap`, for example) by dtype and shape.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        with suppress(RuntimeError):  # inside a transform of torch.func
            value = _get_local(value.detach()).item()
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return repr(value)
    code = hashlib.blake2b(digest_size=8)
    try:
        for piece in iterate_bytes(map_leaves(value, _get_local)):
            code.update(piece)
    except (RuntimeError, TypeError):
        return f"{getattr(value, 'dtype', type(value).__name__)}{tuple(getattr(value, 'shape', ()))}"
    return code.hexdigest()


def _get_local(value: Any) -> Any:
    return get_local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value


def iterate_state(task: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind ("parameter" or "buffer"), name and tensor of all parameters, then of all buffers."""
    yield from (("parameter", *named) for named in task.named_parameters())
    yield from (("buffer", *named) for named in task.named_buffers())


def iterate_optimizer_state(
    task: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, str, Any]]:
    """Yield the state of optimizers as parameter name, state name and value."""
    names: dict[Any, str] = {parameter: name for name, parameter in task.named_parameters()}
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            yield from ((names.get(owner, "an unknown parameter"), *item) for item in state.items())


def describe_samples(trainer: Trainer, number: int) -> str | None:
    """Return the indices of the samples in a micro-batch of the step, or None if Lumen does not draw them."""
    requests = trainer.run.step.requests
    return None if requests is None or number >= len(requests) else " ".join(map(str, requests[number].indices))


def digest_generators() -> dict[str, str]:
    """Return digests of the global generators' states: torch, its CUDA devices if initialized, numpy and `random`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys), position, has_gauss, gauss],
        "random": repr(random.getstate()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{number}": each.get_state() for number, each in enumerate(torch.cuda.default_generators)}
    return {name: digest_value([state]) for name, state in states.items()}


#: Kinds of recorded entries, roughly in order within a step, and their descriptions with a slot for the place.
KINDS = {
    "micro-batches": "the number of micro-batches",
    "initial parameter": "the parameter {} at the start",
    "initial buffer": "the buffer {} at the start",
    "initial optimizer state": "the optimizer's state at the start, {}",
    "order": "the samples of the batch",
    "batch": "the content of the batch, of the same samples",
    "random": "the random numbers that {} draws",
    "input": "the input of {}, which is computed between modules",
    "output": "the output of {}, from the same input",
    "operator": "operator {}",
    "loss": "the loss, from the same outputs of modules",
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
    """Key of an entry in a record.

    Attributes:
        micro: Number of the micro-batch in its step on this process, from 0, or -1 for the whole step.
        kind: A kind in `KINDS`.
        place: Name of a module, parameter, buffer, operator, setting or value, or "" for a kind with one entry.
        turn: Number of earlier entries with the same micro-batch, kind and place.
    """

    micro: int
    kind: str
    place: str
    turn: int


@final
@dataclass
class StepTrace:
    """Record of one step of a training.

    Attributes:
        step: Number of completed updates after the step, from 1. A skipped update leaves the number to the next step.
        epoch: Number of the step's epoch, from 0.
        events: Digests in the order of computation.
        kept: Values of the events chosen by `keep`, on the CPU.
    """

    step: int
    epoch: int
    events: dict[Key, str] = field(default_factory=dict)
    kept: dict[Key, Any] = field(default_factory=dict)
    _turns: Counter[tuple[int, str, str]] = field(default_factory=Counter, repr=False)

    def add_event(
        self, micro: int, kind: str, place: str, value: Any, keep: Callable[[Key], bool] | None = None
    ) -> None:
        """Add a value to the record."""
        turn = self._turns[micro, kind, place]
        self._turns[micro, kind, place] += 1
        key = Key(micro, kind, place, turn)
        self.events[key] = digest_value(value)
        if keep is not None and keep(key):
            self.kept[key] = map_leaves(value, _copy_value)


def _copy_value(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


_UNWRITTEN = ("empty", "new_empty", "resize", "set_")  # These operators return uninitialized memory.


@final
class OperatorObserver(TorchDispatchMode):
    """Dispatch mode that reports the result of each operator, in forward and backward.

    Args:
        report: Function that is called with the operator's name, such as `aten.addmm`, and its result.
    """

    def __init__(self, report: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and report its result. The mode is off inside this method."""
        returned = func(*args, **(kwargs or {}))
        name = str(func).removesuffix(".default")
        library, _, plain = name.partition(".")
        if library != "profiler" and not plain.startswith(_UNWRITTEN):
            self._report(name, returned)
        return returned


Note = Callable[[str, str, Any], None]
Keep = Callable[[Key], bool]


@final
class ModuleObserver:
    """Recorder of the calls of a task's modules, which does not change what they compute.

    Args:
        note: Function that is called with a kind of `KINDS`, a place and a value.
        states: Function that returns a digest of each global generator's state.

    Attributes:
        is_on: True if calls are recorded.
        current: Name of the innermost module in forward or backward, or "" outside modules.
    """

    def __init__(self, note: Note, states: Callable[[], dict[str, str]]) -> None:
        self._note, self._states = note, states
        self._hooks = ExitStack()
        self._inside: list[str] = []
        self._roles: Any = WeakTensorKeyDictionary()
        self._drawn: dict[str, str] = {}
        self.is_on = False
        self.current = ""

    def watch_task(self, task: nn.Module) -> None:
        """Register hooks on all modules of a task."""
        for name, module in task.named_modules():
            name = name or "task"
            self._hooks.enter_context(module.register_forward_pre_hook(partial(self._on_enter, name), with_kwargs=True))
            self._hooks.enter_context(module.register_forward_hook(partial(self._on_leave, name), with_kwargs=True))

    def stop_watching(self) -> None:
        """Remove the hooks."""
        self.is_on = False
        self._hooks.close()
        self._roles.clear()

    def begin(self) -> None:
        """Start to record a micro-batch, after its generators were seeded."""
        self.is_on, self.current = True, ""
        self._inside.clear()
        self._drawn = self._states()

    def end(self) -> None:
        """Stop recording at the end of a micro-batch."""
        self.is_on, self.current = False, ""
        self._roles.clear()

    def note_draws(self, place: str) -> None:
        """Record the states of the generators that were used since the last call, before and after."""
        now = self._states()
        moved = [f"{name} {self._drawn.get(name)} {now[name]}" for name in now if now[name] != self._drawn.get(name)]
        if moved:
            self._note("random", place, ", ".join(moved))
        self._drawn = now

    def _on_enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_on:
            self.note_draws(self._inside[-1] if self._inside else "training_step")
            self._inside.append(name)
            self.current = name
            inputs = [args, kwargs]
            self._note("input", name, inputs)
            self._watch_gradients(inputs, "gradient of input", name)

    def _on_leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        if self.is_on and name in self._inside:
            self.note_draws(name)
            while self._inside.pop() != name:  # Inner modules remain if user code caught their error.
                pass
            self._note("output", name, returned)
            self._watch_gradients(returned, "gradient of output", name)
            self.current = self._inside[-1] if self._inside else ""

    def _watch_gradients(self, value: Any, kind: str, name: str) -> None:
        """Record the gradients of the tensors in a value in the backward. A tensor has one hook for all modules."""
        for tensor in iterate_tensors(value):
            if tensor.requires_grad and tensor.grad_fn is not None:
                known = self._roles.get(tensor)
                if known is None or known[0] is not tensor.grad_fn:  # changed in place
                    known = self._roles[tensor] = tensor.grad_fn, []
                    tensor.register_hook(partial(self._on_gradient, known[1]))  # type: ignore[no-untyped-call]
                if (kind, name) not in known[1]:
                    known[1].append((kind, name))

    def _on_gradient(self, roles: list[tuple[str, str]], gradient: torch.Tensor) -> None:
        """Record a gradient: first for the modules with the tensor as input, then for those with it as output."""
        if not self.is_on:
            return
        for kind, name in sorted(roles, key=lambda role: role[0] == "gradient of output"):
            self._note(kind, name, gradient)
        self.current = next((name for kind, name in roles if kind == "gradient of output"), "")  # innermost module


@final
class Recorder(Callback):
    """Callback that records digests of all values that training steps compute, in each process, in `trace`.

    The modules of a compiled task are not recorded. Recording hashes each tensor and synchronizes with the device.

    Args:
        last: Number of the last step to record, after which the training stops, or None not to stop it.
        first: Number of the first step to record, from 1.
        operators_at: Number of the step for which each operator is recorded too.
        keep: Function that returns True for the keys of entries whose values are kept too.

    Attributes:
        trace: The records of the steps so far, in order.
    """

    def __init__(
        self, last: int | None = None, *, first: int = 1, operators_at: int | None = None, keep: Keep | None = None
    ) -> None:
        self.trace: list[StepTrace] = []
        self._last, self._first, self._operators_at, self._keep = last, first, operators_at, keep
        self._modules, self._operators, self._hook = (
            ModuleObserver(self._add_event, self._get_generator_digests),
            ExitStack(),
            ExitStack(),
        )
        self._step: StepTrace | None = None
        self._micro, self._phase, self._is_noting = -1, "operator", False

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Register hooks on the modules, unless the task is compiled."""
        if not trainer.compilation.setting:
            self._modules.watch_task(task)

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Record the micro-batch, and start to record its computation."""
        if trainer.global_step + 1 < self._first:
            return
        if self._step is None:
            self._begin_recording(trainer, task)
        self._micro += 1
        if (samples := describe_samples(trainer, self._micro)) is not None:
            self._add_event("order", "", samples)
        self._add_event("batch", "", batch)
        self._modules.begin()
        self._operators.close()
        self._phase = "operator"
        if trainer.global_step + 1 == self._operators_at:
            self._operators.enter_context(OperatorObserver(self._on_operator))

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Record the loss that enters the backward."""
        if self._step is not None:
            self._modules.note_draws("training_step")
            self._add_event("loss", "", loss)
            self._phase = "backward operator"

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the random numbers of the backward, and end its phase."""
        if self._step is not None:
            self._modules.note_draws("backward")
            self._phase, self._modules.current = "operator", ""

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Record the complete gradients, and register a hook on the optimizer's step."""
        if self._step is not None:
            self._note_gradients(task, "gradient")
            self._hook.close()  # the hook of another optimizer
            updates = optimizer.register_step_pre_hook(lambda *_: self._on_update(trainer, task, optimizer))
            self._hook.enter_context(updates)

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record parameters and buffers after an update, if any."""
        if self._step is None:
            return
        self._modules.end()
        self._operators.close()
        self._hook.close()
        if trainer.global_step == self._step.step:
            for kind, name, tensor in iterate_state(task):
                self._add_event(kind, name, tensor, step=True)

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the logged values, and close the step."""
        if self._step is not None:
            for name, value in trainer.newest_values.items():
                self._add_event("logged", name, torch.tensor(value, dtype=torch.float64), step=True)
            self._step = None
        if self._last is not None and trainer.global_step >= self._last:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Remove all hooks."""
        self._operators.close()
        self._modules.stop_watching()
        self._hook.close()

    # ------------------------------------------------------------------ notes

    def _begin_recording(self, trainer: Trainer, task: TaskModule) -> None:
        self._step, self._micro = StepTrace(trainer.global_step + 1, trainer.current_epoch), -1
        if not self.trace:
            for kind, name, tensor in iterate_state(task):
                self._add_event(f"initial {kind}", name, tensor, step=True)
            for name, key, value in iterate_optimizer_state(task, trainer.optimizers):
                self._add_event("initial optimizer state", f"{name} {key}", value, step=True)
        self.trace.append(self._step)

    def _on_update(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Record clipped gradients and optimizer settings right before the update, after all hooks and schedulers."""
        if trainer.gradient_clip_val is not None:
            self._note_gradients(task, "clipped gradient")
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    shown = value if isinstance(value, torch.Tensor) else repr(value)
                    self._add_event("setting", f"groups[{number}].{name}", shown, step=True)
        self._phase = "update operator"

    def _note_gradients(self, task: TaskModule, kind: str) -> None:
        for name, parameter in task.named_parameters():
            if parameter.grad is not None:
                self._add_event(kind, name, parameter.grad, step=True)

    def _add_event(self, kind: str, place: str, value: Any, *, step: bool = False) -> None:
        if self._step is not None:
            self._is_noting = True
            self._step.add_event(-1 if step else self._micro, kind, place, value, self._keep)
            self._is_noting = False

    def _get_generator_digests(self) -> dict[str, str]:
        self._is_noting = True
        states = digest_generators()
        self._is_noting = False
        return states

    def _on_operator(self, name: str, returned: Any) -> None:
        if not self._is_noting:
            self._add_event(self._phase, f"{self._modules.current} {name}".strip(), returned)
