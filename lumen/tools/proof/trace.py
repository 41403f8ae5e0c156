"""The record of a training, step by step: digests of what it computes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn

from lumen.data.nested import convert
from lumen.data.rank_checks import pieces
from lumen.distributed.dtensor import is_sharded, local_tensor


def digest(value: Any) -> str:
    """Numbers and texts as they are written, also those in tensors without dimensions; of all else a hash, in hex.

    Args:
        value: Tensors, arrays and plain data, nested in any way. Of a sharded tensor this process's part counts, of
            what cannot be read (inside `torch.func.vmap`, say) dtype and shape.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        value = _number(value)
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


def _number(tensor: torch.Tensor) -> Any:
    try:
        return _local(tensor.detach()).item()
    except RuntimeError:  # inside a transform of torch.func
        return tensor


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value


def state_of(task: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the parameters, then the buffers, each as "parameter" or "buffer", its name, and the tensor."""
    for name, parameter in task.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in task.named_buffers():
        yield "buffer", name, buffer


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


#: What is recorded of a step, roughly in the order in which it happens.
KINDS = {
    "initial parameter": "the parameters at the start",
    "initial buffer": "the buffers at the start",
    "initial optimizer state": "the optimizer's state at the start",
    "order": "which samples the batch has",
    "batch": "what the batch holds",
    "random": "random numbers drawn",
    "input": "what a module is given",
    "output": "what a module returns",
    "operator": "what an operator returns",
    "loss": "the loss",
    "gradient of output": "the gradient that arrives at a module's output",
    "gradient of input": "the gradient that a module's backward returns",
    "backward operator": "what an operator of the backward returns",
    "gradient": "the gradient of a parameter",
    "clipped gradient": "the gradient of a parameter, clipped",
    "setting": "the optimizer's settings",
    "parameter": "a parameter after the update",
    "buffer": "a buffer after the update",
    "logged": "a logged value",
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


@final
@dataclass
class Trace:
    """The record of a training, or of some steps of it.

    Attributes:
        steps: A record of each step, the earliest first.
    """

    steps: list[StepTrace] = field(default_factory=list)

    def plain(self) -> list[dict[str, Any]]:
        """The record as plain data for JSON, without kept values."""
        return [
            {"step": each.step, "epoch": each.epoch, "events": [[*key, code] for key, code in each.events.items()]}
            for each in self.steps
        ]


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
