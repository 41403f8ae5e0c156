"""Memory: a run takes as much as the hand-written loop, and a long run does not grow."""

import json
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lumen
from tests.helpers.programs import run_python
from tests.helpers.tasks import bare_trainer

LONG_RUN = """
import gc, json, sys
from pathlib import Path
import torch, lumen
from tests.helpers.tasks import Regression, loader

STEPS, WARM, EVERY, LEAKS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
leaked = []

class Task(Regression):
    def training_step(self, batch):
        if LEAKS:
            leaked.append({"object": [], "number": 1.0 + len(leaked), "tensor": torch.zeros(1)}[LEAKS[0]])
        return super().training_step(batch)

class Measuring(lumen.Callback):
    def on_step_end(self, trainer, task):
        if trainer.global_step in (WARM, STEPS):
            gc.collect()
            print(json.dumps({
                "rss_mb": int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6,
                "objects": len(gc.get_objects()),
                "blocks": sys.getallocatedblocks(),
                "tensors": sum(isinstance(each, torch.Tensor) for each in gc.get_objects()),
            }), flush=True)

lumen.Trainer(
    max_steps=STEPS, seed=1, val_check_interval=EVERY, callbacks=[Measuring()], enable_checkpointing=False,
    log_every_n_steps=10, enable_progress_bar=False,  # which remembers the last ten seconds
).fit(Task(), loader(80, 8), val_dataloaders=loader(16, 8, shuffle=False))
"""


def measure(folder, *arguments):
    """Measure a long run in a fresh process, after its warm-up and at its end."""
    warm, end = map(json.loads, run_python("-c", LONG_RUN, *arguments, cwd=folder)[0].splitlines())
    return {name: end[name] - warm[name] for name in warm}


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_long_run_with_evaluations_does_not_grow(tmp_path):
    growth = measure(tmp_path, 10_000, 2_000, 50)
    assert growth["objects"] < 400, growth
    assert growth["blocks"] < 2_000, growth
    assert growth["tensors"] <= 0, growth
    assert growth["rss_mb"] < 4, growth


def test_run_does_not_grow(tmp_path):
    growth = measure(tmp_path, 1_200, 400, 10)
    assert growth["objects"] < 100, growth
    assert growth["blocks"] < 300, growth
    assert growth["tensors"] <= 0, growth


@pytest.mark.parametrize(
    "leak", ["object", pytest.param("number", marks=pytest.mark.slow), pytest.param("tensor", marks=pytest.mark.slow)]
)
def test_one_small_object_a_step_would_be_seen(tmp_path, leak):
    growth = measure(tmp_path, 1_200, 400, 10, leak)
    assert growth["blocks"] >= 500, growth  # a run without a leak has fewer than 300
    if leak != "number":  # objects that no collector tracks
        assert growth["objects" if leak == "object" else "tensors"] >= 700, growth


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("known", [True, False], ids=["known order", "stream"])
def test_batch_is_freed_before_next_step_loads(tmp_path, known, accumulate):
    batches, alive = [], []

    class Sample(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            alive.append(sum(batch() is not None for batch in batches))
            return torch.ones(2)

    class Stream(IterableDataset):
        def __iter__(self):
            return map(Sample().__getitem__, range(12))

    class Task(lumen.TaskModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def training_step(self, batch):
            batches.append(weakref.ref(batch))
            return (self.weight * batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(Task(), DataLoader(Sample() if known else Stream(), batch_size=1))
    # where the order is known only one batch ahead, within a step; of a stream, a whole step is read ahead
    assert max(alive) == (accumulate - 1 if known else accumulate)
