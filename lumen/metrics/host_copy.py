"""Asynchronous copies of numbers from a device to the host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar, final

import torch

K = TypeVar("K", bound=Hashable)


@final
class HostCopy(Generic[K]):
    """Numbers that are copied to the host without waiting for a CUDA device that is still computing them.

    Args:
        values: Floats, and tensors of one element on any device, by key.
    """

    def __init__(self, values: Mapping[K, float | torch.Tensor]) -> None:
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._values: dict[K, float | torch.Tensor] = {**values, **tensors}
        self._under_way = [
            _copy({name: tensor for name, tensor in tensors.items() if tensor.device == device})
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        ]

    def is_here(self) -> bool:
        """Whether all copies have arrived, so that `read` returns at once."""
        return all(event.query() for *_, event in self._under_way)  # type: ignore[no-untyped-call]

    def read(self) -> dict[K, float]:
        """The numbers by key; waits for copies that have not arrived."""
        for names, host, event in self._under_way:
            event.synchronize()
            self._values |= zip(names, host.tolist(), strict=True)
        return {name: float(value) for name, value in self._values.items()}


def _copy(values: Mapping[K, torch.Tensor]) -> tuple[list[K], torch.Tensor, torch.cuda.Event]:
    """Begin to copy numbers of one device: their keys, the pinned tensor they go to, and the event of their arrival."""
    stacked = torch.stack([tensor.reshape(()).double() for tensor in values.values()])
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    return list(values), host, torch.cuda.current_stream(stacked.device).record_event()
