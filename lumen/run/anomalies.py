"""Check of losses and gradients for NaN and infinity, and search for the operation that made one."""

from __future__ import annotations

import math
import os
import re
import traceback
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from lumen.errors import NonFiniteLoss
from lumen.internals.tensors import TorchDispatchMode
from lumen.precision import Precision

StepPlace = tuple[int, int, int]  # step, epoch, and number of the micro-batch in the run


def describe_place(where: StepPlace) -> str:
    """Return a place in words, for messages."""
    step, epoch, micro_batch = where
    return f"step {step} (epoch {epoch}, micro-batch {micro_batch} of the run)"


@final
class NonFiniteCheck:
    """Check that every loss and every gradient norm is finite, without making the host wait for CUDA.

    On the CPU the check is immediate. On CUDA each value is copied to pinned memory after the step's work and is read
    on arrival. So the error may come some steps late, but the error names the right step. Call `flush` before a
    checkpoint is saved, so that no checkpoint holds a NaN.

    Args:
        describe_forward: Function that names the first operation of the newest forward that went wrong. With this
            function the host waits for each value.
    """

    def __init__(self, describe_forward: Callable[[], str] | None = None) -> None:
        self._describe_forward = describe_forward
        self._under_way: deque[tuple[_HostScalar, float | None, StepPlace]] = deque()
        self._free: dict[torch.dtype, list[_HostScalar]] = defaultdict(list)  # for reuse

    def check(self, loss: torch.Tensor, loss_factor: float | None, where: Callable[[], StepPlace]) -> None:
        """Check one loss or gradient norm.

        Args:
            loss: A tensor of one element.
            loss_factor: The factor that the weight of the loss gives, 0 for a loss without weight; None for a gradient
                norm.
            where: Function that returns the step, the epoch and the number of the micro-batch in the run.

        Raises:
            NonFiniteLoss: This value, or on CUDA an earlier value, is NaN or infinite.
        """
        if not loss.is_cuda or self._describe_forward is not None:
            if not math.isfinite(value := loss.item()):
                raise _make_non_finite_error(value, loss_factor, where(), self._describe_forward)
            return
        dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
        scalar = self._free[dtype].pop() if self._free[dtype] else _HostScalar(dtype)
        scalar.copy_from_device(loss)
        self._under_way.append((scalar, loss_factor, where()))
        while self._under_way and self._under_way[0][0].event.query():  # type: ignore[no-untyped-call]
            self._read_oldest()

    def flush(self) -> None:
        """Wait for all values that are not yet checked.

        Raises:
            NonFiniteLoss: One of the values is NaN or infinite.
        """
        while self._under_way:
            self._under_way[0][0].event.synchronize()
            self._read_oldest()

    def _read_oldest(self) -> None:
        scalar, loss_factor, where = self._under_way.popleft()
        self._free[scalar.value.dtype].append(scalar)
        if not math.isfinite(value := scalar.value.item()):
            raise _make_non_finite_error(value, loss_factor, where, None)


