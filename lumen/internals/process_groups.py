"""Private names of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lumen.internals.torch_versions import need


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Say how long the next collectives of a group wait."""
    if hasattr(dist, "set_timeout"):  # of torch 2.15
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def need_groups() -> None:
    """Look for what processes need.

    Raises:
        ConfigError: This torch lacks some of it.
    """
    if not hasattr(dist, "set_timeout"):
        need("a run of several processes", dist.distributed_c10d, "_set_pg_timeout")


def leave_out_expanded_buffers(module: nn.Module) -> None:
    """Let a `DistributedDataParallel` that is made of a module not copy over buffers in which elements are one."""
    names = [name for name, each in module.named_buffers() if 0 in each.stride() and not each.is_contiguous()]
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def need_reducer(ddp: Any) -> None:
    """Look for what `end_backward` needs.

    Raises:
        ConfigError: This torch lacks it.
    """
    need("strategy: ddp", ddp.reducer, "_rebuild_buckets")


def end_backward(ddp: Any) -> None:
    """Let a `DistributedDataParallel` look now whether all its parameters got gradients, not in the next forward.

    Raises:
        RuntimeError: Some got none.
    """
    ddp.reducer._rebuild_buckets()


def abort_groups() -> None:
    """End all groups without waiting for anybody; where torch has no such call they end with the process."""
    getattr(dist.distributed_c10d, "_abort_process_group", lambda: None)()


def gloo_over_default_device(found: Any, _: Any) -> Any:
    """Gloo over the default group's device: one of its own has a thread that wakes every 10 ms, 0.3 % of a core.

    Args:
        found: What `torch.distributed` tells a backend about its group.
    """
    gloo: Any = dist.ProcessGroupGloo
    default: Any = dist.group.WORLD
    try:
        options = gloo._Options()
        devices = default._get_backend(torch.device("cpu")).options._devices
        options._timeout, options._devices = found.timeout, devices
    except AttributeError:
        return gloo(found.store, found.group_rank, found.group_size, found.timeout)
    return gloo(found.store, found.group_rank, found.group_size, options)


def watch_workers(agent: Any, look: Callable[[Any], Any]) -> None:
    """Let somebody else look at an elastic agent's workers first, each time.

    Args:
        agent: Has not run yet.
        look: Is given the group of workers; returns what the agent is to make of it, or None to let the agent look.

    Raises:
        ConfigError: This torch lacks it.
    """
    need("the launcher", agent, "_monitor_workers")
    own = agent._monitor_workers
    agent._monitor_workers = lambda group: look(group) or own(group)
