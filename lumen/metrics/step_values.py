"""Values logged in single steps: their means over micro-batches and ranks, and their way to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar, final

import torch

from lumen.errors import ConfigError
from lumen.metrics.accumulator import Accumulator
from lumen.metrics.host_copy import HostCopy
from lumen.metrics.log_call import LogOptions, Reduction
from lumen.metrics.torchmetrics_states import Gather

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
