"""Values logged in single steps: their means over micro-batches and ranks, and their way to the loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Generic, TypeVar, final

import torch

from lumen.errors import ConfigError
from lumen.metrics.log_call import LogOptions, Reduction
from lumen.metrics.torchmetrics_states import Gather

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
        accumulator.total, accumulator.weight = number(state["total"]), number(state["weight"])
        accumulator.pending = [
            (torch.tensor(value, dtype=torch.float64, device=device), number(weight))
            for value, weight in state["pending"]
        ]
        return accumulator


def number(value: Any) -> float:
    """Return a number that a checkpoint holds.

    Raises:
        TypeError: The value is of another type.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return value


K = TypeVar("K", bound=Hashable)


@final
class HostCopy(Generic[K]):
    """Numbers that are copied to the host without waiting for a CUDA device that is still computing them.

    Args:
        values: Floats, and tensors of one element on any device, by key.
    """

    def __init__(self, values: Mapping[K, float | torch.Tensor]) -> None:
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._values: dict[K, float | torch.Tensor] = {**values, **tensors}
        self._under_way = [
            _copy({name: tensor for name, tensor in tensors.items() if tensor.device == device})
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        ]

    def is_here(self) -> bool:
        """Whether all copies have arrived, so that `read` returns at once."""
        return all(event.query() for *_, event in self._under_way)  # type: ignore[no-untyped-call]

    def read(self) -> dict[K, float]:
        """The numbers by key; waits for copies that have not arrived."""
        for names, host, event in self._under_way:
            event.synchronize()
            self._values |= zip(names, host.tolist(), strict=True)
        return {name: float(value) for name, value in self._values.items()}


def _copy(values: Mapping[K, torch.Tensor]) -> tuple[list[K], torch.Tensor, torch.cuda.Event]:
    """Begin to copy numbers of one device: their keys, the pinned tensor they go to, and the event of their arrival."""
    stacked = torch.stack([tensor.reshape(()).double() for tensor in values.values()])
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    return list(values), host, torch.cuda.current_stream(stacked.device).record_event()


T = TypeVar("T")
_NORM = "grad_norm", -1  # beside places of logged values

#: What was logged in one step (or evaluation batch), by name: the options, and each value with its weight.
Latest = dict[str, tuple[LogOptions, list[tuple[float | torch.Tensor, float]]]]


@final
class PendingStepLog:
    """The values of one step on their way to the loggers: they may arrive while the next step is computed.

    Args:
        latest: What this process has logged in the step.
        grad_norm: The gradient norm before clipping, the same on every rank; None without one.
        step: Optimizer updates completed, the step's own included.
        epoch: Epochs completed so far.
    """

    def __init__(self, latest: Latest, grad_norm: torch.Tensor | None, step: int, epoch: int) -> None:
        self.step, self.epoch = step, epoch
        self._latest = latest
        values: dict[tuple[str, int], float | torch.Tensor] = {
            (name, place): value
            for name, (_, pairs) in latest.items()
            for place, (value, _) in enumerate(pairs)
            if isinstance(value, torch.Tensor)
        }
        if grad_norm is not None:
            values[_NORM] = grad_norm
        self._copy = HostCopy(values)

    def values(self, gather: Gather | None) -> dict[str, float]:
        """What the loggers get; see `StageMetrics.step_values`. Waits for the device. Collective, with a `gather`."""
        read = self._copy.read()
        latest = self._latest
        if read.keys() - {_NORM}:  # else nothing is built for each name, which would make Python look for garbage
            latest = {
                name: (options, [(read.get((name, k), value), weight) for k, (value, weight) in enumerate(pairs)])
                for name, (options, pairs) in latest.items()
            }
        found = means(latest if gather is None else of_ranks(gather(latest)), for_loggers)
        values = {name: float(value) for name, value in found.items()}
        if _NORM in read:
            values.setdefault("grad_norm", read[_NORM])  # the user may log one
        return values


def for_loggers(options: LogOptions) -> bool:
    """Whether loggers get a name."""
    return options.logger


def for_the_bar(options: LogOptions) -> bool:
    """Return True if the progress bar shows a name."""
    return options.prog_bar


def of_ranks(ranks: Sequence[Latest]) -> Latest:
    """What all ranks have logged in a step, in the order in which a single process would have."""
    return {
        name: (agreed(name, [options for options, _ in each]), _in_turn([values for _, values in each]))
        for name, each in by_name(ranks).items()
    }


def floats(latest: Latest) -> Latest:
    """The same with every tensor read into a float. Waits for the device."""
    return {
        name: (options, [(float(value), weight) for value, weight in pairs])
        for name, (options, pairs) in latest.items()
    }


def means(latest: Latest, keep: Callable[[LogOptions], bool]) -> dict[str, float | torch.Tensor]:
    """The weighted mean (or other reduction) of each name whose options `keep` accepts."""
    values: dict[str, float | torch.Tensor] = {}
    for name, (options, pairs) in latest.items():
        if keep(options):
            values[options.variant(name, "step") if options.on_epoch else name] = (
                pairs[0][0] if len(pairs) == 1 else _reduced(pairs, options.reduce_fx)
            )
    return values


def _reduced(pairs: Iterable[tuple[float | torch.Tensor, float]], reduction: Reduction) -> float | torch.Tensor:
    window = Accumulator(reduction)
    for value, weight in pairs:
        window.add(value, weight)
    return window.compute()


def by_name(ranks: Iterable[Mapping[str, T]]) -> dict[str, list[T]]:
    """The values of several mappings under each name: in rank order, of those ranks that have it."""
    found: dict[str, list[T]] = {}
    for rank in ranks:
        for name, value in rank.items():
            found.setdefault(name, []).append(value)
    return found


def agreed(name: str, ranks: Sequence[T]) -> T:
    """The first of the ranks' values, which must all be equal.

    Raises:
        ConfigError: Two ranks log `name` in different ways.
    """
    for other in ranks:
        if other != ranks[0]:
            raise ConfigError(
                f"self.log({name!r}) was called with {ranks[0]} on one rank and with {other} on another. "
                "Log one name always with the same options, or use two names."
            )
    return ranks[0]


def _in_turn(ranks: Iterable[Iterable[T]]) -> list[T]:
    """The first of each rank, the second of each, and so on: micro-batches as one process would see them."""
    return [value for place in zip_longest(*ranks) for value in place if value is not None]
