"""Idle time of a device, measured by a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@final
class Gaps:
    """Trace of a device between `enable` and `disable`.

    Args:
        device: `cuda` to trace kernels and copies, or `cpu` to trace operators.

    Attributes:
        seconds: Idle seconds between the start of the first traced event and the end of the last.
    """

    def __init__(self, device: str) -> None:
        cuda = device == "cuda"
        self._activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
        self._type = DeviceType.CUDA if cuda else DeviceType.CPU
        self._profile: Any = None
        self.seconds = 0.0

    def enable(self) -> None:
        """Start the trace."""
        self._profile = profile(activities=[self._activity], acc_events=True)  # torch 2.11 warns of a second cycle
        self._profile.start()

    def disable(self) -> None:
        """End the trace after all queued work."""
        if self._profile is None:
            return
        if self._type == DeviceType.CUDA:
            torch.cuda.synchronize()
        self._profile.stop()
        events = [event for event in self._profile.events() if event.device_type == self._type]
        if not events:
            raise RuntimeError(f"the trace has nothing that ran on {self._type.name}")
        self.seconds += between(event.time_range for event in events) / 1e6
        self._profile = None


def between(ranges: Iterable[Any]) -> float:
    """Return the time from the first start to the last end outside all ranges, which may overlap."""
    in_order = sorted((each.start, each.end) for each in ranges)
    idle, latest = 0.0, in_order[0][1]
    for start, end in in_order:
        idle += max(0.0, start - latest)
        latest = max(latest, end)
    return idle
