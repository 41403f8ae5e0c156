"""What a trace says of a device: how long it had nothing to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@final
class Gaps:
    """Traces what runs on a device between `enable` and `disable`.

    Args:
        device: `cuda`, whose kernels and copies are traced, or `cpu`: its operators.

    Attributes:
        seconds: Between the begin of the first and the end of the last of them, in which none ran.
    """

    def __init__(self, device: str) -> None:
        cuda = device == "cuda"
        self._activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
        self._type = DeviceType.CUDA if cuda else DeviceType.CPU
        self._profile: Any = None
        self.seconds = 0.0

    def enable(self) -> None:
        """Begin."""
        self._profile = profile(activities=[self._activity], acc_events=True)  # torch 2.11 warns of a second cycle
        self._profile.start()

    def disable(self) -> None:
        """End, once all that was queued has run."""
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
    """How much of the time from the first start to the last end is in none of the ranges, which may overlap."""
    in_order = sorted((each.start, each.end) for each in ranges)
    idle, latest = 0.0, in_order[0][1]
    for start, end in in_order:
        idle += max(0.0, start - latest)
        latest = max(latest, end)
    return idle
