"""Watches the modules of a task: what they are given and return, forward and backward, and what they draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lumen.data.nested import tensors

Note = Callable[[str, str, Any], None]
_Roles = list[tuple[str, str]]


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
        self._handles: list[Any] = []
        self._inside: list[str] = []
        self._roles: Any = WeakTensorKeyDictionary()
        self._drawn: dict[str, str] = {}
        self.is_on = False
        self.current = ""

    def watch(self, task: nn.Module) -> None:
        """Look at each call of a module of a task from now on."""
        for name, module in task.named_modules():
            name = name or "task"
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                module.register_forward_hook(partial(self._leave, name), with_kwargs=True),
            ]

    def leave_alone(self) -> None:
        """Look at them no longer."""
        self.is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
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
                roles = self._roles_of(tensor)
                if (kind, name) not in roles:
                    roles.append((kind, name))

    def _roles_of(self, tensor: torch.Tensor) -> _Roles:
        known = self._roles.get(tensor)
        if known is None or known[0] is not tensor.grad_fn:  # it was changed in place
            known = self._roles[tensor] = tensor.grad_fn, []
            tensor.register_hook(partial(self._arrived, known[1]))  # type: ignore[no-untyped-call]
        roles: _Roles = known[1]
        return roles

    def _arrived(self, roles: _Roles, gradient: torch.Tensor) -> None:
        """Note a gradient: first as what the backward of those gave that took the tensor, then as what arrives."""
        if not self.is_on:
            return
        for kind, name in sorted(roles, key=lambda role: role[0] == "gradient of output"):
            self._note(kind, name, gradient)
        self.current = next((name for kind, name in roles if kind == "gradient of output"), "")  # the innermost
