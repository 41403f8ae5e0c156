"""A loss or gradient that is not a finite number ends the run, with the step that made it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import final

import torch

from lumen.errors import NonFiniteLoss

Place = tuple[int, int, int]  # step, epoch, and number of the micro-batch in the run


def place_of(where: Place) -> str:
    """In words."""
    step, epoch, micro_batch = where
    return f"step {step} (epoch {epoch}, micro-batch {micro_batch} of the run)"


@final
class NonFiniteCheck:
    """Looks at every loss, and at every gradient norm. On the CPU at once; on CUDA without making the host wait.

    On CUDA each value travels to pinned memory behind the step's work and is read when it has arrived, so the error
    may come some steps late; it names the true step, and `flush` before a commit keeps checkpoints clean.

    Args:
        told: Says which operation of the newest forward was the first to go wrong: then the host waits for each value.
    """

    def __init__(self, told: Callable[[], str] | None = None) -> None:
        self._told = told
        self._under_way: deque[tuple[_HostScalar, float | None, Place]] = deque()
        self._free: list[_HostScalar] = []  # as many as were under way at once

    def check(self, loss: torch.Tensor, loss_factor: float | None, where: Callable[[], Place]) -> None:
        """Look at one loss or gradient norm.

        Args:
            loss: A tensor of one element.
            loss_factor: What the loss is multiplied by, by its weight; 0: it counts nothing; None for a gradient norm.
            where: Gives the step and epoch it belongs to, and the number of its micro-batch in the run.

        Raises:
            NonFiniteLoss: This one, or on CUDA an earlier one, is NaN or infinite.
        """
        if not loss.is_cuda or self._told is not None:
            if not math.isfinite(value := loss.item()):
                raise _refusal(value, loss_factor, where(), self._told)
            return
        scalar = self._free.pop() if self._free else _HostScalar()
        scalar.send(loss)
        self._under_way.append((scalar, loss_factor, where()))
        while self._under_way and self._under_way[0][0].event.query():  # type: ignore[no-untyped-call]
            self._read_oldest()

    def flush(self) -> None:
        """Wait for every loss under way.

        Raises:
            NonFiniteLoss: One of them is NaN or infinite.
        """
        while self._under_way:
            self._under_way[0][0].event.synchronize()
            self._read_oldest()

    def _read_oldest(self) -> None:
        scalar, loss_factor, where = self._under_way.popleft()
        self._free.append(scalar)
        if not math.isfinite(value := scalar.value.item()):
            raise _refusal(value, loss_factor, where, None)


@final
class _HostScalar:
    """One number on its way from a CUDA device to pinned memory, which both are used again: to make them takes long.

    Attributes:
        event: The number has arrived.
        value: The number, as float64 in pinned memory.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.value = torch.empty((), dtype=torch.float64, pin_memory=True)

    def send(self, number: torch.Tensor) -> None:
        """Copy a number behind what its device does now."""
        self.value.copy_(number.detach().reshape(()), non_blocking=True)
        self.event.record(torch.cuda.current_stream(number.device))


def _refusal(value: float, loss_factor: float | None, where: Place, told: Callable[[], str] | None) -> NonFiniteLoss:
    place, on_demand = place_of(where), "with detect_anomaly: true to find the operation."
    if loss_factor is None:
        return NonFiniteLoss(
            f"the gradient norm of {place} is {value}, although its losses are finite: the derivative of sqrt at 0, "
            f"for example, or 0/0 behind torch.where.{f' Run {on_demand}' if told is None else ''}"
        )
    found = "" if told is None else f"\n{told()}"
    if not loss_factor:
        return NonFiniteLoss(
            f"the loss of {place} is {value} although its weight is 0: a mean over nothing, and 0 x NaN is NaN. "
            f"Divide by max(count, 1), or return None for such a micro-batch.{found}"
        )
    return NonFiniteLoss(
        f"the loss of {place} is {value}. Lower the learning rate, clip gradients, look at this batch"
        + (f", or run {on_demand}" if told is None else f".{found}")
    )
