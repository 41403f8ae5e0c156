"""Values logged in single steps: their means over micro-batches and ranks, and their copy to the host for loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, TypeVar, final

import torch

from lumen.errors import ConfigError
from lumen.metrics.log_call import LogOptions, Reduction
from lumen.metrics.torchmetrics_states import Gather, interleave_ranks

_FOLD_AT = 64  # Number of tensors to sum at once on their device. It is fixed, so sums do not depend on saves.


@final
class Accumulator:
    """A running reduction in float64 that never makes the host wait for a device.

    Numbers are reduced at once. Tensors (float64, on an accelerator) are reduced in groups of 64. The grouping is part
    of the state, so a resumed sum is bitwise identical to an uninterrupted one. NaN makes the result NaN.

    Args:
        reduction: The reduction of the values to one number.
        exact: True to keep sums as fractions, which are rounded once. So the result does not depend on the order of the
            values. Each group of tensors then waits for the device.
    """

    __slots__ = ("pending", "reduction", "total", "weight")

    def __init__(self, reduction: Reduction = "mean", *, exact: bool = False) -> None:
        self.reduction = reduction
        zero = Fraction(0) if exact else 0.0
        self.total: float | Fraction | torch.Tensor = {"min": math.inf, "max": -math.inf}.get(reduction, zero)
        self.weight: float | Fraction = zero
        self.pending: list[tuple[torch.Tensor, float]] = []

    def add(self, value: float | torch.Tensor, weight: float) -> None:
        """Add a value of `weight` samples. A mean ignores values of weight 0."""
        if not weight and self.reduction == "mean":  # The value may be NaN, and 0 * NaN is NaN.
            return
        summand = self._as_summand(weight)
        self.weight += summand
        if isinstance(value, torch.Tensor):
            self.pending.append((value, weight))
            if len(self.pending) == _FOLD_AT:
                self.total, self.pending = self._compute_folded(), []
        else:
            self.total = self._fold_value(self.total, value, summand)

    def compute(self) -> float | torch.Tensor:
        """Return the reduced value: a float, or a float64 tensor on an accelerator; NaN for a mean over nothing."""
        total = self._compute_folded()
        if self.reduction == "mean":
            total = total / self.weight if self.weight else math.nan  # type: ignore[operator]
        return total if isinstance(total, torch.Tensor) else float(total)

    def get_sums(self) -> tuple[float | Fraction, float | Fraction]:
        """Return total and weight as plain numbers, for `merge_ranks`. Waits for the device."""
        total = self._compute_folded()
        return total if isinstance(total, Fraction) else float(total), self.weight

    @classmethod
    def from_ranks(cls, reduction: Reduction, sums: Iterable[tuple[float | Fraction, float | Fraction]]) -> Accumulator:
        """Make an accumulator over the values of all ranks, from the `get_sums` of each rank."""
        ranks = list(sums)
        accumulator = cls(reduction, exact=any(isinstance(weight, Fraction) for _, weight in ranks))
        for total, weight in ranks:
            accumulator.total = accumulator._fold_value(accumulator.total, total, 1)
            accumulator.weight += weight
        return accumulator

    def _as_summand(self, number: Any) -> Any:
        """Return a number in the form in which sums are kept; a number that is not finite stays a float."""
        return Fraction(number) if isinstance(self.weight, Fraction) and math.isfinite(number) else number

    def _fold_value(self, total: Any, value: Any, weight: float | Fraction) -> Any:
        if self.reduction == "mean":
            return total + self._as_summand(value) * weight
        if self.reduction == "sum":
            return total + self._as_summand(value)
        if isinstance(value, torch.Tensor):
            if not isinstance(total, torch.Tensor):
                total = torch.full((), total, dtype=value.dtype, device=value.device)  # A copy would wait.
            return getattr(torch, f"{self.reduction}imum")(total, value)
        beats = value < total if self.reduction == "min" else value > total
        return value if beats or value != value else total  # NaN stays NaN, as in torch

    def _compute_folded(self) -> float | Fraction | torch.Tensor:
        if not self.pending:
            return self.total
        if isinstance(self.weight, Fraction):
            total = self.total
            for value, weight in self.pending:
                total = self._fold_value(total, float(value), self._as_summand(weight))
            return total
        values = torch.stack([value for value, _ in self.pending])
        if self.reduction in ("min", "max"):
            return self._fold_value(self.total, getattr(values, self.reduction)(), 1.0)  # type: ignore[no-any-return]
        if self.reduction == "mean":
            values = values * torch.tensor([weight for _, weight in self.pending], dtype=torch.float64).to(
                values.device, non_blocking=True
            )
        return self.total + values.sum()  # type: ignore[operator]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data, for `from_state`. The restored accumulator is bitwise identical."""
        pending = [(float(value), weight) for value, weight in self.pending]
        total = str(self.total) if isinstance(self.total, Fraction) else float(self.total)
        weight = str(self.weight) if isinstance(self.weight, Fraction) else self.weight
        return {"reduction": self.reduction, "total": total, "weight": weight, "pending": pending}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Accumulator:
        """Make an accumulator from a state that `state_dict` returned."""
        accumulator = cls(state["reduction"])
        accumulator.total, accumulator.weight = (
            Fraction(each) if isinstance(each, str) else read_number(each) for each in (state["total"], state["weight"])
        )
        accumulator.pending = [
            (torch.tensor(value, dtype=torch.float64, device=device), read_number(weight))
            for value, weight in state["pending"]
        ]
        return accumulator


