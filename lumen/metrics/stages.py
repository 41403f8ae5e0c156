"""Keeps the torchmetrics states of training and of the evaluations within it apart, where they feed the same metric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from lumen.metrics.torchmetrics_states import Gather, MetricState, load_metric_state, metric_state, metrics_of

if TYPE_CHECKING:
    from torchmetrics import Metric


@final
class StatesApart:
    """Resets the metrics that training has updated for the time of an evaluation, and restores them after it.

    A metric that training has not updated since the last evaluation keeps its state: one that the user never resets
    goes on from evaluation to evaluation. A metric that only training updates is set aside during the evaluation's
    batches.

    Args:
        model: The module whose metrics are looked after; on it is noted how often each had been updated when an
            evaluation last ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self._metrics = metrics_of(model)
        self._seen = updates_seen(model)
        self._families = _families(model)
        self._states = self._copies(self._metrics)  # as they were before
        self._counts: dict[str, int] = {}
        self._apart: set[str] = set()  # families

    def put_aside(self) -> None:
        """Reset what training has updated: the batches of the evaluation come now."""
        self._apart = {family for family, names in self._families.items() if any(map(self._is_fed, names))}
        names = self._names(self._apart)
        self._states |= self._copies(names)  # hooks may have changed them
        for name in names:
            _empty(self._metrics[name])
        self._counts = {name: metric._update_count for name, metric in self._metrics.items()}

    def settle(self, gather: Gather | None) -> None:
        """Restore what no batch of the evaluation has updated: its batches are over. Collective, with a `gather`.

        Args:
            gather: Returns every rank's value of plain data. None: there is one process, or there are no metrics.
        """
        fed = {name for name, metric in self._metrics.items() if metric._update_count != self._counts[name]}
        mine = self._apart, {family for family, names in self._families.items() if fed & set(names)}
        ranks = [mine] if gather is None else gather(mine)
        fed_by_any = set().union(*(families for _, families in ranks))
        self._put_back(self._apart - fed_by_any)
        self._apart = fed_by_any & set().union(*(families for families, _ in ranks))

    def restore(self, *, everything: bool) -> None:
        """Restore what training had: the evaluation has ended.

        Args:
            everything: Restore all states, for an evaluation that counts nowhere (the sanity check).
        """
        self._put_back(self._families if everything else self._apart)
        for name in () if everything else self._names(self._families.keys() - self._apart):
            self._seen[name] = self._metrics[name]._update_count

    def _is_fed(self, name: str) -> bool:
        return self._metrics[name]._update_count not in (0, self._seen.get(name, 0))

    def _put_back(self, families: Iterable[str]) -> None:
        for name in self._names(families):
            load_metric_state(self._metrics[name], self._states[name])

    def _names(self, families: Iterable[str]) -> list[str]:
        return [name for family in families for name in self._families[family]]

    def _copies(self, names: Iterable[str]) -> dict[str, MetricState]:
        with torch.inference_mode(False):  # training is to change them
            return {name: metric_state(self._metrics[name]) for name in names}


def updates_seen(model: nn.Module) -> dict[str, int]:
    """How often each metric of a model had been updated when an evaluation last ended."""
    seen: dict[str, int] = vars(model).setdefault("metric_updates_seen", {})
    return seen


def _families(model: nn.Module) -> dict[str, list[str]]:
    """Names of the metrics that are updated together: those of one collection or wrapper, by its name."""
    metrics, families = metrics_of(model), dict[str, list[str]]()
    collections = [name for name, module in model.named_modules() if type(module).__name__ == "MetricCollection"]
    roots = sorted([*metrics, *collections], key=len)
    for name in metrics:
        root = next(root for root in roots if name == root or name.startswith(f"{root}."))
        families.setdefault(root, []).append(name)
    return families


def _empty(metric: Metric) -> None:
    """Set a metric's states to their defaults; its other attributes stay, which `reset` might change."""
    defaults = {name: value if isinstance(value, list) else value.clone() for name, value in metric._defaults.items()}
    load_metric_state(metric, (0, defaults))
