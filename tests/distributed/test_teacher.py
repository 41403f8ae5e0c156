"""Teacher on several processes: equal to one process, sharded with its student, and resumed anywhere."""

import pytest
import torch

import lumen
from tests.helpers.byol import ByHand, Byol
from tests.helpers.sharded import list_tensors
from tests.helpers.tasks import loader, quiet_trainer

STRATEGIES = {
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "blocks": lambda: lumen.FSDP(wrap="Block", sharding_strategy="shard_grad_op"),
    "students": lambda: lumen.FSDP(wrap="Sequential"),
}


def train(folder, strategy, max_steps=6, kind=Byol):
    """Return the validation, and the parameters of student and teacher."""
    task = kind(decay=0.7, final_decay=1.0, steps=6)
    options = {"max_steps": max_steps, "resume": "auto", "strategy": STRATEGIES[strategy]()}
    trainer = quiet_trainer(folder, global_batch_size=12, val_check_interval=3, **options)
    data = loader(50, 4 if kind is Byol else 6, dtype=torch.float64)
    trainer.fit(task, data, loader(20, shuffle=False, dtype=torch.float64) if kind is Byol else None)
    seen = trainer.newest_values["val_loss"] if kind is Byol else 0.0
    sizes = [each.to_local().numel() for each in task.teacher.parameters() if hasattr(each, "to_local")]
    return seen, list_tensors(task.state_dict()), sum(sizes)


def close(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], abs=1e-12)
    for name, each in theirs[1].items():
        torch.testing.assert_close(torch.tensor(ours[1][name]), torch.tensor(each), rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "blocks", "students"])
def test_several_processes_compute_what_one_does(group, tmp_path, strategy):
    alone = train(tmp_path / "alone", "auto")
    found = group(2).run(train, tmp_path / "ranks", strategy)
    for each in found:
        close(each, alone)
    if strategy != "ddp":  # each rank holds its shard
        assert sum(each[2] for each in found) == sum(p.numel() for p in Byol().teacher.parameters())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_tasks_that_optimize_by_hand_too(group, tmp_path, strategy):
    alone = train(tmp_path / "alone", "auto", kind=ByHand)
    for each in group(2).run(train, tmp_path / "ranks", strategy, 6, ByHand):
        close(each, alone)


@pytest.mark.parametrize(("before", "after"), [("ddp", "ddp"), ("fsdp", "fsdp"), ("fsdp", "auto"), ("auto", "blocks")])
def test_a_run_goes_on_under_any_strategy(group, tmp_path, before, after):
    def run(strategy, max_steps):
        if strategy == "auto":
            return train(tmp_path / "parts", strategy, max_steps)
        return group(2).run(train, tmp_path / "parts", strategy, max_steps)[0]

    run(before, 4)
    ours = run(after, 6)
    if before == after:
        whole = group(2).run(train, tmp_path / "whole", before)[0]
        assert ours[:2] == whole[:2]
    close(ours, train(tmp_path / "alone", "auto"))
