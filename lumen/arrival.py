"""Numbers on their way from a device to the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar, final

import torch

K = TypeVar("K", bound=Hashable)


@final
class Arrival(Generic[K]):
    """Numbers on their way to the host; nobody waits for a CUDA device that is still computing them.

    Args:
        values: Numbers, and tensors of one element.
    """

    def __init__(self, values: Mapping[K, float | torch.Tensor]) -> None:
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        self._values: dict[K, float | torch.Tensor] = {**values, **tensors}
        self._names = list(on_device)
        self._event: torch.cuda.Event | None = None
        if on_device:
            stacked = torch.stack([tensor.reshape(()).double() for tensor in on_device.values()])
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)
            self._event = torch.cuda.current_stream(stacked.device).record_event()

    def is_here(self) -> bool:
        """Whether `read` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> dict[K, float]:
        """The numbers, waited for if necessary."""
        if self._event is not None:
            self._event.synchronize()
            self._values |= zip(self._names, self._host.tolist(), strict=True)
        return {name: float(value) for name, value in self._values.items()}
