"""Context parallelism: processes that each compute a part of every sequence of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_active: list[Context | None] = [None]  # read in the backward too, which runs in threads of autograd


@final
class Context:
    """Processes of a context group, each with an equally long part of every sequence, in the order of ranks.

    Args:
        mesh: The mesh of the processes, of one dimension.

    Attributes:
        rank: The number of this process's part.
        size: The number of processes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole sequences of which each process has a part. Differentiable. Collective.

        Args:
            part: This process's part, with equal shape on all processes; its gradient is the sum over the processes.
            dim: The dimension of the sequence.
        """
        from torch.distributed.tensor import DTensor, Partial, Shard

        sharded = DTensor.from_local(part, self._mesh, [Shard(dim)], run_check=False)
        return sharded.full_tensor(grad_placements=[Partial()])


def get_context() -> Context | None:
    """Return the context group of the forward or backward in progress; None outside of context parallelism."""
    return _active[-1]


@contextmanager
def use_context(context: Context | None) -> Iterator[None]:
    """Let forwards and backwards within this block compute parts of sequences; None: whole sequences."""
    _active.append(context)
    try:
        yield
    finally:
        _active.pop()
