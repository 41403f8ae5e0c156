"""Process groups of Lumen, and the store at which the processes of an attempt meet."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lumen.distributed.cluster_environment import get_loopback_variables, is_loopback
from lumen.distributed.stack_dump import StackDumper
from lumen.internals.compiler import import_compiler
from lumen.internals.process_groups import abort_groups, set_timeout, wait_for_gloo

if TYPE_CHECKING:
    from lumen.distributed.processes import Processes


CUDA_BACKENDS = "cpu:gloo,cuda:nccl"  # parameters that stay on the CPU need gloo
# Backends time out later than Lumen's watch, which first prints the stacks of all processes and ends the processes.
# NCCL would end the process without stacks.
_TIMEOUT_MARGIN_S, _NCCL_TIMEOUT_MARGIN_S = 30.0, 120.0
_CLOSE_TIMEOUT_S = 10.0
_MAX_TIMEOUT_S = 1e8


@final
class ProcessGroups:
    """Process groups of this process: opened once, used by every run, closed when Python exits."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.owns_default = not dist.is_initialized()
        self.device = device
        self._failed = False
        self._timeout_margin_s = _NCCL_TIMEOUT_MARGIN_S if device.type == "cuda" else _TIMEOUT_MARGIN_S
        timeout = _as_timedelta(processes.startup_timeout_s)
        self._thread_group_timeout = _as_timedelta(max(processes.startup_timeout_s, processes.timeout_s))
        if self.owns_default:
            import_compiler()
            store: Any = dist.HashStore()  # type: ignore[attr-defined]
            if processes.world_size == 1:
                os.environ.update(get_loopback_variables())  # Gloo and NCCL listen even with one process.
            else:
                store = open_store(processes.address, processes.rank, processes.world_size, timeout)
            backend = CUDA_BACKENDS if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=processes.rank, world_size=processes.world_size,
                timeout=_as_timedelta(processes.startup_timeout_s + self._timeout_margin_s),
                device_id=device if device.type == "cuda" else None, store=store,
            )  # fmt: skip
        self.default: Any = dist.group.WORLD
        self.control: Any = None
        self.thread_group: Any = None
        self._rank_subgroups: list[Any] = []
        self.stacks: StackDumper | None = None
        if processes.world_size > 1:
            # Only the user's collectives use the default group: if some ranks skip one, no collective of Lumen matches.
            self.control = _new_group(timeout)
            self.stacks = StackDumper(processes.rank, lambda value: all_gather_values(value, self.control))
        atexit.register(self.close)

    def include(self, group: Any) -> None:
        """Give a process group of some of the ranks the same timeout as the other groups."""
        if group is not self.default and all(group is not each for each in self._rank_subgroups):
            self._rank_subgroups.append(group)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of later collectives, in seconds; a default group that the user opened keeps its timeout."""
        if self.control is not None:
            set_timeout(self.control, _as_timedelta(timeout_s + _TIMEOUT_MARGIN_S))
        for group in (*self._rank_subgroups, *([self.default] if self.owns_default else [])):
            set_timeout(group, _as_timedelta(timeout_s + self._timeout_margin_s))

    def open_thread_group(self) -> None:
        """Open the group for collectives of a thread, with a long timeout, unless it is open. Collective."""
        if self.thread_group is None:
            self.thread_group = _new_group(self._thread_group_timeout)
            # In torch before 2.13 the first collectives of two groups must not overlap: their recorders race.
            dist.all_reduce(torch.zeros(()), group=self.thread_group)

    def note_failure(self) -> None:
        """Note that collectives failed, so that `close` does not wait for the other ranks."""
        self._failed = True

    def _do_all_ranks_close(self) -> bool:
        """Return True if all ranks arrive here shortly, so that the groups can be closed together."""
        if self.control is None:
            return True
        try:
            set_timeout(self.control, timedelta(seconds=_CLOSE_TIMEOUT_S))
            dist.all_reduce(torch.zeros(()), group=self.control)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Close the groups that Lumen opened."""
        atexit.unregister(self.close)
        if self.stacks is not None:
            self.stacks.close()
        if dist.is_initialized() and dist.group.WORLD is self.default:
            if not self.owns_default:
                _destroy(self.control)
                _destroy(self.thread_group)
            elif dist.get_backend() != "gloo" and (self._failed or not self._do_all_ranks_close()):
                abort_groups()  # NCCL would wait for the other ranks
            else:
                dist.destroy_process_group()
        self.default = self.control = self.thread_group = None
        self._rank_subgroups.clear()
        gc.collect()  # gloo's threads end with the last reference to their group
        wait_for_gloo()  # a gloo thread that frees a tensor after Python's end causes SIGABRT


