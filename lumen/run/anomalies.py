"""Which operation made a number that is not finite, and in which line: for runs with `detect_anomaly`."""

from __future__ import annotations

import math
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn

from lumen.errors import NonFiniteLoss
from lumen.internals.tensors import TorchDispatchMode
from lumen.precision import Precision
from lumen.run.nonfinite import Place, place_of

_OURS, _TORCHS = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(str(torch.__file__)).parent))
_KINDS: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], bool]]] = {
    "NaN": (torch.isnan, math.isnan),
    "infinite number": (torch.isinf, math.isinf),
}


@final
class OperationFinder(TorchDispatchMode):
    """Lies over a precision: notes what goes wrong in every forward, and explains a backward that makes a NaN.

    In a forward it looks at what each operation is given and what it gives, which makes each wait for its device.

    Args:
        precision: The run's precision, under which the forward runs.
        where: Gives the place in the run.
    """

    def __init__(self, precision: Precision, where: Callable[[], Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward, self._backward, self._where = precision.forward, precision.backward, where
        self._found: dict[str, str] = {}

    @classmethod
    def over(cls, precision: Precision, where: Callable[[], Place]) -> Self:
        """Lay one over a precision."""
        finder = cls(precision, where)
        vars(precision).update(forward=finder.forward, backward=finder.backward)
        return finder

    @classmethod
    def lift(cls, precision: Precision) -> None:
        """Take away what `over` laid, if it did: the user's own precision may serve another run."""
        for name in ("forward", "backward"):
            if isinstance(getattr(vars(precision).get(name), "__self__", None), cls):
                del vars(precision)[name]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The context of a forward."""
        self._found.clear()
        with self._forward(), self:
            yield

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation, and look for the first that makes what none of its arguments is."""
        kwargs = kwargs or {}
        given = {kind for kind in _KINDS if kind in self._found or _has((args, kwargs), kind)}
        result = operation(*args, **kwargs)
        for kind in _KINDS.keys() - given if "empty" not in str(operation) else ():  # whose memory holds anything
            if _has(result, kind):
                here = _of_user(traceback.format_stack())
                self._found[kind] = f"The first {kind} of its forward was made by {operation} here:\n{here}"
        return result

    def told(self) -> str:
        """What the newest forward has done."""
        nothing = "No operation of its forward made that of finite numbers: look at this batch and at the parameters."
        return "\n".join(self._found.values()) or nothing

    def backward(self, loss: torch.Tensor, *by: Callable[[torch.Tensor], Any]) -> None:
        """The backward of a loss.

        Raises:
            NonFiniteLoss: That of an operation made a NaN; says where its forward was.
        """
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self._backward(loss, *by)
            except RuntimeError as error:
                if "nan values" not in str(error):
                    raise
                tracebacks = (str(each.message) for each in said if "forward call" in str(each.message))
                here = _of_user(re.split(r'^(?=  File ")', next(tracebacks, ""), flags=re.M)[1:])
                raise NonFiniteLoss(
                    f"the backward of {place_of(self._where())}: {error} Its forward was called here:\n{here}"
                ) from error
        for each in said:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


def _has(values: Any, kind: str) -> bool:
    """Whether one of the numbers in nested arguments is of a kind."""
    of_tensor, of_float = _KINDS[kind]
    if isinstance(values, torch.Tensor):
        return _can_tell(values) and bool(of_tensor(values).any())
    if isinstance(values, float):
        return of_float(values)
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return any(_has(part, kind) for part in parts)


def _can_tell(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize > 1


def _of_user(frames: Iterable[str]) -> str:
    """Frames of what a step calls, the step itself first, without torch's and Lumen's own."""
    kept: list[str] = []
    for frame in frames:
        path = frame.partition('File "')[2].partition('"')[0]
        if path.startswith(_OURS) and path != __file__:
            kept.clear()
        elif not path.startswith((_OURS, _TORCHS)):
            kept.append(frame.rstrip())
    return "\n".join(kept)
