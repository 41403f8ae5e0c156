"""Placement of parameters on the processes of a run, computed in one process by the strategy of the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lumen.distributed.dtensor import find_packed, get_local_tensor, is_sharded
from lumen.distributed.simulated import simulate_processes
from lumen.internals.fully_shard import is_sharding
from lumen.strategies import Strategy, count_training_parts
from lumen.task.materialize import update_references
from lumen.tools.check.report import CheckReport, shorten_rows
from lumen.tools.check.trial import CheckTrial

_MAX_ROWS, _WIDTH = 40, 76


class PlacedParameters(NamedTuple):
    """Placement of a parameter, or of equal parameters of several layers.

    Attributes:
        name: The name, with `*` for the numbers of layers.
        shape: Shape of the whole parameter, such as 48x16.
        dtype: Name of the dtype, without `torch.`.
        part: Shape of the part on the first process; no other process has a larger part.
        divided: Names and sizes of the mesh dimensions over which the parameter is divided, such as "tensor 2", and the
            divided dimensions of the parameter.
    """

    name: str
    shape: str
    dtype: str
    part: str
    divided: tuple[tuple[str, str], ...]


@contextmanager
def _connect(strategy: Strategy) -> Iterator[None]:
    with simulate_processes(strategy.processes):
        strategy.connect()
        yield


def count_data_ranks(strategy: Strategy) -> int:
    """Return the number of processes that read different batches.

    Raises:
        ConfigError: The number of processes does not match the options of the strategy.
    """
    if not strategy.shards:
        return count_training_parts(strategy)
    with _connect(strategy):
        return count_training_parts(strategy)


def check_placement(report: CheckReport, trial: CheckTrial, strategy: Strategy) -> None:
    """Report how a strategy that shards parameters places them. The task cannot be used afterwards.

    Args:
        report: Report that receives the finding.
        trial: The trial, after its run.
        strategy: The strategy of the real run, on the CPU, whose processes are not started.

    Raises:
        LumenError: An error that `fit` would raise too, such as for a wrong `parallel_plan`.
    """
    if not strategy.shards:
        return
    task, processes = trial.task, strategy.processes.world_size
    with _connect(strategy):
        strategy.setup(task)
        for optimizer in trial.trainer.optimizers:
            update_references(optimizer)
            strategy.check_optimizer(optimizer)
        found = _merge_layers(task)
        held = sum(get_local_tensor(each).numel() for each in task.parameters())
    report.facts["placement"] = [each._asdict() | {"divided": dict(each.divided)} for each in found]
    if processes > 1:
        total = sum(each.numel() for each in task.parameters())
        text = f"each of {processes} processes holds at most {held:,} of {total:,} parameters, cut as follows"
        report.add("model", "ok", "placement", text, rows=shorten_rows(_format_table(found), _MAX_ROWS))


def _merge_layers(task: nn.Module) -> list[PlacedParameters]:
    """Return the placement of all parameters, in the order of the model; equal parameters of layers are one entry."""
    layers = dict[PlacedParameters, list[str]]()
    for name, parameter in task.named_parameters():
        whole, part = ("x".join(map(str, each.shape)) for each in (parameter, get_local_tensor(parameter)))
        pattern, dtype = re.sub(r"\b\d+(?=\.)", "*", name), str(parameter.dtype).removeprefix("torch.")
        placed = PlacedParameters(pattern, whole, dtype, part, tuple(_list_divided(parameter)))
        layers.setdefault(placed, []).append(name)
    merged = [placed._replace(name=_merge_names(names)) for placed, names in layers.items()]
    counts = Counter(each.name for each in merged)
    return [
        each if counts[each.name] == 1 else each._replace(name=f"{each.name} ({len(names)})")
        for each, names in zip(merged, layers.values(), strict=True)
    ]


def _merge_names(names: Sequence[str]) -> str:
    """Return the common name of parameters, with `*` for the parts that differ."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(parts[0] if len({*parts}) == 1 else "*" for parts in columns)


def _list_divided(parameter: torch.Tensor) -> Iterator[tuple[str, str]]:
    """Yield the mesh dimensions over which a parameter is divided, in this order, and its divided dimensions."""
    if not is_sharded(parameter):
        return
    sharded: Any = parameter
    mesh, packed = sharded.device_mesh, find_packed(parameter)
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    for name, size, placement in reversed([*zip(names, mesh.shape, sharded.placements, strict=True)]):
        if size > 1 and is_sharding(placement):
            of_each = f" of each of {packed[1]}" if packed is not None and name == "tensor" else ""
            yield f"{name} {size}".strip(), f"dim {placement.dim}{of_each}"


def _format_table(found: Sequence[PlacedParameters]) -> list[list[str]]:
    """Return the lines of a table; a long name has a line of its own."""
    found_meshes = dict.fromkeys(name for each in found for name, _ in each.divided)
    meshes = sorted(found_meshes, key=lambda name: name.startswith("shard"))  # after the others, as `_list_divided`
    rows = [["parameter", "shape", *meshes, "part"]]
    rows += [
        [each.name, f"{each.dtype} {each.shape}", *(dict(each.divided).get(name, "") for name in meshes), each.part]
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    lines = []
    for row in rows:
        name, *cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        parts = [name] if len(name) == widths[0] else [name, " " * widths[0]]
        lines += [[line.rstrip()] for line in "  ".join(["\n".join(parts), *cells]).splitlines()]
    return lines
