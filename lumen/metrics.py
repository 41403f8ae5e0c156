"""What `self.log` leaves behind: values collected without waiting, means taken over exactly the samples seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final, get_args

import torch
from torch import nn

from lumen.errors import ConfigError

if TYPE_CHECKING:  # importing it takes longer than importing Lumen; who logs a metric has imported it
    from torchmetrics import Metric

Reduction = Literal["mean", "sum", "min", "max"]


class LogOptions(NamedTuple):
    """How one name is logged. The first call of a stage decides; a later call that differs is an error."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: Reduction
    suffix: str = ""  # of the name, where several loaders log the same one


_FOLD_AT = 64  # tensors kept before they are summed on their device; fixed, so that sums do not depend on saves


@final
class Accumulator:
    """A running reduction in float64 that never makes the host wait for a device.

    Numbers are folded in at once. Tensors on an accelerator are kept and folded in groups of 64: the grouping is part
    of the state, so a resumed sum has the bits of an undisturbed one.
    """

    __slots__ = ("pending", "reduction", "total", "weight")

    def __init__(self, reduction: Reduction = "mean") -> None:
        self.reduction = reduction
        self.total: float | torch.Tensor = {"min": math.inf, "max": -math.inf}.get(reduction, 0.0)
        self.weight = 0.0
        self.pending: list[tuple[torch.Tensor, float]] = []

    def add(self, value: float | torch.Tensor, weight: float) -> None:
        """Take in one value that stands for `weight` samples."""
        self.weight += weight
        if isinstance(value, torch.Tensor):
            self.pending.append((value, weight))
            if len(self.pending) == _FOLD_AT:
                self.total, self.pending = self._folded(), []
        else:
            self.total = self._fold(self.total, value, weight)

    def compute(self) -> float | torch.Tensor:
        """The reduced value; NaN for a mean of nothing. A tensor where the values lie on an accelerator."""
        total = self._folded()
        if self.reduction != "mean":
            return total
        return total / self.weight if self.weight else math.nan

    def _fold(self, total: Any, value: Any, weight: float) -> Any:
        if self.reduction == "mean":
            return total + value * weight
        if self.reduction == "sum":
            return total + value
        if isinstance(value, torch.Tensor):
            total = torch.as_tensor(total, dtype=value.dtype, device=value.device)
            return getattr(torch, f"{self.reduction}imum")(total, value)
        return (min if self.reduction == "min" else max)(total, value)

    def _folded(self) -> float | torch.Tensor:
        if not self.pending:
            return self.total
        values = torch.stack([value for value, _ in self.pending]).double()
        if self.reduction in ("min", "max"):
            return self._fold(self.total, getattr(values, self.reduction)(), 1.0)  # type: ignore[no-any-return]
        if self.reduction == "mean":
            values = values * torch.tensor([weight for _, weight in self.pending], dtype=torch.float64).to(
                values.device, non_blocking=True
            )
        return self.total + values.sum()

    def state_dict(self) -> dict[str, Any]:
        """Plain data; exact."""
        pending = [(float(value), weight) for value, weight in self.pending]
        return {"reduction": self.reduction, "total": float(self.total), "weight": self.weight, "pending": pending}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Accumulator:
        """The accumulator that gave this state."""
        accumulator = cls(state["reduction"])
        accumulator.total, accumulator.weight = state["total"], state["weight"]
        accumulator.pending = [
            (torch.tensor(value, dtype=torch.float64, device=device), weight) for value, weight in state["pending"]
        ]
        return accumulator


@final
class _Entry:
    """One logged name."""

    __slots__ = ("epoch", "latest", "metric", "options", "window")

    def __init__(self, options: LogOptions, metric: Metric | None) -> None:
        self.options = options
        self.metric = metric
        self.epoch = Accumulator(options.reduce_fx)
        self.latest: list[tuple[float | torch.Tensor, float]] = []
        self.window = -1


