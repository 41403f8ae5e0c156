"""Watches every operator of torch that is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from lumen.internals.tensors import TorchDispatchMode

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
