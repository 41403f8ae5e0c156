"""Lightning's names on several processes: calls for rank 0 only, norms of gradients, and the last batch."""

import warnings

import pytest
import torch

import lumen
from tests.helpers.tasks import Regression, bare_trainer, loader


class Normed(Regression):
    """Task that records the norms of every step's gradients, and whether a batch is the last one of its process."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.norms, self.last = [], []

    def training_step(self, batch):
        self.last.append(self.trainer.is_last_batch)
        return super().training_step(batch)

    def on_before_optimizer_step(self, optimizer):
        norms = {kind: lumen.grad_norm(self, kind) for kind in (2, "inf")}
        self.norms.append({name: float(norm) for each in norms.values() for name, norm in each.items()})


def norms(path, strategy):
    options = {"devices": 1} if strategy == "single" else {"devices": 2, "strategy": strategy}
    task, trainer = Normed(), bare_trainer(path, max_epochs=2, global_batch_size=8, **options)
    trainer.fit(task, loader(20, 4, dtype=torch.float64))
    return task.norms, task.last, (trainer.num_devices, trainer.device_ids)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradient_norms_equal_single_process(group, tmp_path, strategy):
    alone, last, _ = norms(tmp_path, "single")
    assert {*alone[0]} >= {"grad_2.0_norm/net.0.weight", "grad_2.0_norm_total", "grad_inf_norm_total"}
    assert last == [False, False, False, False, True] * 2
    ranks = group(2).run(norms, tmp_path, strategy)
    for found, _, devices in ranks:
        assert devices == (2, [0, 1])
        for mine, theirs in zip(found, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)
    assert ranks[0][1][:3] == [False, False, True]  # of 5 batches, rank 0 has three and rank 1 has two
    assert ranks[1][1][:2] == [False, True]


@lumen.rank_zero_only
def rank():
    return lumen.rank_zero_only.rank


def act_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lumen.rank_zero_warn("careful")
    default = lumen.rank_zero_only(lambda: "first", default="other")
    return lumen.rank_zero_only.rank, rank(), default(), [str(each.message) for each in caught]


def test_only_the_first_process_acts(group):
    assert group(2).run(act_once) == [(0, 0, "first", ["careful"]), (1, None, "other", [])]
