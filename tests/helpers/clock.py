"""Clock for tests: time passes only where code sleeps, so durations are exact."""

import importlib
import time
from types import SimpleNamespace

import pytest

READERS = (
    "lumen.callbacks.display", "lumen.callbacks.progress_bar", "lumen.callbacks.throughput",
    "lumen.callbacks.throughput", "lumen.data.adapter", "lumen.data.windows", "lumen.profilers.simple",
)  # fmt: skip


class Clock:
    """Clock that `time.sleep` advances, in this process."""

    def __init__(self):
        self.now_s = 1024.0

    def read(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    """Replace the time for profilers, timers, the progress bar and the throughput record."""
    clock = Clock()
    for module in READERS:
        monkeypatch.setattr(importlib.import_module(module), "perf_counter", clock.read)
    for module in ("lumen.callbacks.timer", "lumen.run.run_end", "lumen.trainer.stop_request"):
        monkeypatch.setattr(importlib.import_module(module), "time", SimpleNamespace(monotonic=clock.read))
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock
