"""Parts of the sequences of a batch, for context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lumen.data.nested import iterate_tensors, map_leaves
from lumen.distributed.context import Context, get_context
from lumen.errors import ConfigError
from lumen.strategies.cut_dropout import Cut, cut_dropout


def cut_sequences(batch: Any, dim: int, context: Context) -> Any:
    """Return this process's part of a batch: each tensor that has the dimension `dim` is cut there.

    Raises:
        ConfigError: No tensor has the dimension, or lengths differ or cannot be shared equally.
    """
    lengths = sorted({each.shape[dim] for each in iterate_tensors(batch) if each.ndim > dim})
    if len(lengths) != 1 or lengths[0] % context.size:
        raise ConfigError(
            f"Mesh: sequence_dim is {dim}, where the tensors of a batch must have one length, a multiple of context = "
            f"{context.size}; found the lengths {', '.join(map(str, lengths)) or 'of no tensor'}. Pad sequences, and "
            "put other values into tensors with fewer dimensions."
        )
    length = lengths[0] // context.size
    return _map_sequences(batch, dim, lambda each: each.narrow(dim, context.rank * length, length).contiguous())


def shorten_sequences(batch: Any, dim: int, length: int) -> Any:
    """Return a batch with the first `length` positions of each sequence, or all if it has fewer."""
    return _map_sequences(batch, dim, lambda each: each.narrow(dim, 0, min(each.shape[dim], length)))


def _map_sequences(batch: Any, dim: int, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def convert(each: Any) -> Any:
        return function(each) if isinstance(each, torch.Tensor) and each.ndim > dim else each

    return map_leaves(batch, convert)


def cut_dropouts(task: nn.Module, dim: int, context: Context) -> None:
    """Let `nn.Dropout` modules draw numbers for whole sequences, and use this process's part of them.

    Args:
        task: The task with the modules.
        dim: The dimension of the sequence in inputs of these modules.
        context: The processes that share sequences.
    """

    def get_cut(part: torch.Tensor) -> Cut | None:
        return None if get_context() is None or part.ndim <= dim else Cut(dim, context.rank, context.size)

    for module in task.modules():
        if type(module) is nn.Dropout:
            cut_dropout(module, get_cut)
