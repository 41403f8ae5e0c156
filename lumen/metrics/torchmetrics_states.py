"""The states of the torchmetrics objects in a task: copied, restored, kept apart, and merged over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import nn

if TYPE_CHECKING:  # The import takes longer than that of Lumen. A user who logs a metric has imported torchmetrics.
    from torchmetrics import Metric

Gather = Callable[[Any], list[Any]]
MetricState = tuple[int, dict[str, Any]]
T = TypeVar("T")


def find_metrics(model: nn.Module) -> dict[str, Metric]:
    """Return the torchmetrics objects in a model, by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(base.__module__ == "torchmetrics.metric" and base.__name__ == "Metric" for base in type(module).__mro__)
    }


def sums_floats(metric: Metric) -> bool:
    """Return True if a metric adds floats, so that its value depends on their order."""
    from torchmetrics.utilities.data import dim_zero_max, dim_zero_min

    return any(
        isinstance(default, torch.Tensor) and default.is_floating_point()
        for name, default in metric._defaults.items()
        if metric._reductions[name] not in (dim_zero_max, dim_zero_min)
    )


def copy_metric_states(model: nn.Module) -> list[tuple[Metric, MetricState]]:
    """Copy the accumulated states of the torchmetrics objects in a model."""
    return [(metric, copy_metric_state(metric)) for metric in find_metrics(model).values()]


def restore_metrics(saved: list[tuple[Metric, MetricState]]) -> None:
    """Restore the states that `copy_metric_states` copied."""
    for metric, state in saved:
        load_metric_state(metric, state)


def copy_metric_state(metric: Metric) -> MetricState:
    """Copy the accumulated state of a torchmetrics object: its number of updates and its states by name."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return metric._update_count, {
        name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in states.items()
    }


def load_metric_state(metric: Metric, state: MetricState) -> None:
    """Restore a state that `copy_metric_state` returned, on the metric's device."""
    metric._update_count, states = state
    metric._computed = metric._forward_cache = None  # The cached values are from other samples.
    for name, value in states.items():
        setattr(metric, name, _move_value(value, metric.device))


