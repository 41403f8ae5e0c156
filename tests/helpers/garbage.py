"""Helpers for garbage collections during a run."""

import gc
from contextlib import contextmanager

from tests.helpers.tasks import Regression


@contextmanager
def unfreeze_objects():
    """Undo the freeze of `tests/conftest.py` while a test counts frozen objects."""
    gc.unfreeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@contextmanager
def watch_collections():
    """Record the generations of collections, each with a note of its time."""
    seen, noted = [], {"where": None}

    def note(phase, info):
        if phase == "start":
            seen.append((noted["where"], info["generation"]))

    with unfreeze_objects():
        gc.callbacks.append(note)
        try:
            yield seen, noted
        finally:
            gc.callbacks.remove(note)
            gc.enable()


class Untidy(Regression):
    """Task that leaves a lot of garbage in every batch, and records its position."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def litter(self, where):
        self.noted["where"] = where
        for _ in range(2000):
            circle = []
            circle.append(circle)

    def teardown(self, stage):
        self.noted["where"] = None

    def training_step(self, batch):
        self.litter(f"step {self.trainer.global_step + 1}")
        return super().training_step(batch)

    def validation_step(self, batch):
        self.litter("validation")
        super().validation_step(batch)

    def test_step(self, batch):
        self.litter("test")
        super().test_step(batch)
