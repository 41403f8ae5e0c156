"""EMA on several processes: one average under every strategy, which resumes anywhere."""

import pytest
import torch

import lumen
from tests.helpers.ema import Normed, fit
from tests.helpers.sharded import list_tensors
from tests.helpers.tasks import Regression, loader, quiet_trainer


def train(folder, strategy, max_steps=6, world=1):
    """Return the average, the last validation, and the final parameters of the task."""
    task, ema = Regression(dtype=torch.float64), lumen.EMA(decay=0.7)
    options = {"max_steps": max_steps, "callbacks": [ema], "strategy": strategy, "resume": "auto"}
    trainer = quiet_trainer(folder, global_batch_size=12, val_check_interval=3, log_every_n_steps=1, **options)
    trainer.fit(task, loader(50, 4, dtype=torch.float64), loader(20, shuffle=False, dtype=torch.float64))
    return list_tensors(ema.average), trainer.newest_values["val_loss"], list_tensors(dict(task.named_parameters()))


def close(ours, theirs):
    for name, each in theirs.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(each), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("before", "after"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("fsdp", "auto"), ("auto", "fsdp")])
def test_ema_resumes_under_any_strategy(group, tmp_path, before, after):
    def run(strategy, max_steps):
        if strategy == "auto":
            return train(tmp_path / "parts", strategy, max_steps)
        return group(2).run(train, tmp_path / "parts", strategy, max_steps)[0]

    run(before, 4)
    ours = run(after, 6)
    if before == after:
        whole = group(2).run(train, tmp_path / "whole", before)[0]
        assert ours == whole
    alone = train(tmp_path / "alone", "auto")
    close(ours[0], alone[0])
    assert ours[1] == pytest.approx(alone[1], abs=1e-13)
    assert ours[2] == ours[0]


def train_normed(folder):
    ema = lumen.EMA(decay=0.7)
    trainer, task = fit(folder, ema, task=Normed(), strategy="ddp", resume=None, max_steps=4)
    return trainer.newest_values["val_loss"], list_tensors(task.state_dict())


def test_batch_norm_statistics_are_those_of_rank_0(group, tmp_path):
    first, second = group(2).run(train_normed, tmp_path)
    assert first == second
