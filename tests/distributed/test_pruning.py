"""Pruning on several processes: what one prunes, with its bits when it goes on."""

import pytest

import lumen
from lumen.errors import ConfigError
from tests.helpers.group import assert_equal
from tests.helpers.pruning import pruned


def train(folder, strategy, name, steps=None, **options):
    callback = lumen.ModelPruning(name, amount=0.3, verbose=1, **options)
    end, _ = pruned(folder, callback, lumen.EMA(0.9), steps=steps, strategy=strategy, global_batch_size=4)
    return end


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["l1_unstructured", pytest.param("random_unstructured", marks=pytest.mark.slow)])
def test_several_processes_prune_what_one_does_and_a_cut_run_has_the_bits_of_a_whole_one(
    group, tmp_path, strategy, name
):
    whole = group(2).run(train, tmp_path / "whole", strategy, name)
    alone = train(tmp_path / "alone", "auto", name)
    for each in whole:
        assert_equal(each, alone)
    for steps in (5, 8, None):
        parts = group(2).run(train, tmp_path / "parts", strategy, name, steps)
    for one, other in zip(parts, whole, strict=True):
        assert_equal(one, other, 0.0)


def resample(folder):
    with pytest.raises(ConfigError, match=r"FSDP cuts them up. Leave out resample_parameters"):
        train(folder, "fsdp", "l1_unstructured", resample_parameters=True)


def test_new_values_cannot_be_drawn_for_parts(group, tmp_path):
    group(2).run(resample, tmp_path)
