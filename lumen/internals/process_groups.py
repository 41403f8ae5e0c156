"""Private names of `torch.distributed`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lumen.internals.torch_versions import need


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives from now on."""
    if hasattr(dist, "set_timeout"):  # of torch 2.15
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def need_groups() -> None:
    """Check that this torch has the private names that process groups use.

    Raises:
        ConfigError: This version of torch lacks some of them.
    """
    if not hasattr(dist, "set_timeout"):
        need("a run of several processes", dist.distributed_c10d, "_set_pg_timeout")


def leave_out_expanded_buffers(module: nn.Module) -> None:
    """Keep a `DistributedDataParallel` over a module from broadcasting expanded buffers, which cannot be written."""
    names = [name for name, each in module.named_buffers() if 0 in each.stride() and not each.is_contiguous()]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def need_reducer(ddp: Any) -> None:
    """Check that this torch has the private names that `end_backward` uses.

    Raises:
        ConfigError: This version of torch lacks them.
    """
    need("strategy: ddp", ddp.reducer, "_rebuild_buckets")


def end_backward(ddp: Any) -> None:
    """Have a `DistributedDataParallel` check now, not in the next forward, that all parameters got gradients.

    Raises:
        RuntimeError: Some parameters got no gradient.
    """
    ddp.reducer._rebuild_buckets()


def abort_groups() -> None:
    """End all groups without waiting for anybody; where torch has no such call they end with the process."""
    getattr(dist.distributed_c10d, "_abort_process_group", lambda: None)()


def wait_for_gloo(limit_s: float = 1.0) -> None:
    """Wait until threads of gloo rest.

    Torch has no call that joins them: gloo does so where a group is freed, and `wait` returns before its thread has let
    go of the tensors, for which it wants Python. So this asks the system what they do; where there is no /proc it only
    gives them a moment.
    """
    deadline_s = time.monotonic() + limit_s
    busy = True
    while busy and time.monotonic() < deadline_s:
        time.sleep(0.005)  # they may want Python now
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
        busy = any("(pt_gloo" in stat and ") S " not in stat for stat in stats)


#: Torch's flight recorders: of every backend, or of all but NCCL.
RECORDERS = {"nccl": "_dump_nccl_trace_json", "torch": "_dump_fr_trace_json"}


def recorded_collectives(recorder: str) -> bytes:
    """Return the last collectives of this process as JSON; `{}` where torch does not record them.

    Where a device hangs it may never return, nor let go of Python's lock.

    Args:
        recorder: One of `RECORDERS`; "torch" asks no device.
    """
    return bytes(getattr(torch._C._distributed_c10d, RECORDERS[recorder], lambda: b"{}")())


def group_members() -> dict[str, list[int]]:
    """Return the ranks of each process group that this process has opened, by the name of the group."""
    world = getattr(dist.distributed_c10d, "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {str(names[group]): sorted(members) for group, members in ranks.items() if group in names}


def watch_workers(agent: Any, look: Callable[[Any], Any]) -> None:
    """Have a function called before an elastic agent looks at its workers, each time.

    Args:
        agent: An elastic agent that has not run yet.
        look: Called with the worker group; returns the result the agent is to use, or None to let the agent look.

    Raises:
        ConfigError: This version of torch has no such method.
    """
    need("the launcher", agent, "_monitor_workers")
    own = agent._monitor_workers
    agent._monitor_workers = lambda group: look(group) or own(group)


def never_restart(agent: Any) -> None:
    """Have an elastic agent end with its first failure, although its workers are told of restarts before.

    Args:
        agent: An elastic agent that has not run yet.

    Raises:
        ConfigError: This version of torch has no such attribute.
    """
    need("the launcher", agent, "_remaining_restarts")
    agent._remaining_restarts = 0