def _as_timedelta(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _MAX_TIMEOUT_S))


def _new_group(timeout: timedelta) -> Any:
    """Open a gloo group of all processes, or a fake one if the processes are simulated. Collective."""
    return dist.new_group(backend="fake" if dist.get_backend() == "fake" else "gloo", timeout=timeout)


def _destroy(group: Any) -> None:
    if group is not None:
        dist.destroy_process_group(group)


def all_gather_values(value: Any, group: Any) -> list[Any]:
    """Return every rank's value of plain data, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


_POLL_INTERVAL_S = 0.01
_CLIENT_TIMEOUT_MARGIN = timedelta(seconds=5)  # rank 0 times out first and names the missing ranks


def open_loopback_store(host: str, port: int = 0) -> Any:
    """Open a store that listens only on a loopback address.

    Torch's store listens on all addresses of the host, regardless of the given address (pytorch #173909). While this
    store exists, a `TCPStore` that this process opens at the same port shares its listener.

    Args:
        host: A name or an address for which `is_loopback` is true.
        port: The port; 0: any free port.

    Raises:
        OSError: The port is in use.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def open_store(address: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a store for opening process groups. Collective: every rank must call this.

    Torch's store counts arrivals and cannot name the missing ranks. Therefore rank 0 checks each rank by its number.
    Rank 0 also gives all ranks a common prefix for their keys. The store of torch's elastic agent outlives its workers,
    so without a prefix restarted workers would read addresses of ended workers. The restart count is no alternative to
    the prefix, because each node's agent has its own count.

    If the address is a loopback address, all processes are on this host and listen only on that interface.

    Args:
        address: A URL for `torch.distributed.rendezvous`.
        rank: Rank of this process in the run, from 0.
        world_size: Number of processes to wait for.
        timeout: Maximum time to wait for all processes.

    Raises:
        RuntimeError: Some processes did not arrive in time.
    """
    host, port = _split_address(address)
    local_store = None
    if is_loopback(host):
        os.environ.update(get_loopback_variables())
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(OSError):  # The port is in use: torch shares a listener of this process, or raises.
                local_store = open_loopback_store(host, port)
    store, *_ = next(rendezvous(address, rank=rank, world_size=1, timeout=timeout))
    del local_store  # `store` shares its listener.
    store.set_timeout(timeout + _CLIENT_TIMEOUT_MARGIN)
    return c10d.PrefixStore(f"lumen/{_exchange_token(store, rank, world_size, timeout.total_seconds())}", store)


def _split_address(address: str) -> tuple[str, int]:
    if address == "env://":
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    url = urlsplit(address)
    return url.hostname or "", url.port or 0


def _exchange_token(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a random token that rank 0 generates and sends to each rank; each rank asks with a fresh token."""
    own_token = secrets.token_hex(8)
    if rank > 0:
        store.set(f"lumen/arrived/{rank}", own_token)
        token: str = store.get(f"lumen/answer/{own_token}").decode()
        store.set(f"lumen/received/{token}/{rank}", "")
        return token
    missing, deadline_s = list(range(1, world_size)), time.monotonic() + timeout_s
    while missing := [each for each in missing if not store.check([f"lumen/received/{own_token}/{each}"])]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"timed out waiting for ranks {', '.join(map(str, missing))}")
        for each in missing:
            if store.check([f"lumen/arrived/{each}"]):  # perhaps by an ended process, which never reads the answer
                store.set(f"lumen/answer/{store.get(f'lumen/arrived/{each}').decode()}", own_token)
        time.sleep(_POLL_INTERVAL_S)
    return own_token
