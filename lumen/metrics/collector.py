"""Collection of the values that `self.log` gets, without waiting for a device, and their means over samples.

Every process collects its values. To read a value, Lumen merges the values of all processes in rank order, so every
rank reads the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn

from lumen.errors import ConfigError
from lumen.metrics.log_call import (
    HookValue,
    LogCall,
    LogOptions,
    as_metric,
    as_number,
    check_name,
    make_conflict_error,
    resolve_options,
)
from lumen.metrics.step_values import (
    Accumulator,
    Latest,
    compute_means,
    get_common_value,
    group_by_name,
    merge_ranks,
    read_floats,
    read_number,
)
from lumen.metrics.torchmetrics_states import Gather, compute_over_ranks, find_metrics

if TYPE_CHECKING:  # The import takes longer than that of Lumen. A user who logs a metric has imported torchmetrics.
    from torchmetrics import Metric


#: State of a collector, as `StageMetrics.make_restore_point` returns it.
RestorePoint = tuple[dict[str, "_LoggedEntry"], dict[str, str], dict[tuple[int, str], str], bool]


@final
class _LoggedEntry:
    """All values logged under one name."""

    __slots__ = ("call", "computed", "epoch", "is_tensor", "latest", "loaders", "metric", "options", "window")

    def __init__(
        self, options: LogOptions, metric: Metric | None, *, is_tensor: bool = False, exact: bool = False
    ) -> None:
        self.options = options
        self.is_tensor = is_tensor  # True if the first value is a tensor
        self.call: LogCall | None = None  # arguments of the newest call, which most calls repeat
        self.loaders: tuple[str, ...] = ()  # suffixes of the evaluation loaders it was logged for; "" for none
        self.metric = metric
        self.computed: tuple[int, Any] | None = None  # update count and value of the metric when last computed
        self.epoch = Accumulator(options.reduce_fx, exact=exact)
        self.latest: list[tuple[float | torch.Tensor, float]] = []
        self.window = -1

    def copy(self) -> _LoggedEntry:
        """Return a copy that later values do not change."""
        entry = copy(self)
        entry.latest, entry.epoch = list(self.latest), copy(self.epoch)
        entry.epoch.pending = list(self.epoch.pending)
        return entry


class _RankReport(NamedTuple):
    """The values of one name on one rank, as sent to the other ranks."""

    options: LogOptions
    kind: str | None  # class of the torchmetrics object, if there is one
    place: str | None  # module name of the torchmetrics object in the task
    sums: tuple[float | Fraction, float | Fraction]
    loaders: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean of the numbers logged on the rank; NaN without numbers."""
        total, weight = self.sums
        return float(total / weight) if weight else math.nan


