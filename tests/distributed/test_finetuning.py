"""Unfreezing a backbone on several processes: training equals one process and resumes exactly."""

import pytest

import lumen
from tests.helpers.finetuning import Backbone, finetune
from tests.helpers.group import assert_equal


def train(folder, strategy, steps):
    return finetune(
        folder, lumen.BackboneFinetuning(2), Backbone(norm=False), steps, strategy=strategy, global_batch_size=8
    )[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_finetuning_equals_single_process_and_resumes_exactly(group, tmp_path, strategy):
    whole = group(2).run(train, tmp_path / "whole", strategy, 30)
    alone = train(tmp_path / "alone", "auto", 30)
    for each in whole:
        assert_equal(each, alone)
    for steps in (7, 12, 30):  # before and after the backbone was unfrozen
        parts = group(2).run(train, tmp_path / "parts", strategy, steps)
    for one, other in zip(parts, whole, strict=True):
        assert_equal(one, other, 0.0)
