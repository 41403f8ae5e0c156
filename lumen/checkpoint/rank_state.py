"""State of an unfinished epoch that differs between processes: logged values and metric states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lumen.checkpoint.format.codec import JSON, Tensors, decode, encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.errors import CheckpointMismatch
from lumen.metrics.step_values import Accumulator
from lumen.metrics.torchmetrics_states import (
    copy_metric_state,
    find_metrics,
    get_seen_updates,
    load_metric_state,
    merge_states,
)
from lumen.run.run import Run


def collect_logged_values(run: Run) -> tuple[JSON, Tensors]:
    """Return this process's logged values as JSON, and their tensors, copied to the host.

    Raises:
        CheckpointError: A value is neither plain data nor a tensor.
        ConfigError: A logged metric is not a module of the task.
    """
    metrics = find_metrics(run.task)
    names = {id(metric): name for name, metric in metrics.items()}
    values = {
        "logged": run.log.train.state_dict(lambda metric: names.get(id(metric))),
        "torchmetrics": {name: copy_metric_state(metric) for name, metric in metrics.items()},
        "seen": get_seen_updates(run.task),
        # Some metrics, such as MinMaxMetric, keep tensors in plain attributes.
        "attributes": {name: _get_tensor_attributes(metric) for name, metric in metrics.items()},
        "trackers": {name: len(tracker) for name, tracker in _find_trackers(run.task).items()},
    }
    encoded = encode(values, tensors := Tensors(), f"ranks[{run.processes.rank}]")
    return encoded, {name: tensor.cpu() for name, tensor in tensors.items()}


def load_logged_values(run: Run, checkpoint: Checkpoint) -> None:
    """Restore logged values: each data rank its own, or data rank 0 all values if the number of data ranks changed."""
    rank, world = run.strategy.data_rank, run.strategy.data_world_size
    ranks, extra = checkpoint.state["ranks"], checkpoint.as_mapping("extra")
    for name, tracker in _find_trackers(run.task).items():
        saved = ranks[0].get("trackers", {}).get(name, 0)
        while len(tracker) < min(saved, len(ranks[0]["torchmetrics"])):  # one entry per metric
            tracker.increment()
    metrics = find_metrics(run.task)
    if len(ranks) == world:
        values = decode(ranks[rank], extra)
    elif rank == 0:
        values = _merge_ranks([decode(each, extra) for each in ranks], metrics, checkpoint.path)
    else:
        values = {"logged": {}, "torchmetrics": {}, "seen": {}}
    for name, metric in metrics.items():
        metric.reset()
        if name in values["torchmetrics"]:
            load_metric_state(metric, values["torchmetrics"][name])
        for key, value in decode(ranks[0].get("attributes", {}), extra).get(name, {}).items():
            if key in _get_tensor_attributes(metric):
                setattr(metric, key, value.to(metric.device))
    seen = get_seen_updates(run.task)
    seen.clear()
    seen.update(values["seen"])
    run.log.train.load_state_dict(values["logged"], metrics.__getitem__, run.strategy.device)


def _get_tensor_attributes(metric: Any) -> dict[str, torch.Tensor]:
    """Return tensors that a metric keeps as plain attributes."""
    tensors = {name: value for name, value in vars(metric).items() if isinstance(value, torch.Tensor)}
    return {n: each for n, each in tensors.items() if not n.startswith("_") and n not in metric._defaults}


def _find_trackers(task: nn.Module) -> dict[str, Any]:
    """Return the `torchmetrics.MetricTracker` objects, which add a metric with each `increment()`."""
    return {name: module for name, module in task.named_modules() if type(module).__name__ == "MetricTracker"}


def _merge_ranks(ranks: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], path: PurePath) -> dict[str, Any]:
    """Merge the values of all ranks into the values of a single process.

    Raises:
        CheckpointMismatch: Several ranks have metric states that only `compute` can merge.
    """
    for name, metric in metrics.items():
        updated = [states for values in ranks for count, states in [values["torchmetrics"].get(name, (0, {}))] if count]
        unmergeable = [key for key, reduction in metric._reductions.items() if reduction is None]
        if len(updated) > 1 and any(isinstance(updated[0][key], torch.Tensor) for key in unmergeable):
            raise CheckpointMismatch(
                f"{path}: the {type(metric).__name__} {name} was in the middle of an epoch on {len(ranks)} processes, "
                f"and its states cannot be merged (dist_reduce_fx=None). Resume on {len(ranks)} processes, or from a "
                "checkpoint at the end of an epoch."
            )
    logged: dict[str, list[Any]] = {}
    for values in ranks:
        for name, entry in values["logged"].items():
            logged.setdefault(name, []).append(entry)
    return {
        "logged": {name: _merge_entries(entries) for name, entries in logged.items()},
        "torchmetrics": {
            name: merge_states(metrics[name], [values["torchmetrics"][name] for values in ranks])
            for name in ranks[0]["torchmetrics"]
            if name in metrics
        },
        "seen": sum((Counter(values["seen"]) for values in ranks), Counter()),
    }


def _merge_entries(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge what ranks know of one logged name; a rank without values in this epoch has those of earlier epochs."""
    of_epoch = [entry for entry in entries if "epoch" in entry]
    if not of_epoch:
        return entries[0]
    epochs = [Accumulator.from_state(entry["epoch"], torch.device("cpu")) for entry in of_epoch]
    total = Accumulator.from_ranks(epochs[0].reduction, [epoch.get_sums() for epoch in epochs])
    return of_epoch[0] | {"epoch": total.state_dict()}