@final
class _HostScalar:
    """A scalar in pinned memory and its CUDA event, reused for many numbers because both are slow to create.

    Args:
        dtype: The dtype of the scalar: float64 for float64 numbers, else float32. The device converts the number.

    Attributes:
        event: The CUDA event of the number's arrival.
        value: The number in pinned memory.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.value = torch.empty((), dtype=dtype, pin_memory=True)

    def copy_from_device(self, number: torch.Tensor) -> None:
        """Queue the copy of a number after the current work of its device."""
        self.value.copy_(number.detach().reshape(()), non_blocking=True)
        self.event.record(torch.cuda.current_stream(number.device))


def _make_non_finite_error(
    value: float, loss_factor: float | None, where: StepPlace, description: Callable[[], str] | None
) -> NonFiniteLoss:
    place, advice = describe_place(where), "with detect_anomaly: true to find the operation."
    if loss_factor is None:
        return NonFiniteLoss(
            f"the gradient norm of {place} is {value}, although its losses are finite. Typical causes are the "
            f"derivative of sqrt at 0, and 0/0 behind torch.where.{f' Run {advice}' if description is None else ''}"
        )
    found = "" if description is None else f"\n{description()}"
    if not loss_factor:
        return NonFiniteLoss(
            f"the loss of {place} is {value} although its weight is 0: a mean over no values is NaN, and 0 x NaN is "
            f"NaN. Divide by max(count, 1), or return None for such a micro-batch.{found}"
        )
    return NonFiniteLoss(
        f"the loss of {place} is {value}. Lower the learning rate, clip gradients, check this batch"
        + (f", or run {advice}" if description is None else f".{found}")
    )


_OURS, _TORCHS = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(str(torch.__file__)).parent))
_KINDS: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], bool]]] = {
    "NaN": (torch.isnan, math.isnan), "infinite number": (torch.isinf, math.isinf),
}  # fmt: skip


@final
class OperationFinder(TorchDispatchMode):
    """Wrapper around a precision that finds the operation that made a NaN or infinity in a forward or backward.

    In a forward the finder checks the inputs and outputs of each operation, so the host waits for each operation.

    Args:
        precision: The run's precision, under which the forward runs.
        where: Function that returns the place in the run.
    """

    def __init__(self, precision: Precision, where: Callable[[], StepPlace]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward, self._backward, self._where = precision.forward, precision.backward, where
        self._found: dict[str, str] = {}
        vars(precision).update(forward=self.forward, backward=self.backward)

    @classmethod
    def remove_from(cls, precision: Precision) -> None:
        """Remove the finder from a precision, if it has one, because a user's precision may serve another run."""
        for name in ("forward", "backward"):
            if isinstance(getattr(vars(precision).get(name), "__self__", None), cls):
                del vars(precision)[name]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a forward under the precision, and check each operation in it."""
        self._found.clear()
        with self._forward(), self:
            yield

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation, and note the first whose result has a NaN or infinity that no argument has."""
        kwargs = kwargs or {}
        present = {kind for kind in _KINDS if kind in self._found or _has_kind((args, kwargs), kind)}
        result = operation(*args, **kwargs)
        for kind in _KINDS.keys() - present if "empty" not in str(operation) else ():  # `empty` may hold any number.
            if _has_kind(result, kind):
                frames = _format_user_frames(traceback.format_stack())
                self._found[kind] = f"The first {kind} of its forward was made by {operation} here:\n{frames}"
        return result

    def describe(self) -> str:
        """Return a description of what went wrong in the newest forward."""
        fallback = "No operation of the forward made it from finite numbers: check this batch and the parameters."
        return "\n".join(self._found.values()) or fallback

    def backward(self, loss: torch.Tensor, *by: Callable[[torch.Tensor], Any]) -> None:
        """Compute the backward of a loss.

        Raises:
            NonFiniteLoss: The backward of an operation made a NaN. The message shows where its forward was called.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._backward(loss, *by)
            except RuntimeError as error:
                if "nan values" not in str(error):
                    raise
                tracebacks = (str(each.message) for each in caught if "forward call" in str(each.message))
                frames = _format_user_frames(re.split(r'^(?=  File ")', next(tracebacks, ""), flags=re.M)[1:])
                raise NonFiniteLoss(
                    f"the backward of {describe_place(self._where())}: {error} Its forward was called here:\n{frames}"
                ) from error
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


def _has_kind(values: Any, kind: str) -> bool:
    """Return True if a number in nested arguments is of a kind (NaN or infinite)."""
    of_tensor, of_float = _KINDS[kind]
    if isinstance(values, torch.Tensor):
        is_dense = (
            type(values) in (torch.Tensor, nn.Parameter) and values.layout is torch.strided and not values.is_meta
        )
        is_checkable = is_dense and (values.is_floating_point() or values.is_complex()) and values.dtype.itemsize > 1
        return is_checkable and bool(of_tensor(values).any())
    if isinstance(values, float):
        return of_float(values)
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, (list, tuple)) else ()
    return any(_has_kind(part, kind) for part in parts)


def _format_user_frames(frames: Iterable[str]) -> str:
    """Return the frames of the user's code, from the step inwards, without frames of torch and Lumen."""
    kept: list[str] = []
    for frame in frames:
        path = frame.partition('File "')[2].partition('"')[0]
        if path.startswith(_OURS) and path != __file__:
            kept.clear()
        elif not path.startswith((_OURS, _TORCHS)):
            kept.append(frame.rstrip())
    return "\n".join(kept)
