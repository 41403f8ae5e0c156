"""Quantization-aware training on several processes: equal to one process, and resumed bitwise."""

import pytest

from tests.helpers.group import assert_equal
from tests.helpers.quantization import train_quantized


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_quantized_training_equals_single_process_and_resumes_exactly(group, tmp_path, strategy):
    options = {"strategy": strategy, "global_batch_size": 4}
    whole = group(2).run(train, tmp_path / "whole", None, options)
    for each in whole:
        assert_equal(each, train_quantized(tmp_path / "alone"), 1e-6)  # torchao does not support float64
    group(2).run(train, tmp_path / "parts", 3, options)
    for one, other in zip(group(2).run(train, tmp_path / "parts", None, options), whole, strict=True):
        assert_equal(one, other, 0.0)


def train(folder, steps, options):
    return train_quantized(folder, steps, **options)