def _move_value(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, list):
        return [_move_value(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- over processes


def compute_over_ranks(metrics: Sequence[Metric], gather: Gather) -> list[Any]:
    """Compute each metric over the updates of all ranks, and keep each metric's state of this rank.

    Args:
        metrics: The metrics, the same on every rank and in the same order, updated or not.
        gather: Function that returns every rank's value of plain data and tensors, in rank order. Collective.
    """
    ranks = gather([[_get_portable_state(part) for part in find_metrics(metric).values()] for metric in metrics])
    return [
        _compute_from_states(metric, list(zip(*parts, strict=True)))
        for metric, *parts in zip(metrics, *ranks, strict=True)
    ]


def _compute_from_states(metric: Metric, states: Sequence[Sequence[MetricState]]) -> Any:
    """Compute a metric from the states of all ranks. A wrapper or collection has several parts with states."""
    parts = list(find_metrics(metric).values())
    local_states = [(part, copy_metric_state(part)) for part in parts]
    try:
        for part, of_ranks in zip(parts, states, strict=True):
            load_metric_state(part, merge_states(part, of_ranks))
            part._to_sync = False
        return metric.compute()
    finally:
        restore_metrics(local_states)
        for part in parts:
            part._to_sync = part.sync_on_compute


def share_metrics(model: nn.Module, gather: Gather, is_alone: Callable[[], bool]) -> None:
    """Let the user's calls of `compute` work on the updates of all ranks.

    The synchronization of torchmetrics hangs or fails if a rank has no updates, or fewer than another.

    Args:
        model: The module whose metrics are changed in place.
        gather: Function that returns every rank's value of plain data and tensors, in rank order. Collective.
        is_alone: Function that returns True where not every rank may call `compute`, as within a step. Then `compute`
            uses only this rank's updates.
    """

    def sync(metric: Metric, *_: Any, **__: Any) -> None:
        if not is_alone():
            for name, value in merge_states(metric, gather(_get_portable_state(metric)))[1].items():
                setattr(metric, name, _move_value(value, metric.device))

    for metric in find_metrics(model).values():
        if metric.process_group is None and metric.dist_sync_fn is None:
            metric._sync_dist = MethodType(sync, metric)  # type: ignore[method-assign]  # a copy's is bound to the copy


def unshare_metrics(model: nn.Module) -> None:
    """Undo `share_metrics`."""
    for metric in find_metrics(model).values():
        vars(metric).pop("_sync_dist", None)


def _get_portable_state(metric: Metric) -> MetricState:
    count, states = copy_metric_state(metric)
    return count, {name: _move_value(value, "cpu") for name, value in states.items()}


def merge_states(metric: Metric, ranks: Sequence[MetricState]) -> MetricState:
    """Merge the states of all ranks by the metric's reductions."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    ranks = [state for state in ranks if state[0]] or ranks[:1]  # A rank without updates must not count in a mean.
    if len(ranks) == 1:
        return ranks[0]
    counts = [count for count, _ in ranks]
    merged: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        values = [states[name] for _, states in ranks]
        if isinstance(values[0], list):
            joined = interleave_ranks(values)  # in the order of a single process
            merged[name] = joined if reduction in (None, dim_zero_cat) else reduction(joined)  # type: ignore[operator]
        elif reduction is dim_zero_mean:
            total = sum(count * value.double() for count, value in zip(counts, values, strict=True))
            merged[name] = (total / sum(counts)).to(values[0].dtype)
        else:
            stacked = torch.stack(values)
            merged[name] = stacked if reduction is None else reduction(stacked)  # type: ignore[operator]
    return sum(counts), merged


def interleave_ranks(ranks: Iterable[Iterable[T]]) -> list[T]:
    """Interleave the ranks: the first value of each rank, the second of each, and so on, as in a single process."""
    return [value for place in zip_longest(*ranks) for value in place if value is not None]


@final
class SavedMetricStates:
    """Reset of the metrics that training has updated during an evaluation, and their restoration after it.

    A metric that training has not updated since the last evaluation keeps its state. So a metric that the user never
    resets accumulates over evaluations. A metric that only training updates keeps its state apart during the
    evaluation's batches.

    Args:
        model: The module with the metrics. Its attribute `metric_updates_seen` holds the number of updates of each
            metric at the end of the last evaluation.
    """

    def __init__(self, model: nn.Module) -> None:
        self._metrics = find_metrics(model)
        self._seen = get_seen_updates(model)
        self._families = _find_families(model)
        self._states = self._copy_states(self._metrics)  # states before the evaluation
        self._counts: dict[str, int] = {}
        self._is_reset: set[str] = set()  # families

    def reset_for_evaluation(self) -> None:
        """Reset the metrics that training has updated, before the batches of the evaluation."""
        self._is_reset = {family for family, names in self._families.items() if any(map(self._was_updated, names))}
        names = self._list_names(self._is_reset)
        self._states |= self._copy_states(names)  # Hooks may have changed the metrics.
        for name in names:
            _reset_states(self._metrics[name])
        self._counts = {name: metric._update_count for name, metric in self._metrics.items()}

    def restore_untouched(self, gather: Gather | None) -> None:
        """Restore the metrics that no batch of the evaluation has updated, after its batches.

        Collective if `gather` is not None.

        Args:
            gather: Function that returns every rank's value of plain data; None for one process or without metrics.
        """
        updated = {name for name, metric in self._metrics.items() if metric._update_count != self._counts[name]}
        local_report = self._is_reset, {family for family, names in self._families.items() if updated & set(names)}
        ranks = [local_report] if gather is None else gather(local_report)
        updated_anywhere = set().union(*(families for _, families in ranks))
        self._restore_families(self._is_reset - updated_anywhere)
        self._is_reset = updated_anywhere & set().union(*(families for families, _ in ranks))

    def restore_all(self, *, everything: bool) -> None:
        """Restore the states of the training at the end of the evaluation.

        Args:
            everything: True to restore all states, after an incomplete evaluation or the sanity check.
        """
        self._restore_families(self._families if everything else self._is_reset)
        for name in () if everything else self._list_names(self._families.keys() - self._is_reset):
            self._seen[name] = self._metrics[name]._update_count

    def _was_updated(self, name: str) -> bool:
        return self._metrics[name]._update_count not in (0, self._seen.get(name, 0))

    def _restore_families(self, families: Iterable[str]) -> None:
        for name in self._list_names(families):
            load_metric_state(self._metrics[name], self._states[name])

    def _list_names(self, families: Iterable[str]) -> list[str]:
        return [name for family in families for name in self._families[family]]

    def _copy_states(self, names: Iterable[str]) -> dict[str, MetricState]:
        with torch.inference_mode(False):  # Training must be able to change these tensors.
            return {name: copy_metric_state(self._metrics[name]) for name in names}


def get_seen_updates(model: nn.Module) -> dict[str, int]:
    """Return the number of updates of each metric of a model at the end of the last evaluation."""
    seen: dict[str, int] = vars(model).setdefault("metric_updates_seen", {})
    return seen


def _find_families(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of metrics that are updated together, by the name of their collection or wrapper."""
    metrics, families = find_metrics(model), dict[str, list[str]]()
    collections = [name for name, module in model.named_modules() if type(module).__name__ == "MetricCollection"]
    roots = sorted([*metrics, *collections], key=len)
    for name in metrics:
        root = next(root for root in roots if name == root or name.startswith(f"{root}."))
        families.setdefault(root, []).append(name)
    return families


def _reset_states(metric: Metric) -> None:
    """Set a metric's states to their defaults, and keep its other attributes, which `reset` might change."""
    defaults = {name: value if isinstance(value, list) else value.clone() for name, value in metric._defaults.items()}
    load_metric_state(metric, (0, defaults))