@final
class StageMetrics:
    """All values logged during one epoch of training or one evaluation.

    Args:
        before: The values of single steps of the epochs before, by name.
        exact: True to compute means that do not depend on the number of processes.

    Attributes:
        window: Number of the optimizer step (or evaluation batch) in progress. Values logged in the same window are
            averaged into one step value.
        closed: True once the values of the epoch are published, so that a value logged now would be lost.
        hook_values: Values that each process has logged outside of steps, by name; set by `compute_epoch_values` with a
            `gather`.
    """

    def __init__(self, before: Latest | None = None, *, exact: bool = False) -> None:
        self._before, self._is_exact = before or {}, exact
        self.window = 0
        self.closed = False
        self.hook_values: dict[str, HookValue] = {}
        self._entries: dict[str, _LoggedEntry] = {}
        self._owners: dict[str, str] = {}  # logged name by published name
        self._updated_metrics: dict[
            tuple[int, str], str
        ] = {}  # logged name by metric object and name without loader suffix
        self._call: LogCall | None = None  # arguments of the call parsed last
        self._options: LogOptions
        self._has_steps = False  # True if values of single steps are logged

    @classmethod
    def from_options(cls, options: Mapping[str, Mapping[str, Any]]) -> StageMetrics:
        """Make a collector without values from the names and options that `get_options` returned."""
        metrics = cls()
        for name, each in options.items():
            metrics._register_entry(name, _LoggedEntry(LogOptions(**each), None))
        return metrics

    def begin_window(self) -> None:
        """Begin the next optimizer step, or evaluation batch."""
        self.window += 1

    def close(self) -> None:
        """Note that the values are published."""
        self.closed = True

    def log(self, name: str, value: float | torch.Tensor | Metric, weight: float, call: LogCall) -> None:
        """Collect a value, without waiting for a CUDA device."""
        entry = self._entries.get(name)
        if entry is None or entry.call != call:
            entry = self._get_entry(name, value, call)
        options = entry.options
        if entry.metric is not None:
            if value is not entry.metric and as_metric(name, value) is not entry.metric:
                raise ConfigError(
                    f"self.log({name!r}): the name has the values of one {type(entry.metric).__name__}, and now of a "
                    "different object. Log one metric object under the name, or use two names."
                )
            if not options.on_step:
                return
            value = entry.metric._forward_cache  # type: ignore[assignment]  # the value of this batch
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"self.log({name!r}, ..., on_step=True): the {type(entry.metric).__name__} has no number for "
                    "this batch (update() keeps none). Call metric(preds, target) instead of update(), and log the "
                    "entries of a dictionary separately."
                )
        number = as_number(name, value)
        if options.on_step:
            self._has_steps = True
            if entry.window != self.window:
                entry.window = self.window
                entry.latest = []
            entry.latest.append((number, weight))
        if options.on_epoch and entry.metric is None:
            entry.epoch.add(number, weight)

    def _get_entry(self, name: str, value: Any, call: LogCall) -> _LoggedEntry:
        entry = self._entries.get(name)
        if call != self._call:
            self._options = resolve_options(name, call)
            self._call = call
        options = self._options
        if entry is None:
            check_name(name, options.suffix if call[6] else None)
            entry = self._make_entry(name, value, options)
        elif entry.options != options:
            raise make_conflict_error(name, options, entry.options)
        entry.call = call
        if (loader := call[-1]) not in entry.loaders:
            entry.loaders += (loader,)
        return entry

    def _make_entry(self, name: str, value: Any, options: LogOptions) -> _LoggedEntry:
        metric = as_metric(name, value)
        other = self._updated_metrics.get((id(metric), name.removesuffix(options.suffix)))
        if other is not None:
            raise ConfigError(
                f"self.log({name!r}): this {type(metric).__name__} is logged as {other!r} too. A metric that two "
                "loaders update gives the value of neither. Create one metric for each loader."
            )
        for published in options.list_published_names(name):
            if published in self._owners:
                raise ConfigError(
                    f"self.log({name!r}): {self._owners[published]!r} is logged as {published!r} already, since it "
                    "has values of steps and of epochs. Use a different name."
                )
        entry = _LoggedEntry(options, metric, is_tensor=isinstance(value, torch.Tensor), exact=self._is_exact)
        return self._register_entry(name, entry)

    def _register_entry(self, name: str, entry: _LoggedEntry) -> _LoggedEntry:
        """Register a name, and the names under which its values can be read."""
        self._entries[name] = entry
        for published in entry.options.list_published_names(name):
            self._owners[published] = name
        if entry.metric is not None:
            self._updated_metrics[id(entry.metric), name.removesuffix(entry.options.suffix)] = name
        return entry

    def compute_step_values(
        self,
        keep: Callable[[LogOptions], bool] = lambda _: True,
        gather: Gather | None = None,
        *,
        has_earlier: bool = False,
    ) -> dict[str, float | torch.Tensor]:
        """Return the weighted mean of each name over the window in progress, as `x_step` if `x_epoch` exists too.

        Args:
            keep: Function of a name's log options that returns True if the result should have the name.
            has_earlier: True to return values of an earlier window for names without a value in this window.
            gather: Function that returns every rank's plain data, in rank order, for a mean over all ranks.
                Collective. None for a mean over this process.

        Raises:
            ConfigError: Two ranks log a name with different options.
        """
        if not (self._has_steps or has_earlier) and gather is None:
            return {}
        latest = self.get_latest(has_earlier=has_earlier)
        if gather is not None:
            latest = merge_ranks(gather(read_floats(latest)))
        return compute_means(latest, keep)

    def get_latest(self, *, has_earlier: bool = False) -> Latest:
        """Return the values of single steps that this process has logged, by default in the window in progress."""
        latest = {
            name: (entry.options, entry.latest)
            for name, entry in self._entries.items()
            if entry.latest and (entry.window == self.window or has_earlier)
        }
        return self._before | latest if has_earlier else latest

    @property
    def has_values(self) -> bool:
        """True if this process has logged any value."""
        return bool(self._entries)

    def list_epoch_names(self, keep: Callable[[LogOptions], bool] = lambda _: True) -> list[str]:
        """Return the names of `compute_epoch_values`, without computing a value."""
        return [
            entry.options.get_variant_name(name, "epoch") if entry.options.on_step else name
            for name, entry in self._entries.items()
            if entry.options.on_epoch and keep(entry.options)
        ]

    def map_loader_suffixes(self) -> dict[str, tuple[str, ...]]:
        """Return the loader suffixes for which each name of `compute_epoch_values` was logged; "" for no loader."""
        entries = [entry for entry in self._entries.values() if entry.options.on_epoch]
        return {name: entry.loaders for name, entry in zip(self.list_epoch_names(), entries, strict=True)}

    def map_step_names(self) -> dict[str, str]:
        """Return the epoch name for each name with values of single steps: `x_epoch` for `x` and `x_step`."""
        return {
            each: entry.options.get_variant_name(name, "epoch")
            for name, entry in self._entries.items()
            for each in ((name, entry.options.get_variant_name(name, "step")) if entry.options.on_step else ())
        }

    def map_published_names(self, keep: Callable[[LogOptions], bool] = lambda _: True) -> dict[str, tuple[str, ...]]:
        """Return the published names of each logged name, the name of step values first."""
        return {
            name: entry.options.list_published_names(name)
            for name, entry in self._entries.items()
            if keep(entry.options)
        }

    def compute_epoch_values(self, model: nn.Module, gather: Gather | None = None) -> dict[str, float]:
        """Return the value of each name over the epoch, as `x_epoch` if `x_step` exists too. Waits for the device.

        The collected values do not change, so the epoch can continue. Names that only other ranks have logged are
        registered on this rank too.

        Args:
            model: The module that contains the torchmetrics objects.
            gather: Function that returns every rank's plain data and tensors, in rank order, for values over all ranks.
                Collective. None for a single process.

        Raises:
            ConfigError: A metric does not compute one number, or ranks log one name in different ways.
        """
        sums, counts = ({}, {}) if gather is None else self._merge_ranks(model, gather)
        entries = {name: entry for name, entry in self._entries.items() if entry.options.on_epoch}
        stale: dict[str, tuple[Metric, int]] = {}
        for name, entry in entries.items():
            if (metric := entry.metric) is not None:
                count = metric._update_count if gather is None else counts[id(metric)]
                # A metric that a hook has reset since the last call keeps its value, as in Lightning.
                if entry.computed is None or count not in (0, entry.computed[0]):
                    stale[name] = metric, count
        metrics = [metric for metric, _ in stale.values()]
        found = (
            [each.compute() for each in metrics] if gather is None or not stale else compute_over_ranks(metrics, gather)
        )
        for (name, (metric, count)), value in zip(stale.items(), found, strict=True):
            if not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise ConfigError(
                    f"self.log({name!r}, metric): {type(metric).__name__}.compute() gives {type(value).__name__} "
                    "instead of one number. Log the parts of the result in on_..._epoch_end."
                )
            entries[name].computed = count, value
        values = [
            each.computed[1] if each.computed else sums.get(name, each.epoch).compute()
            for name, each in entries.items()
        ]
        return dict(zip(self.list_epoch_names(), map(float, values), strict=True))

    def _merge_ranks(self, model: nn.Module, gather: Gather) -> tuple[dict[str, Accumulator], dict[int, int]]:
        """Register the names of all ranks on this rank.

        Returns:
            The sums over all ranks by name, and the number of updates of each metric object of the model by its id.
        """
        modules = find_metrics(model)
        counts = [module._update_count for module in modules.values()]
        places = {id(module): place for place, module in modules.items()}
        answers = gather(({name: _make_report(entry, places) for name, entry in self._entries.items()}, counts))
        reports = group_by_name([report for report, _ in answers])
        for name, ranks in reports.items():
            _, kind, place = get_common_value(name, [report[:3] for report in ranks])
            if kind is not None and place is None:
                raise ConfigError(
                    f"self.log({name!r}): the {kind} is not a part of the task, so the processes cannot match their "
                    "objects. Make the metric an attribute of the task (several in an nn.ModuleList)."
                )
            if name not in self._entries:
                metric = None if place is None else modules[place]
                self._register_entry(name, _LoggedEntry(ranks[0].options, metric, exact=self._is_exact))
            self._entries[name].loaders = tuple(dict.fromkeys(chain.from_iterable(each.loaders for each in ranks)))
        self._entries = {name: self._entries[name] for name in reports}  # the same order on all ranks
        self.hook_values = {
            name: HookValue(entry.options.hook, [report.mean for report in reports[name]], entry.is_tensor)
            for name, entry in self._entries.items()
            if entry.options.hook
        }
        sums = {
            name: Accumulator.from_ranks(entry.options.reduce_fx, [report.sums for report in reports[name]])
            for name, entry in self._entries.items()
        }
        return sums, {
            id(module): sum(each) for module, *each in zip(modules.values(), *(of for _, of in answers), strict=True)
        }

    def reset_metrics(self) -> None:
        """Reset the torchmetrics objects that were logged."""
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()

    def make_restore_point(self) -> RestorePoint:
        """Return a copy of the collected values for `restore`, without the states of metric objects."""
        entries = {name: entry.copy() for name, entry in self._entries.items()}
        return entries, dict(self._owners), dict(self._updated_metrics), self._has_steps

    def restore(self, mark: RestorePoint) -> None:
        """Restore the collected values that `make_restore_point` returned. Each mark can be restored once."""
        self._entries, self._owners, self._updated_metrics, self._has_steps = mark

    def get_options(self) -> dict[str, dict[str, Any]]:
        """Return as plain data the options of names with step values and of names that loggers do not get."""
        found = {name: entry.options for name, entry in self._entries.items()}
        return {name: each._asdict() for name, each in found.items() if each.on_step or not each.logger}

    def state_dict(self, name_of: Callable[[Metric], str | None]) -> dict[str, Any]:
        """Return the collected values as plain data, for a checkpoint during an epoch or at its end.

        Args:
            name_of: Function that returns the module name of a metric object in the task; None if the task does not
                contain the metric object.

        Raises:
            ConfigError: A logged metric object is not a part of the task.
        """
        for name, entry in self._entries.items():
            if entry.metric is not None and name_of(entry.metric) is None:
                raise ConfigError(
                    f"self.log({name!r}): the {type(entry.metric).__name__} is not a part of the task, so "
                    "checkpoints cannot contain the metric. Make the metric an attribute of the task (several in an "
                    "nn.ModuleList)."
                )
        newest = read_floats(self.get_latest(has_earlier=True))
        before = {name: each for name, each in newest.items() if name not in self._entries}
        return {
            name: {"options": dict(options._asdict()), "metric": None, "latest": latest, "is_before": True}
            for name, (options, latest) in before.items()
        } | {
            name: {
                "options": dict(entry.options._asdict()),
                "metric": None if entry.metric is None else name_of(entry.metric),
                "epoch": entry.epoch.state_dict(),
                "latest": newest.get(name, (None, []))[1],
            }
            | ({"is_earlier": True} if entry.latest and entry.window != self.window else {})
            for name, entry in self._entries.items()
        }

    def load_state_dict(
        self, state: Mapping[str, Any], metric_named: Callable[[str], Metric], device: torch.device
    ) -> None:
        """Restore a state that `state_dict` returned."""
        for name, saved in state.items():
            if "is_before" in saved:
                self._before[name] = LogOptions(**saved["options"]), _read_latest(saved["latest"])
                continue
            metric = None if saved["metric"] is None else metric_named(saved["metric"])
            entry = self._register_entry(name, _LoggedEntry(LogOptions(**saved["options"]), metric))
            entry.epoch = Accumulator.from_state(saved["epoch"], device)
            if latest := saved.get("latest"):
                entry.latest = _read_latest(latest)
                entry.window, self._has_steps = -1 if "is_earlier" in saved else self.window, True


def _make_report(entry: _LoggedEntry, places: Mapping[int, str]) -> _RankReport:
    kind = None if entry.metric is None else type(entry.metric).__name__
    return _RankReport(entry.options, kind, places.get(id(entry.metric)), entry.epoch.get_sums(), entry.loaders)


def _read_latest(saved: Sequence[Sequence[Any]]) -> list[tuple[float | torch.Tensor, float]]:
    return [(read_number(value), read_number(weight)) for value, weight in saved]
