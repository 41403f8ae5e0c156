"""The train and eval modes of modules, restored after an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

_log = logging.getLogger("lumen")


@final
class Modes:
    """The mode of every module in a model, train or eval, to be restored.

    Args:
        model: The module that holds all others.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, module, module.training) for name, module in model.named_modules()]
        self._chosen: set[int] = set()

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """The context of hooks whose choice stays: modes that they set, by `train`, `eval` or hand, are not restored.

        Calls of `eval` are noticed as calls, since during an evaluation all modules are in eval mode already.
        """
        train, entered = nn.Module.train, [module.training for _, module, _ in self._before]

        def noticed(module: nn.Module, mode: bool = True) -> nn.Module:
            self._chosen.add(id(module))
            return train(module, mode)

        nn.Module.train = noticed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.train = train  # type: ignore[method-assign]
            for (_, module, _), mode in zip(self._before, entered, strict=True):
                if module.training != mode:
                    self._chosen.add(id(module))

    def leave_to(self, hook: Callable[[], None]) -> None:
        """Let a hook set the modes after the evaluation: none is restored then."""
        hook()
        self._chosen.update(id(module) for _, module, _ in self._before)

    def restore(self) -> None:
        """Restore each module's mode, unless it was chosen by a hook meanwhile."""
        for _, module, training in self._before:
            if id(module) not in self._chosen:
                module.training = training
        if names := [name or "the task" for name, module, training in self._before if _is_odd(module, training)]:
            _log.warning(
                "in eval mode from now on, in training too, as a hook at the evaluation's end called eval() on them, "
                "or on_*_model_train left them so: %s. If a hook did so for itself alone, leave that out: there "
                "everything is in eval mode.",
                ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else ""),
            )


def _is_odd(module: nn.Module, was_training: bool) -> bool:
    """Whether a module with trainable parameters has left train mode."""
    return was_training and not module.training and any(each.requires_grad for each in module.parameters())
