"""Mean of gradients without a wrapper: for every dtype and size, and for missing gradients."""

import pytest
import torch
from torch import nn

from lumen.strategies.ddp import average_gradients

SIZES = [(3,), (2, 5), (), (7 * 2**20,), (1,)]  # the fourth fills a bucket alone


def gradients(rank):
    """Return whole numbers, so that sums are exact in 16 bits too; rank 0 has no gradient of the last parameter."""
    made = [torch.full(size, float(2 * number + 4 * rank)) for number, size in enumerate(SIZES)]
    made += [each.double() for each in made[:3]]
    return [*made, None if rank == 0 else torch.full((2,), 6.0)]


def list_gradients(rank, world, compression):
    parameters = [nn.Parameter(torch.zeros(2) if each is None else each.clone()) for each in gradients(rank)]
    for parameter, gradient in zip(parameters, gradients(rank), strict=True):
        parameter.grad = gradient
    average_gradients(parameters, world, compression)
    return [(each.grad.dtype, each.grad.shape, each.grad.unique().tolist()) for each in parameters]


def run(compression):
    return list_gradients(torch.distributed.get_rank(), torch.distributed.get_world_size(), compression)


@pytest.mark.parametrize("compression", [None, "bf16", "fp16"])
def test_gradients_are_averaged_in_their_dtype(group, compression):
    dtypes = [torch.float32] * len(SIZES) + [torch.float64] * 3 + [torch.float32]
    shapes = [*SIZES, *SIZES[:3], (2,)]
    means = [2.0 * number + 2 for number in range(len(SIZES))]
    expected = [
        (dtype, shape, [mean]) for dtype, shape, mean in zip(dtypes, shapes, [*means, *means[:3], 3.0], strict=True)
    ]
    for found in group(2).run(run, compression):
        assert found == expected


def round_to(compression):
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([2.0**-12 + 1])
    average_gradients([parameter], 2, compression)
    return parameter.grad.item()


def test_compressed_gradients_are_rounded_to_compression_dtype(group):
    for compression, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        alone = float(torch.tensor((2.0**-12 + 1) / 2).to(dtype)) * 2
        assert group(2).run(round_to, compression) == [alone] * 2
    assert group(2).run(round_to, None) == [2.0**-12 + 1] * 2
