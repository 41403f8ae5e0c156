"""Running reductions of logged values in float64, exact to the bit, that never wait for a device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch

from lumen.metrics.log_call import Reduction

_FOLD_AT = 64  # tensors kept before they are summed on their device; fixed, so that sums do not depend on saves


@final
class Accumulator:
    """A running reduction in float64 that never makes the host wait for a device.

    Numbers are folded in at once. Tensors (float64, on an accelerator) are kept and folded in groups of 64: the
    grouping is part of the state, so a resumed sum has the bits of an undisturbed one. NaN makes everything NaN.
    """

    __slots__ = ("pending", "reduction", "total", "weight")

    def __init__(self, reduction: Reduction = "mean") -> None:
        self.reduction = reduction
        self.total: float | torch.Tensor = {"min": math.inf, "max": -math.inf}.get(reduction, 0.0)
        self.weight = 0.0
        self.pending: list[tuple[torch.Tensor, float]] = []

    def add(self, value: float | torch.Tensor, weight: float) -> None:
        """Add a value that stands for `weight` samples; in a mean, one of weight 0 is ignored."""
        if not weight and self.reduction == "mean":  # it may be NaN, as a mean of nothing is, and 0 * NaN is NaN
            return
        self.weight += weight
        if isinstance(value, torch.Tensor):
            self.pending.append((value, weight))
            if len(self.pending) == _FOLD_AT:
                self.total, self.pending = self._folded(), []
        else:
            self.total = self._fold(self.total, value, weight)

    def compute(self) -> float | torch.Tensor:
        """The reduced value: a float, or a float64 tensor for values on an accelerator; NaN for a mean of nothing."""
        total = self._folded()
        if self.reduction != "mean":
            return total
        return total / self.weight if self.weight else math.nan

    def sums(self) -> tuple[float, float]:
        """Total and weight as plain numbers, for `of_ranks`. Waits for the device."""
        return float(self._folded()), self.weight

    @classmethod
    def of_ranks(cls, reduction: Reduction, sums: Iterable[tuple[float, float]]) -> Accumulator:
        """One accumulator over the values of all ranks, from the `sums` of each."""
        accumulator = cls(reduction)
        for total, weight in sums:
            accumulator.total = accumulator._fold(accumulator.total, total, 1.0)
            accumulator.weight += weight
        return accumulator

    def _fold(self, total: Any, value: Any, weight: float) -> Any:
        if self.reduction == "mean":
            return total + value * weight
        if self.reduction == "sum":
            return total + value
        if isinstance(value, torch.Tensor):
            if not isinstance(total, torch.Tensor):
                total = torch.full((), total, dtype=value.dtype, device=value.device)  # a copy would be waited for
            return getattr(torch, f"{self.reduction}imum")(total, value)
        beats = value < total if self.reduction == "min" else value > total
        return value if beats or value != value else total  # NaN stays NaN, as in torch

    def _folded(self) -> float | torch.Tensor:
        if not self.pending:
            return self.total
        values = torch.stack([value for value, _ in self.pending])
        if self.reduction in ("min", "max"):
            return self._fold(self.total, getattr(values, self.reduction)(), 1.0)  # type: ignore[no-any-return]
        if self.reduction == "mean":
            values = values * torch.tensor([weight for _, weight in self.pending], dtype=torch.float64).to(
                values.device, non_blocking=True
            )
        return self.total + values.sum()

    def state_dict(self) -> dict[str, Any]:
        """Plain data, from which `from_state` makes an equal accumulator, to the bit."""
        pending = [(float(value), weight) for value, weight in self.pending]
        return {"reduction": self.reduction, "total": float(self.total), "weight": self.weight, "pending": pending}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Accumulator:
        """An accumulator in the state that `state_dict` returned."""
        accumulator = cls(state["reduction"])
        accumulator.total, accumulator.weight = state["total"], state["weight"]
        accumulator.pending = [
            (torch.tensor(value, dtype=torch.float64, device=device), weight) for value, weight in state["pending"]
        ]
        return accumulator
