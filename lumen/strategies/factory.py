"""Factory that chooses strategy, device and processes from the trainer's arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from lumen.distributed.cluster_environment import count_tasks_without_srun
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError
from lumen.errors.arguments import suggest_names
from lumen.strategies.single import SingleDevice
from lumen.strategies.strategy import Strategy

_MAX_CPU_PROCESSES = 64  # more processes than cores are slow; many more stop the machine
_FINDS_UNUSED = "ddp_find_unused_parameters_true"  # the name in Lightning
_CLASSES = {"auto": "DDP", "ddp": "DDP", "fsdp": "FSDP", "mesh": "Mesh", _FINDS_UNUSED: "DDP"}
_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cuda": lambda: torch.cuda.is_available(),
    "mps": lambda: torch.backends.mps.is_available(),
    "cpu": lambda: True,
}
_UNSUPPORTED = ("tpu", "hpu", "ipu")  # get no suggestion of a similar name
STRATEGIES = ("single", *_CLASSES)
#: Names of the strategies that have options, with the name of the class.
CLASSES_BY_NAME = {name: f"lumen.{_CLASSES[name]}" for name in ("ddp", "fsdp", "mesh")}
ACCELERATORS = ("auto", "gpu", *_AVAILABLE)


def make_strategy(
    strategy: str | Strategy, accelerator: str = "auto", devices: int | str | None = None, num_nodes: int | None = None
) -> Strategy:
    """Return the strategy with a name, or the user's strategy, with its processes and device set.

    Args:
        strategy: `auto` (DDP if there are several processes), `single`, `ddp`, `fsdp`, `mesh`, or an object.
        accelerator: `auto` (CUDA, else MPS, else CPU), `cpu`, `cuda` (`gpu`), `mps`.
        devices: The number of devices on this node, with one process each; `auto` or -1 uses all accelerators. None:
            the number of processes that torchrun or SLURM started, else 1.
        num_nodes: The number of nodes. None: the number of nodes on which torchrun or SLURM started processes, else 1.

    Raises:
        ConfigError: The device or strategy is not available, or the running processes differ from the requested
            processes.
    """
    processes = choose_processes(devices, num_nodes, accelerator, strategy)
    if isinstance(strategy, str):
        if strategy == "single" or (strategy == "auto" and processes.world_size == 1):
            single = SingleDevice(choose_device(accelerator))
            single.processes = processes
            return single
        options = {"find_unused_parameters": True} if strategy == _FINDS_UNUSED else {}
        strategy = _import_strategy(_CLASSES[strategy], **options)
    elif not strategy.spans_processes:
        return strategy
    strategy.processes = processes
    strategy.device = choose_device(accelerator, processes)
    return strategy


def choose_processes(
    devices: int | str | None, num_nodes: int | None, accelerator: str = "auto", strategy: str | Strategy = "auto"
) -> Processes:
    """Return the processes of a run: the running processes, or the processes to start on this node.

    Raises:
        ConfigError: The running processes differ from the requested processes, or the strategy runs only one process.
    """
    if isinstance(strategy, str) and strategy not in STRATEGIES:
        raise ConfigError(f"strategy: {_describe_unknown(strategy)}")
    processes = _find_or_plan_processes(devices, num_nodes, accelerator)
    custom = None if isinstance(strategy, str) else strategy
    runs_one = (
        strategy == "single" if custom is None else not custom.spans_processes and custom.processes.world_size == 1
    )
    if runs_one and processes.world_size > 1:
        kind, found = "SingleDevice" if custom is None else type(custom).__name__, processes.started_by
        cause = "devices requests" if found is None else f"{found} started"
        raise ConfigError(
            f"strategy: {kind} runs one process, but {cause} {processes.world_size} processes. Use strategy: ddp or "
            "fsdp, or one process."
        )
    return processes


def _find_or_plan_processes(devices: int | str | None, num_nodes: int | None, accelerator: str) -> Processes:
    count = _count_devices(devices, accelerator)
    if num_nodes is not None and num_nodes < 1:
        raise ConfigError(f"num_nodes: must be at least 1, found {num_nodes}.")
    found = Processes.find()
    if found.started_by is None and (num_nodes or 1) > 1:
        raise ConfigError(
            f"num_nodes: {num_nodes} nodes were requested, but no launcher started a process on each node. Use srun, "
            f"or run on every node: torchrun --nnodes {num_nodes} --nproc-per-node {count or 1} --rdzv-backend c10d "
            "--rdzv-endpoint FIRST_NODE:29400 -m lumen fit ... (or your script)."
        )
    if found.started_by is None:
        return Processes(world_size=count or 1, local_world_size=count or 1)
    for option, requested, running in (
        ("devices", count, found.local_world_size),
        ("num_nodes", num_nodes, found.nodes),
    ):
        if requested is not None and requested != running:
            noun = "processes of this run on this node" if option == "devices" else "nodes with processes of this run"
            raise ConfigError(
                f"{option}: {requested} requested, but {found.started_by} started {running} {noun}. Remove {option} to "
                f"use {running}, or start {requested}."
            )
    return found


def choose_device(accelerator: str, processes: Processes | None = None) -> torch.device:
    """Return the best device of a kind; of several CUDA devices, the one with this process's local rank.

    Raises:
        ConfigError: The machine has no such device.
    """
    available = {name: is_available() for name, is_available in _AVAILABLE.items()}
    name = "cuda" if accelerator == "gpu" else accelerator
    if name == "auto":
        name = next(kind for kind, found in available.items() if found)
    if not available.get(name, False):
        found = ", ".join(kind for kind, found_one in available.items() if found_one)
        similar = "" if accelerator in _UNSUPPORTED or name in available else suggest_names(accelerator, ACCELERATORS)
        raise ConfigError(
            f"accelerator: {accelerator!r} is not available on this machine; available: auto, {found}.{similar}"
        )
    if processes is None or name != "cuda":
        return torch.device(name)
    visible = torch.cuda.device_count()  # 1 if SLURM shows each process only its own device
    if processes.local_rank >= visible > 1:
        raise ConfigError(
            f"accelerator: process {processes.local_rank} of {processes.local_world_size} on this node has no device: "
            f"only {visible} devices are visible. Start as many processes as devices, or make one device visible to "
            "each process."
        )
    return torch.device(name, processes.local_rank if visible > 1 else 0)


def describe_unused_devices(strategy: Strategy) -> str | None:
    """Return a notice for a user who runs one process although more devices are visible, or None."""
    visible = torch.cuda.device_count() if strategy.device.type == "cuda" else 1
    if strategy.processes.world_size == 1 and strategy.processes.started_by is None and visible > 1:
        return f"using 1 of {visible} visible devices; set devices: auto to use all"
    if strategy.processes.started_by is None and (tasks := count_tasks_without_srun()):
        return f"SLURM has {tasks} tasks for this job, but this process runs alone; put srun before the command"
    return None


def _count_devices(devices: int | str | None, accelerator: str) -> int | None:
    visible = torch.cuda.device_count() if choose_device(accelerator).type == "cuda" else None
    if devices in ("auto", -1, "-1"):
        return visible or 1
    text = str(devices)
    if isinstance(devices, (list, tuple)) or "," in text:
        raise ConfigError(
            f"devices: expected a number of devices, found {devices!r}. Choose devices with CUDA_VISIBLE_DEVICES, and "
            "set devices to their number."
        )
    if devices is not None and (not text.isdigit() or int(text) == 0 or isinstance(devices, bool)):
        raise ConfigError(f"devices: expected a number of devices or auto, found {devices!r}.")
    if devices is not None and visible is not None and int(text) > visible:
        raise ConfigError(f"devices: {devices} requested, but only {visible} are visible.")
    cores = os.cpu_count() or 1
    if devices is not None and visible is None and int(text) > (max_processes := max(_MAX_CPU_PROCESSES, 4 * cores)):
        raise ConfigError(
            f"devices: {devices} requested on the CPU, where each device is a process. {cores} cores allow at most "
            f"{max_processes} processes."
        )
    return None if devices is None else int(text)


def _import_strategy(name: str, **options: Any) -> Strategy:
    """Import a strategy's module, which takes time, and build the strategy."""
    strategy: Strategy = getattr(import_module(f"lumen.strategies.{name.lower()}"), name)(**options)
    return strategy


def _describe_unknown(name: str) -> str:
    if name == "dp":
        return "dp (torch's DataParallel, one process for several devices) is not supported. Use ddp."
    hint = "use auto, single, ddp, fsdp or mesh, or pass a Strategy object"
    if name in ("ddp_spawn", "ddp_fork", "ddp_notebook"):
        hint = "use ddp, which runs the program from its beginning in each process"
    if name.startswith("deepspeed"):
        hint = "use fsdp, which also shards parameters, gradients and optimizer state"
    similar = suggest_names(name, STRATEGIES)
    return f"{name!r} is unknown; {hint}.{similar}"
