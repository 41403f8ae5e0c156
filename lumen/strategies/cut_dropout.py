"""Dropout of inputs of which each process has a part: every process draws the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import nn
from torch.nn import functional as F


class Cut(NamedTuple):
    """Cut of a tensor into equal parts, of which this process has one.

    Attributes:
        dim: The dimension that is cut.
        rank: The number of this process's part.
        size: The number of parts.
    """

    dim: int
    rank: int
    size: int


def cut_dropout(layer: nn.Dropout, get_cut: Callable[[torch.Tensor], Cut | None]) -> None:
    """Let a dropout layer draw numbers for its whole input, of which each process has a part.

    Args:
        layer: The layer, whose input may be cut in further dimensions by other calls.
        get_cut: Function of the part that returns the cut of the input; None where the input is whole.
    """
    forward = vars(layer).setdefault("forward", _CutDropout(layer))
    forward.get_cuts.append(get_cut)


@final
class _CutDropout:
    """Forward of a dropout layer whose input is cut, in one dimension or several."""

    def __init__(self, layer: nn.Dropout) -> None:
        self._layer = layer
        self.get_cuts: list[Callable[[torch.Tensor], Cut | None]] = []

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Return this process's part of the output."""
        layer = self._layer
        cuts = [cut for get_cut in self.get_cuts if (cut := get_cut(part)) is not None]
        if not cuts or not layer.training or not layer.p or not part.numel():
            return F.dropout(part, layer.p, layer.training, layer.inplace)
        mask = self._draw_mask(part, cuts)
        return part.mul_(mask) if layer.inplace else part * mask

    def _draw_mask(self, part: torch.Tensor, cuts: list[Cut]) -> torch.Tensor:
        """Return the part of the mask that one process draws: 0, or the scale of a kept element.

        Torch draws in the order of memory, and in place by another function, so the mask is drawn for ones with the
        layout of the whole input. The generators of the processes have equal states.
        """
        shape, strides = [*part.shape], [*part.stride()]
        for dim, _, size in cuts:
            cut_dim = dim % part.dim()
            inner = strides[cut_dim], -cut_dim
            strides = [stride * size if (stride, -each) > inner else stride for each, stride in enumerate(strides)]
            shape[cut_dim] *= size
        storage = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        ones = torch.ones(storage, dtype=part.dtype, device=part.device).as_strided(shape, strides)
        mask = F.dropout(ones, self._layer.p, inplace=self._layer.inplace)
        for dim, rank, _ in cuts:
            mask = mask.narrow(dim, rank * part.shape[dim], part.shape[dim])
        return mask.clone()  # The backward keeps the copy of the part only.
