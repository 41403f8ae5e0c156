"""Averages on several processes: written and read under any strategy, bitwise identical to one process."""

import pytest
import torch

import lumen
from lumen.errors import CheckpointMismatch
from tests.helpers.group import catch_message
from tests.helpers.sharded import list_tensors
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

DATA = {"samples": 20, "shuffle": False, "dtype": torch.float64}


def train(folder, strategy):
    """Train with averages and a checkpoint at each step."""
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1, at_end=False)
    callbacks = [saver, lumen.EMA(decay=0.7)]
    trainer = quiet_trainer(folder, max_steps=4, global_batch_size=12, strategy=strategy, callbacks=callbacks)
    trainer.fit(Regression(dtype=torch.float64), loader(48, 4, dtype=torch.float64))


def evaluate(path, strategy, average):
    """Return the parameters, and the validation that uses the averages in their place."""
    task = Regression(dtype=torch.float64)
    trainer = bare_trainer(path, strategy=strategy)
    found = trainer.validate(task, loader(**DATA), path / "runs" / "run", average=average)
    return found, list_tensors(dict(task.named_parameters()))


@pytest.mark.parametrize("writer", ["auto", "ddp", "fsdp"])
def test_averages_are_exact_under_any_strategy(group, tmp_path, writer):
    if writer == "auto":
        train(tmp_path, writer)
    else:
        group(2).run(train, tmp_path, writer)
    for average in ("EMA", "last:3", "parameters"):
        expected = evaluate(tmp_path, "auto", average)
        for reader in ("ddp", "fsdp"):
            for found in group(2).run(evaluate, tmp_path, reader, average):
                assert found[1] == expected[1]
                assert found[0][0]["val_loss"] == pytest.approx(expected[0][0]["val_loss"], abs=1e-13)
    found = {average: evaluate(tmp_path, "auto", average) for average in (None, "EMA", "last:3", "parameters")}
    assert found.pop("EMA") == found[None]
    assert all(one != found[None] for average, one in found.items() if average)


def test_averaging_incompatible_checkpoints_raises_on_all_ranks(group, tmp_path):
    train(tmp_path, "auto")
    task = Regression(dtype=torch.float32)
    quiet_trainer(tmp_path / "other", max_steps=1).fit(task, loader(8))
    (tmp_path / "other" / "runs" / "run").rename(tmp_path / "other" / "checkpoint")
    for path in (tmp_path / "other" / "checkpoint" / "checkpoints").iterdir():
        path.rename(tmp_path / "other" / path.name)
    paths = [str(tmp_path / "runs" / "run"), str(tmp_path / "other")]
    first, second = group(2).run(catch_message, CheckpointMismatch, evaluate, tmp_path, "fsdp", paths)
    assert first == second
    assert "net.0.weight is (16, 6) torch.float32 in" in first
