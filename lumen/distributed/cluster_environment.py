"""Rank of this process and sizes of the run, from the environment variables of torchrun or SLURM."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import final

from lumen.distributed.worker import is_worker
from lumen.errors import ConfigError
from lumen.internals.proc import read_stat

_SPECIAL_STEPS = 2**32 - 16  # SLURM gives batch scripts and interactive shells the highest step numbers
_PORTS = range(15_000, 30_000)  # below the ephemeral ports of systems
LOOPBACK = "127.0.0.1"


@final
@dataclass(frozen=True)
class ClusterProcess:
    """Rank of this process and sizes of the run, as found in the environment.

    Attributes:
        rank: Rank of this process in the run, from 0.
        world_size: Number of processes in the run.
        local_rank: Rank of this process on its node, from 0.
        local_world_size: Number of processes on this node.
        node: Rank of this node, from 0.
        nodes: Number of nodes in the run.
        started_by: The program that started the processes: `torchrun` or `SLURM`; None: this process runs alone.
        address: URL for `torch.distributed` at which the processes meet.
        launcher: Identifier of the program that started this process and may restart it after a failure; None: no
            restart.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    started_by: str | None = None
    address: str = "env://"
    launcher: str | None = None


def find_cluster_process(environment: Mapping[str, str] = os.environ) -> ClusterProcess:
    """Return the rank and sizes from environment variables.

    Raises:
        ConfigError: A variable is missing or is not a number, or a rank is not below its size.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _check_found(_read_torchrun(environment))
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < _SPECIAL_STEPS and _count_slurm_tasks(environment) > 1:
        return _check_found(_read_slurm(environment))
    return ClusterProcess()


def is_loopback(host: str) -> bool:
    """Return True if a name or an address is a loopback address, which other hosts cannot reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def get_loopback_variables() -> dict[str, str]:
    """Return the variables that keep the listeners of gloo and NCCL on this host; variables that are set are kept."""
    interface = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {} if interface is None else {name: os.environ.get(name, interface) for name in variables}


def count_tasks_without_srun(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of tasks of a SLURM batch job whose several tasks were not started with srun; otherwise 0."""
    tasks = environment.get("SLURM_NTASKS", "")
    in_shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    step = environment.get("SLURM_STEP_ID", "")
    in_step = step.isdigit() and int(step) < _SPECIAL_STEPS
    return int(tasks) if tasks.isdigit() and int(tasks) > 1 and not (in_shell or in_step) else 0


def _read_torchrun(environment: Mapping[str, str]) -> ClusterProcess:
    rank, world = _read_int(environment, "RANK"), _read_int(environment, "WORLD_SIZE")
    local_world = _read_int(environment, "LOCAL_WORLD_SIZE", default=world)
    local = _read_int(environment, "LOCAL_RANK", default=rank % max(local_world, 1))
    node = _read_int(environment, "GROUP_RANK", default=rank // max(local_world, 1))
    nodes = _read_int(environment, "GROUP_WORLD_SIZE", default=-(-world // max(local_world, 1)))
    started_by = "the first Trainer or command of this program" if is_worker() else "torchrun"
    launcher = _get_parent_id() if "TORCHELASTIC_RUN_ID" in environment else None
    return ClusterProcess(rank, world, local, local_world, node, nodes, started_by, launcher=launcher)


def _get_parent_id() -> str:
    """Return host, pid and start time of the parent process, because process ids are reused."""
    number = os.getppid()
    return f"{socket.gethostname()} {number} {' '.join(read_stat(number)[19:20])}"


def _count_slurm_tasks(environment: Mapping[str, str]) -> int:
    return _read_int(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)


def _read_slurm(environment: Mapping[str, str]) -> ClusterProcess:
    world, node = _count_slurm_tasks(environment), _read_int(environment, "SLURM_NODEID", default=0)
    nodes = _read_int(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    per_node = _get_first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or str(world // nodes)
    counts = [
        int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node) for _ in range(int(times or 1))
    ]  # 2(x3),1
    local_world = counts[node] if node < len(counts) else world // nodes
    number = _read_int(environment, "SLURM_JOB_ID", default=0) * 31 + _read_int(environment, "SLURM_STEP_ID")
    node_list = _get_first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST") or LOOPBACK
    host = LOOPBACK if nodes == 1 else environment.get("MASTER_ADDR") or _get_first_host(node_list)
    port = environment.get("MASTER_PORT") or _PORTS[number % len(_PORTS)]
    job = " ".join(environment.get(f"SLURM_{name}", "") for name in ("CLUSTER_NAME", "JOB_ID", "STEP_ID"))
    rank, local = _read_int(environment, "SLURM_PROCID"), _read_int(environment, "SLURM_LOCALID")
    return ClusterProcess(rank, world, local, local_world, node, nodes, "SLURM", f"tcp://{host}:{port}", job)


def _get_first_host(names: str) -> str:
    """Return the first of a list of hosts in SLURM's notation: `gpu[03-05,7],big1` begins with gpu03."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:\[[^\]]*\]|[^,\[])*", names)[0])  # type: ignore[index]


def _get_first_set(environment: Mapping[str, str], *names: str) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _read_int(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    text = _get_first_set(environment, *names)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ConfigError(
            f"the environment variable {names[0]}: expected a number, found {text!r}. The program that starts the "
            "processes sets this variable: unset the variable, or start the processes with torchrun or srun."
        )
    return int(text)


def _check_found(found: ClusterProcess) -> ClusterProcess:
    if found.rank < found.world_size and found.local_rank < found.local_world_size <= found.world_size:
        return found
    raise ConfigError(
        f"the environment variables of {found.started_by} contradict one another: process {found.rank} of "
        f"{found.world_size}, and {found.local_rank} of {found.local_world_size} on its node. Start the processes with "
        "torchrun or srun."
    )