def read_number(value: Any) -> float:
    """Check that a value from a checkpoint is a number, and return it.

    Raises:
        TypeError: The value is no number.
    """
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {type(value).__name__}")
    return value


K = TypeVar("K", bound=Hashable)


@final
class HostCopy(Generic[K]):
    """Copies of numbers to the host that do not wait for a CUDA device that is still computing.

    Args:
        values: Floats, and tensors of one element on any device, by key.
    """

    def __init__(self, values: Mapping[K, float | torch.Tensor]) -> None:
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._values: dict[K, float | torch.Tensor] = {**values, **tensors}
        self._copies = [
            _start_copy({name: tensor for name, tensor in tensors.items() if tensor.device == device})
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        ]

    def is_ready(self) -> bool:
        """Return True if all copies have arrived, so that `read` does not wait."""
        return all(event.query() for *_, event in self._copies)  # type: ignore[no-untyped-call]

    def read(self) -> dict[K, float]:
        """Return the numbers by key. Waits for the copies."""
        for names, host, event in self._copies:
            event.synchronize()
            self._values |= zip(names, host.tolist(), strict=True)
        return {name: float(value) for name, value in self._values.items()}


def _start_copy(values: Mapping[K, torch.Tensor]) -> tuple[list[K], torch.Tensor, torch.cuda.Event]:
    """Begin to copy numbers of one device. Returns their keys, their pinned tensor and the event of their arrival."""
    stacked = torch.stack([tensor.reshape(()).double() for tensor in values.values()])
    host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
    host.copy_(stacked, non_blocking=True)
    return list(values), host, torch.cuda.current_stream(stacked.device).record_event()


T = TypeVar("T")
_NORM = "grad_norm", -1  # a key that no logged value has

#: The values logged in one step (or evaluation batch), by name: the options, and each value with its weight.
Latest = dict[str, tuple[LogOptions, list[tuple[float | torch.Tensor, float]]]]


@final
class PendingStepLog:
    """The values of one step for the loggers, copied to the host while the device computes the next step.

    Args:
        latest: The values that this process has logged in the step.
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

    def get_values(self, gather: Gather | None) -> dict[str, float]:
        """Return the values for loggers, as `StageMetrics.compute_step_values` does.

        Waits for the device. Collective if `gather` is not None.
        """
        read = self._copy.read()
        latest = self._latest
        if read.keys() - {_NORM}:  # Otherwise no objects are built, which could start Python's garbage collection.
            latest = {
                name: (options, [(read.get((name, k), value), weight) for k, (value, weight) in enumerate(pairs)])
                for name, (options, pairs) in latest.items()
            }
        found = compute_means(latest if gather is None else merge_ranks(gather(latest)), is_for_loggers)
        values = {name: float(value) for name, value in found.items()}
        if _NORM in read:
            values.setdefault("grad_norm", read[_NORM])  # A value that the user logs by this name has priority.
        return values


def is_for_loggers(options: LogOptions) -> bool:
    """Return True if loggers get a name."""
    return options.logger


def is_for_progress_bar(options: LogOptions) -> bool:
    """Return True if the progress bar shows a name."""
    return options.prog_bar


def merge_ranks(ranks: Sequence[Latest]) -> Latest:
    """Merge the values that all ranks have logged in a step, in the order of a single process."""
    return {
        name: (
            get_common_value(name, [options for options, _ in each]),
            interleave_ranks([values for _, values in each]),
        )
        for name, each in group_by_name(ranks).items()
    }


def read_floats(latest: Latest) -> Latest:
    """Convert every tensor to a float. Waits for the device."""
    return {
        name: (options, [(float(value), weight) for value, weight in pairs])
        for name, (options, pairs) in latest.items()
    }


def compute_means(latest: Latest, keep: Callable[[LogOptions], bool]) -> dict[str, float | torch.Tensor]:
    """Return the weighted mean (or other reduction) of each name whose options `keep` accepts."""
    values: dict[str, float | torch.Tensor] = {}
    for name, (options, pairs) in latest.items():
        if keep(options):
            values[options.get_variant_name(name, "step") if options.on_epoch else name] = (
                pairs[0][0] if len(pairs) == 1 else _reduce_pairs(pairs, options.reduce_fx)
            )
    return values


def _reduce_pairs(pairs: Sequence[tuple[float | torch.Tensor, float]], reduction: Reduction) -> float | torch.Tensor:
    first, weight = pairs[0]
    if reduction == "mean" and weight and all(isinstance(value, float) and value == first for value, _ in pairs):
        return first  # (v + v + v) / 3 may differ from v: a learning rate, on three processes.
    window = Accumulator(reduction)
    for value, weight in pairs:
        window.add(value, weight)
    return window.compute()


def group_by_name(ranks: Iterable[Mapping[str, T]]) -> dict[str, list[T]]:
    """Collect the values of all ranks by name, in rank order; a rank without the name is left out."""
    found: dict[str, list[T]] = {}
    for rank in ranks:
        for name, value in rank.items():
            found.setdefault(name, []).append(value)
    return found


def get_common_value(name: str, ranks: Sequence[T]) -> T:
    """Check that the values of all ranks are equal, and return the value.

    Raises:
        ConfigError: Two ranks log `name` in different ways.
    """
    for other in ranks:
        if other != ranks[0]:
            raise ConfigError(
                f"self.log({name!r}) was called with {ranks[0]} on one rank and with {other} on a different rank. Log "
                "one name always with the same options, or use two names."
            )
    return ranks[0]
