"""State of an unfinished epoch that differs between processes: the values that each of them has logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lumen.checkpoint.codec import JSON, Tensors, decode, encode
from lumen.checkpoint.reader import Checkpoint
from lumen.metrics.accumulator import Accumulator
from lumen.metrics.stages import updates_seen
from lumen.metrics.torchmetrics_states import load_metric_state, merged_state, metric_state, metrics_of
from lumen.run.run import Run


def own_values(run: Run) -> tuple[JSON, Tensors]:
    """This process's logged values as JSON, and their tensors, copied to the host.

    Raises:
        CheckpointError: A value is neither plain data nor a tensor.
        ConfigError: A logged metric is no part of the task.
    """
    metrics = metrics_of(run.task)
    names = {id(metric): name for name, metric in metrics.items()}
    values = {
        "logged": run.log.train.state_dict(lambda metric: names.get(id(metric))),
        "torchmetrics": {name: metric_state(metric) for name, metric in metrics.items()},
        "seen": updates_seen(run.task),
    }
    tensors: Tensors = {}
    encoded = encode(values, tensors, f"ranks[{run.processes.rank}]")
    return encoded, {name: tensor.cpu() for name, tensor in tensors.items()}


def load_values(run: Run, checkpoint: Checkpoint) -> None:
    """Restore logged values: each data rank its own, or data rank 0 all of them if their number has changed."""
    rank, world = run.strategy.data_rank, run.strategy.data_world_size
    ranks, extra = checkpoint.state["ranks"], checkpoint.tensors("extra")
    metrics = metrics_of(run.task)
    if len(ranks) == world:
        values = decode(ranks[rank], extra)
    elif rank == 0:
        values = _merged([decode(each, extra) for each in ranks], metrics)
    else:
        values = {"logged": {}, "torchmetrics": {}, "seen": {}}
    for name, metric in metrics.items():
        metric.reset()
        if name in values["torchmetrics"]:
            load_metric_state(metric, values["torchmetrics"][name])
    seen = updates_seen(run.task)
    seen.clear()
    seen.update(values["seen"])
    run.log.train.load_state_dict(values["logged"], metrics.__getitem__, run.strategy.device)


def _merged(ranks: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all ranks, merged into those that one process would have."""
    logged: dict[str, list[Any]] = {}
    for values in ranks:
        for name, entry in values["logged"].items():
            logged.setdefault(name, []).append(entry)
    return {
        "logged": {name: entries[0] | {"epoch": _sum(entries)} for name, entries in logged.items()},
        "torchmetrics": {
            name: merged_state(metrics[name], [values["torchmetrics"][name] for values in ranks])
            for name in ranks[0]["torchmetrics"]
            if name in metrics
        },
        "seen": sum((Counter(values["seen"]) for values in ranks), Counter()),
    }


def _sum(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    epochs = [Accumulator.from_state(entry["epoch"], torch.device("cpu")) for entry in entries]
    return Accumulator.of_ranks(epochs[0].reduction, [epoch.sums() for epoch in epochs]).state_dict()
