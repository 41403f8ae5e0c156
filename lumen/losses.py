"""A loss or gradient that is not a finite number ends the run, with the step that made it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import final

import torch

from lumen.errors import NonFiniteLoss


@final
class LossCheck:
    """Looks at every loss, and at every gradient norm. On the CPU at once; on CUDA without making the host wait.

    On CUDA each value travels to pinned memory behind the step's work and is read when it has arrived, so the error
    may come some steps late; it names the true step, and `flush` before a commit keeps checkpoints clean.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor, float | None, tuple[int, int, int]]] = deque()

    def check(self, loss: torch.Tensor, share: float | None, where: Callable[[], tuple[int, int, int]]) -> None:
        """Look at one loss or gradient norm.

        Args:
            loss: One element.
            share: The factor its weight gives it; 0 for a micro-batch that counts nothing; None for a gradient norm.
            where: Gives the step and epoch it belongs to, and the number of its micro-batch in the run.

        Raises:
            NonFiniteLoss: This one, or on CUDA an earlier one, is NaN or infinite.
        """
        if not loss.is_cuda:
            if not math.isfinite(value := loss.item()):
                raise _refusal(value, share, where())
            return
        arriving = torch.empty((), dtype=loss.dtype, pin_memory=True)
        arriving.copy_(loss.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._under_way.append((event, arriving, share, where()))
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            self._read_oldest()

    def flush(self) -> None:
        """Wait for every loss under way.

        Raises:
            NonFiniteLoss: One of them is NaN or infinite.
        """
        while self._under_way:
            self._under_way[0][0].synchronize()
            self._read_oldest()

    def _read_oldest(self) -> None:
        _, value, share, where = self._under_way.popleft()
        if not math.isfinite(value.item()):
            raise _refusal(value.item(), share, where)


def _refusal(value: float, share: float | None, where: tuple[int, int, int]) -> NonFiniteLoss:
    step, epoch, micro_batch = where
    place = f"step {step} (epoch {epoch}, micro-batch {micro_batch} of the run)"
    if share is None:
        return NonFiniteLoss(
            f"the gradient norm of {place} is {value}, although its losses are finite: the derivative of sqrt at 0, "
            "for example, or 0/0 behind torch.where. Run with detect_anomaly: true to find the operation."
        )
    if not share:
        return NonFiniteLoss(
            f"the loss of {place} is {value} although its weight is 0: a mean over nothing, and 0 x NaN is NaN. "
            "Divide by max(count, 1), or return None for such a micro-batch."
        )
    return NonFiniteLoss(
        f"the loss of {place} is {value}. Lower the learning rate, clip gradients, look at this batch, or run with "
        "detect_anomaly: true to find the operation."
    )
