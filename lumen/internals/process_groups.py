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

from lumen.internals.torch_versions import check_attributes

#: Function that gathers equally long tensors of all ranks in one tensor. It has a new name since torch 2.13.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives from now on."""
    if hasattr(dist, "set_timeout"):  # since torch 2.15
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def check_group_names() -> None:
    """Check that torch has the private names that process groups need.

    Raises:
        ConfigError: The installed torch lacks a name.
    """
    if not hasattr(dist, "set_timeout"):
        check_attributes("a run of several processes", dist.distributed_c10d, "_set_pg_timeout")


def exclude_expanded_buffers(module: nn.Module) -> None:
    """Exclude a module's expanded buffers, which cannot be written, from broadcasts of `DistributedDataParallel`."""
    names = [name for name, each in module.named_buffers() if 0 in each.stride() and not each.is_contiguous()]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def check_reducer_names(ddp: Any) -> None:
    """Check that torch has the private names that `end_backward` needs.

    Raises:
        ConfigError: The installed torch lacks a name.
    """
    check_attributes("strategy: ddp", ddp.reducer, "_rebuild_buckets")


def end_backward(ddp: Any) -> None:
    """Make a `DistributedDataParallel` check now, not in the next forward, that all parameters have gradients.

    Raises:
        RuntimeError: Some parameters have no gradient.
    """
    ddp.reducer._rebuild_buckets()


def abort_groups() -> None:
    """Abort all process groups without waiting for other ranks.

    If torch has no such call, the groups end with the process.
    """
    getattr(dist.distributed_c10d, "_abort_process_group", lambda: None)()


def wait_for_gloo(limit_s: float = 1.0) -> None:
    """Wait until the threads of gloo are idle.

    Torch has no call that joins the threads: gloo joins them when a group is freed. `wait` returns before gloo's thread
    has released the tensors, for which the thread needs Python's lock. This function therefore reads the state of the
    threads from /proc; without /proc it only waits a moment.

    Args:
        limit_s: The longest wait, in seconds.
    """
    deadline_s = time.monotonic() + limit_s
    is_busy = True
    while is_busy and time.monotonic() < deadline_s:
        time.sleep(0.005)  # the threads may need Python's lock now
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
        is_busy = any("(pt_gloo" in stat and ") S " not in stat for stat in stats)


#: Torch's flight recorders: of every backend ("nccl"), or of all backends except NCCL ("torch").
RECORDERS = {"nccl": "_dump_nccl_trace_json", "torch": "_dump_fr_trace_json"}


def read_recorded_collectives(recorder: str) -> bytes:
    """Return the last collectives of this process as JSON; `{}` if torch does not record them.

    If a device hangs, the call may never return and may hold Python's lock.

    Args:
        recorder: The name of a recorder in `RECORDERS`; "torch" does not access a device.
    """
    return bytes(getattr(torch._C._distributed_c10d, RECORDERS[recorder], lambda: b"{}")())


def get_group_members() -> dict[str, list[int]]:
    """Return the ranks of each process group that this process has opened, by name of the group."""
    world = getattr(dist.distributed_c10d, "_world", None)
    names, ranks = getattr(world, "pg_names", {}), getattr(world, "pg_group_ranks", {})
    return {str(names[group]): sorted(members) for group, members in ranks.items() if group in names}


def call_before_poll(agent: Any, check: Callable[[Any], Any]) -> None:
    """Call a function each time before an elastic agent checks its workers.

    Args:
        agent: An elastic agent that has not run yet.
        check: A function that takes the worker group. It returns the result that the agent uses, or None to let the
            agent check.

    Raises:
        ConfigError: The installed torch lacks the method.
    """
    check_attributes("the launcher", agent, "_monitor_workers")
    monitor_workers = agent._monitor_workers
    agent._monitor_workers = lambda group: check(group) or monitor_workers(group)


def disable_restarts(agent: Any) -> None:
    """Make an elastic agent end with its first failure.

    The agent's workers receive its `max_restarts` as the number of earlier restarts, `TORCHELASTIC_RESTART_COUNT`.

    Args:
        agent: An elastic agent that has not run yet.

    Raises:
        ConfigError: The installed torch lacks the attribute.
    """
    check_attributes("the launcher", agent, "_remaining_restarts")
    agent._remaining_restarts = 0
