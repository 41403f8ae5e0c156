"""The mean of gradients over processes, where no wrapper of torch's makes it during the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel has them
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def average(parameters: Sequence[nn.Parameter], world: int, compression: str | None = None, group: Any = None) -> None:
    """Replace each gradient by its mean over all processes. Collective: every rank must call this.

    Args:
        parameters: The same on all ranks; one without a gradient here has zeros.
        world: Number of processes.
        compression: Communicate in `fp16` or `bf16`; None: in the gradients' own dtype.
        group: The process group that communicates; None: torch's default group.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        if bucket[0].is_sparse:
            torch.distributed.all_reduce(bucket[0], group=group)
            bucket[0].div_(world)
            continue
        joined = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(world)
        wire = joined if compression is None else joined.to(_DTYPES[compression])
        torch.distributed.all_reduce(wire, group=group)
        parts = torch.split(wire.to(joined.dtype), [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def match_layout(parameter: nn.Parameter, *, is_sparse: bool) -> None:
    """Give a parameter a gradient of the layout that the other processes have, of zeros where it has none.

    Args:
        parameter: A parameter that some process has used.
        is_sparse: All the gradients of it that there are, are sparse.
    """
    if parameter.grad is None and is_sparse:
        no_rows = parameter.new_zeros(1, 0, dtype=torch.long)  # of as many dimensions as an embedding gives
        values = parameter.new_zeros(0, *parameter.shape[1:])
        parameter.grad = torch.sparse_coo_tensor(no_rows, values, parameter.shape, check_invariants=True)
    elif parameter.grad is not None and parameter.grad.is_sparse and not is_sparse:
        parameter.grad = parameter.grad.to_dense()


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients that are communicated together: of one dtype, up to some size; a sparse one alone."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for gradient in gradients:
        if gradient.is_sparse:
            yield [gradient]
            continue
        open_buckets.setdefault(gradient.dtype, []).append(gradient)
        sizes[gradient.dtype] += gradient.numel() * gradient.element_size()
        if sizes[gradient.dtype] >= _BUCKET_BYTES:
            del sizes[gradient.dtype]
            yield open_buckets.pop(gradient.dtype)
    yield from open_buckets.values()
