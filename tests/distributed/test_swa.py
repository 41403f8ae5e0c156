"""SWA on several processes: the mean of one process, which resumes bitwise."""

import pytest
from torch import nn

import lumen
from tests.helpers.group import assert_equal
from tests.helpers.swa import Scheduled, train_with_swa


class Plain(Scheduled):
    """Task without batch norm, whose statistics would differ between processes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.Tanh(), self.net[4])

    def forward(self, inputs):
        return self.net(inputs)


def train(folder, strategy, steps=None):
    swa = lumen.SWA(0.02, 3, 2)
    end, trainer = train_with_swa(folder, swa, steps=steps, task=Plain(), strategy=strategy, global_batch_size=8)
    return end | {"val_loss": trainer.newest_values["val_loss"]}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_swa_equals_single_process_and_resumes_exactly(group, tmp_path, strategy):
    whole = group(2).run(train, tmp_path / "whole", strategy)
    alone = train(tmp_path / "alone", "auto")
    for each in whole:
        assert_equal(each, alone)
    for steps in (20, 27, None):
        parts = group(2).run(train, tmp_path / "parts", strategy, steps)
    for one, other in zip(parts, whole, strict=True):
        assert_equal(one, other, 0.0)
