"""Moving averages of a module's tensors: their places are found once, and a move is a few kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from lumen.distributed.dtensor import is_sharded, local_tensor
from lumen.internals.tensors import copy_all, is_saved, lerp, own_buffers, own_parameters

#: The dictionary that holds a tensor, and its key there: a module may put another tensor in the place of a buffer.
Place = tuple[Mapping[str, Any], str]


def places_of(module: nn.Module, *, buffers: bool, persistent: bool = False) -> dict[str, Place]:
    """Find where a module holds its parameters, by name; shared ones once.

    Args:
        module: The module, with its submodules.
        buffers: Find buffers too.
        persistent: Of these, only buffers that are saved.
    """
    found: dict[str, Place] = {}
    seen = set[int]()
    for prefix, each in module.named_modules():
        path = prefix and f"{prefix}."
        for held in (own_parameters(each), own_buffers(each) if buffers else {}):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen and (not persistent or is_saved(each, name)):
                    seen.add(id(tensor))
                    found[path + name] = held, name
    return found


@final
class Averages:
    """Moving averages of parameters and of running statistics, and copies of other buffers.

    Args:
        averages: Averages by name, perhaps in a dtype with more digits.
        tensors: The tensors that they follow, by the same names.
    """

    def __init__(self, averages: Mapping[str, Place], tensors: Mapping[str, Place]) -> None:
        self._parameters: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._statistics: list[tuple[Place, Place]] = []
        self._copied: list[tuple[Place, Place]] = []
        self._is_plain = True  # no shards, no other dtypes
        for name, (held, key) in tensors.items():
            (own, own_key), tensor = averages[name], held[key]
            self._is_plain &= own[own_key].dtype == tensor.dtype and not is_sharded(tensor)
            if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
                self._parameters[0].append(own[own_key])
                self._parameters[1].append(tensor)
            else:
                pairs = self._statistics if is_running_statistic(name, tensor) else self._copied
                pairs.append((averages[name], (held, key)))

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """Move each average by `average = decay * average + (1 - decay) * tensor`; copy the other buffers."""
        statistics, copied = _tensors(self._statistics), _tensors(self._copied)
        own, others = self._parameters[0] + statistics[0], self._parameters[1] + statistics[1]
        if not self._is_plain:
            own = [local_tensor(each) for each in own]
            others = [local_tensor(each).to(mine.dtype) for each, mine in zip(others, own, strict=True)]
        if own:
            lerp(own, others, 1.0 - decay)
        if self._copied:
            copy_all(*([local_tensor(each) for each in tensors] for tensors in copied))


def _tensors(pairs: list[tuple[Place, Place]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [held[key] for (held, key), _ in pairs], [held[key] for _, (held, key) in pairs]


def is_running_statistic(name: str, buffer: torch.Tensor) -> bool:
    """Return True if averages average a buffer; a mean of vectors of power iteration or of queues has no meaning."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