@final
class StageMetrics:
    """Everything logged during one epoch of training or one evaluation.

    Attributes:
        window: Number of the optimizer step (or evaluation batch) in progress; values logged in the same window are
            averaged into one step value.
        closed: The epoch's values are out: what is logged now would be lost.
    """

    def __init__(self) -> None:
        self.window = 0
        self.closed = False
        self._entries: dict[str, _Entry] = {}

    def log(self, name: str, value: float | torch.Tensor | Metric, weight: float, options: LogOptions) -> None:
        """Collect a value; on an accelerator nothing is copied and nobody waits."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = self._new_entry(name, value, options)
        elif entry.options != options:
            raise ConfigError(
                f"self.log({name!r}) was called with {options} after {entry.options}. "
                "Log one name always with the same options, or use two names."
            )
        if entry.metric is not None:
            if not options.on_step:
                return
            value = entry.metric._forward_cache  # type: ignore[assignment]  # of the metric's last call: this batch
            if not isinstance(value, torch.Tensor):
                raise ConfigError(
                    f"self.log({name!r}, ..., on_step=True): the {type(entry.metric).__name__} has no number for this "
                    "batch (update() keeps none). Call it as metric(preds, target); log parts of a dictionary apart."
                )
        number = _read(name, value)
        if options.on_step:
            if entry.window != self.window:
                entry.window = self.window
                entry.latest = []
            entry.latest.append((number, weight))
        if options.on_epoch and entry.metric is None:
            entry.epoch.add(number, weight)

    def _new_entry(self, name: str, value: Any, options: LogOptions) -> _Entry:
        if name in ("step", "epoch"):
            raise ConfigError(f"self.log({name!r}): every logged row has its {name} already. Use another name.")
        if options.reduce_fx not in get_args(Reduction):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={options.reduce_fx!r}): expected one of "
                f"{', '.join(get_args(Reduction))}. Log a torchmetrics.Metric for any other reduction."
            )
        metric = _as_metric(name, value)
        stem = name.removesuffix(options.suffix)
        for other, entry in self._entries.items():
            same_name = other.removesuffix(entry.options.suffix) == stem
            if metric is not None and metric is entry.metric and same_name:
                raise ConfigError(
                    f"self.log({name!r}): this {type(metric).__name__} is logged as {other!r} too. Fed by two loaders, "
                    "one metric gives the value of neither; make one metric for each loader."
                )
        return _Entry(options, metric)

    def step_values(self, keep: Callable[[LogOptions], bool] = lambda _: True) -> dict[str, float | torch.Tensor]:
        """The weighted mean of each name over the window in progress, `x_step` where `x_epoch` exists too."""
        values: dict[str, float | torch.Tensor] = {}
        for name, entry in self._entries.items():
            if entry.window == self.window and entry.options.on_step and keep(entry.options):
                window = Accumulator(entry.options.reduce_fx)
                for value, weight in entry.latest:
                    window.add(value, weight)
                both = entry.options.on_epoch
                values[_variant(name, "step", entry.options) if both else name] = (
                    entry.latest[0][0] if len(entry.latest) == 1 else window.compute()
                )
        return values

    def epoch_names(self, keep: Callable[[LogOptions], bool] = lambda _: True) -> list[str]:
        """The names that `epoch_values` gives, without computing a value."""
        return [
            _variant(name, "epoch", entry.options) if entry.options.on_step else name
            for name, entry in self._entries.items()
            if entry.options.on_epoch and keep(entry.options)
        ]

    def epoch_values(self, keep: Callable[[LogOptions], bool] = lambda _: True) -> dict[str, float]:
        """The value of each name over the epoch, `x_epoch` where `x_step` exists too. Waits for the device."""
        values: dict[str, float] = {}
        for name, entry in self._entries.items():
            if entry.options.on_epoch and keep(entry.options):
                if entry.metric is not None:
                    value = entry.metric.compute()
                    if not isinstance(value, torch.Tensor) or value.numel() != 1:
                        raise ConfigError(
                            f"self.log({name!r}, metric): {type(entry.metric).__name__}.compute() gives "
                            f"{type(value).__name__} instead of one number. Log its parts in on_..._epoch_end."
                        )
                else:
                    value = entry.epoch.compute()
                values[_variant(name, "epoch", entry.options) if entry.options.on_step else name] = float(value)
        return values

    def reset_metrics(self) -> None:
        """Reset the torchmetrics objects that were logged."""
        for entry in self._entries.values():
            if entry.metric is not None:
                entry.metric.reset()

    def state_dict(self, name_of: Callable[[Metric], str | None]) -> dict[str, Any]:
        """Plain data, for a checkpoint in the middle of an epoch.

        Args:
            name_of: Where a logged metric object lives in the task.
        """
        for name, entry in self._entries.items():
            if entry.metric is not None and name_of(entry.metric) is None:
                raise ConfigError(
                    f"self.log({name!r}): the {type(entry.metric).__name__} is no part of the task, so no checkpoint "
                    "can hold it. Make it an attribute of the task (a list of them an nn.ModuleList)."
                )
        return {
            name: {
                "options": dict(entry.options._asdict()),
                "metric": None if entry.metric is None else name_of(entry.metric),
                "epoch": entry.epoch.state_dict(),
            }
            for name, entry in self._entries.items()
        }

    def load_state_dict(
        self, state: Mapping[str, Any], metric_named: Callable[[str], Metric], device: torch.device
    ) -> None:
        """Take over what `state_dict` gave."""
        for name, saved in state.items():
            metric = None if saved["metric"] is None else metric_named(saved["metric"])
            entry = self._entries[name] = _Entry(LogOptions(**saved["options"]), metric)
            entry.epoch = Accumulator.from_state(saved["epoch"], device)


def _variant(name: str, of: str, options: LogOptions) -> str:
    """`x_step` or `x_epoch`; what tells loaders apart stays at the end."""
    return f"{name.removesuffix(options.suffix)}_{of}{options.suffix}"


def _as_metric(name: str, value: Any) -> Metric | None:
    if isinstance(value, (torch.Tensor, Real)):
        return None
    from torchmetrics import Metric

    if isinstance(value, Metric):
        return value
    raise _refusal(name, value)


def _refusal(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"self.log({name!r}): cannot log an object of type {type(value).__name__} here. "
        "Log a number, a tensor of one element or a torchmetrics.Metric, always the same of them under one name."
    )


def _read(name: str, value: Any) -> float | torch.Tensor:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Real):
            raise _refusal(name, value)
        return float(value)
    if value.numel() != 1:
        raise ConfigError(f"self.log({name!r}): expected one number, found a tensor of shape {tuple(value.shape)}.")
    if value.device.type in ("cpu", "mps"):  # MPS has no float64 to sum in
        return value.item()
    fresh = value.grad_fn is not None  # a buffer could be changed in place later; a computed value could not
    return value.detach().reshape(()) if fresh else value.detach().reshape(()).clone()


# ---------------------------------------------------------------------- the torchmetrics objects of a task

MetricState = tuple[int, dict[str, Any]]


def metrics_of(model: nn.Module) -> dict[str, Metric]:
    """The torchmetrics objects in a model, by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(base.__module__ == "torchmetrics.metric" and base.__name__ == "Metric" for base in type(module).__mro__)
    }


def metric_states(model: nn.Module) -> list[tuple[Metric, MetricState]]:
    """Copies of what the torchmetrics objects in a model have accumulated."""
    return [(metric, metric_state(metric)) for metric in metrics_of(model).values()]


def restore_metrics(saved: list[tuple[Metric, MetricState]]) -> None:
    """Put back what `metric_states` copied."""
    for metric, state in saved:
        load_metric_state(metric, state)


def metric_state(metric: Metric) -> MetricState:
    """A copy of what a torchmetrics object has accumulated: its number of updates and its states by name."""
    states = {name: getattr(metric, name) for name in metric._defaults}
    return metric._update_count, {
        name: value.clone() if isinstance(value, torch.Tensor) else list(value) for name, value in states.items()
    }


def load_metric_state(metric: Metric, state: MetricState) -> None:
    """Take over what `metric_state` gave, on the metric's device."""
    metric._update_count, states = state
    metric._computed = None
    for name, value in states.items():
        moved = [item.to(metric.device) for item in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)
