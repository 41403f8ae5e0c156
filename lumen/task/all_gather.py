"""`all_gather`: the tensors of all ranks, stacked, with gradients if wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist

from lumen.data.nested import as_tensors, convert, tensors
from lumen.errors import TrainingError

if TYPE_CHECKING:
    from lumen.distributed.processes import Processes


def all_gather(data: Any, processes: Processes, device: torch.device, *, sync_grads: bool) -> Any:
    """See `TaskModule.all_gather`. Collective: every rank must call this."""
    prepared = as_tensors(data, device)
    if processes.world_size == 1:
        return prepared
    described = processes.for_user().gather([f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors(prepared)])
    for rank, other in enumerate(described):
        if other != described[0]:
            raise TrainingError(
                f"all_gather: the ranks must give tensors of equal shapes and types, but rank 0 gives "
                f"{', '.join(described[0]) or 'none'} and rank {rank} gives {', '.join(other) or 'none'}. Pad them, or "
                "use trainer.strategy.gather, which takes any plain data and tensors."
            )
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return convert(prepared, _gathered)


def _gathered(part: Any) -> Any:
    return _AllGather.apply(part) if isinstance(part, torch.Tensor) else part  # type: ignore[no-untyped-call]


@final
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[dist.get_rank()]
