"""The process groups that Lumen communicates over, and the store of an attempt at which processes meet."""

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

from lumen.distributed.cluster_environment import is_loopback, loopback_names
from lumen.distributed.stack_dump import Stacks
from lumen.internals.compiler import import_compiler
from lumen.internals.process_groups import abort_groups, set_timeout, wait_for_gloo

if TYPE_CHECKING:
    from lumen.distributed.processes import Processes


CUDA_BACKENDS = "cpu:gloo,cuda:nccl"  # a parameter that is kept on the CPU needs one too
# Backends give up later than the limit: Lumen's watch has by then said where all processes stand, and ended them. NCCL
# ends the process itself.
_LATER_S, _NCCL_LATER_S = 30.0, 120.0
_LEAVE_S = 10.0
_ENDLESS_S = 1e8


@final
class Groups:
    """The process groups of this process: opened once, used by every run, closed when Python exits."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.is_ours = not dist.is_initialized()
        self.device = device
        self._failed = False
        self._patience_s = _NCCL_LATER_S if device.type == "cuda" else _LATER_S
        timeout = _span(processes.startup_timeout_s)
        self._timeout_beside = _span(max(processes.startup_timeout_s, processes.timeout_s))
        if self.is_ours:
            import_compiler()
            store: Any = dist.HashStore()  # type: ignore[attr-defined]
            if processes.world_size == 1:
                os.environ.update(loopback_names())  # Gloo and NCCL listen although nobody connects.
            else:
                store = meet(processes.address, processes.rank, processes.world_size, timeout)
            backend = CUDA_BACKENDS if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=processes.rank, world_size=processes.world_size,
                timeout=_span(processes.startup_timeout_s + self._patience_s),
                device_id=device if device.type == "cuda" else None, store=store,
            )  # fmt: skip
        self.default: Any = dist.group.WORLD
        self.control: Any = None
        self.beside: Any = None
        self._parts: list[Any] = []
        self.stacks: Stacks | None = None
        if processes.world_size > 1:
            # The default group is left to collectives of the user: one that some ranks skip never meets one of Lumen's.
            self.control = _new_group(timeout)
            self.stacks = Stacks(processes.rank, lambda value: gather(value, self.control))
        atexit.register(self.close)

    def include(self, group: Any) -> None:
        """Give a process group of some of the ranks the same timeout as the others."""
        if group is not self.default and all(group is not each for each in self._parts):
            self._parts.append(group)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of collectives from now on, in seconds; a user's own default group keeps its timeout."""
        if self.control is not None:
            set_timeout(self.control, _span(timeout_s + _LATER_S))
        for group in (*self._parts, *([self.default] if self.is_ours else [])):
            set_timeout(group, _span(timeout_s + self._patience_s))

    def open_beside(self) -> None:
        """Open the group for collectives of a thread, unless it is open. Its timeout is long. Collective."""
        if self.beside is None:
            self.beside = _new_group(self._timeout_beside)

    def failed(self) -> None:
        """Note that collectives have failed: the groups are then closed without waiting for the other ranks."""
        self._failed = True

    def _all_leave(self) -> bool:
        """Whether all ranks get here too within a moment, so that the groups can be closed together."""
        if self.control is None:
            return True
        try:
            set_timeout(self.control, timedelta(seconds=_LEAVE_S))
            dist.all_reduce(torch.zeros(()), group=self.control)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Close the groups that were opened here."""
        atexit.unregister(self.close)
        if self.stacks is not None:
            self.stacks.close()
        if dist.is_initialized() and dist.group.WORLD is self.default:
            if not self.is_ours:
                _destroy(self.control)
                _destroy(self.beside)
            elif dist.get_backend() != "gloo" and (self._failed or not self._all_leave()):
                abort_groups()  # NCCL would wait for the others
            else:
                dist.destroy_process_group()
        self.default = self.control = self.beside = None
        self._parts.clear()
        gc.collect()  # gloo's threads end with the last reference
        wait_for_gloo()  # one that drops its last tensor after Python's end ends the process with SIGABRT


def _span(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, _ENDLESS_S))


def _new_group(timeout: timedelta) -> Any:
    """A gloo group of all processes. Collective."""
    return dist.new_group(backend="gloo", timeout=timeout)


def _destroy(group: Any) -> None:
    if group is not None:
        dist.destroy_process_group(group)


def gather(value: Any, group: Any) -> list[Any]:
    """Every rank's value of plain data, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


_LOOK_EVERY_S = 0.01
_ZERO_FIRST = timedelta(seconds=5)  # it says who is missing


def loopback_store(host: str, port: int = 0) -> Any:
    """Open a store that listens on a loopback address alone.

    Torch's store listens on all addresses of the host, whichever it is given (pytorch #173909). While this one exists,
    a `TCPStore` that this process opens at the same port shares its listener.

    Args:
        host: A name or an address for which `is_loopback` is true.
        port: The port; 0: a free one.

    Raises:
        OSError: The port is in use.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return TCPStore(
        host, listener.getsockname()[1], is_master=True, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def meet(address: str, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A store to open process groups with. Collective: every rank must call this.

    Torch's store counts who has come, and so cannot say who has not: rank 0 asks each by its number. It also gives all
    a prefix for their keys, since the store of torch's elastic agent outlives its workers: restarted ones would read
    there at which addresses dead ones listened. The number of the restart would not do, as each node's agent counts its
    own.

    Where the address is a loopback address all processes are on this host, and listen on that interface alone.

    Args:
        address: A URL for `torch.distributed.rendezvous`.
        rank: Rank of this process in the run, from 0.
        world_size: Number of processes to wait for.
        timeout: How long to wait for all of them.

    Raises:
        RuntimeError: Some processes did not arrive in time.
    """
    host, port = _host_and_port(address)
    held = None
    if is_loopback(host):
        os.environ.update(loopback_names())
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(OSError):  # The port is in use: torch shares a listener of this process, or says so.
                held = loopback_store(host, port)
    store, *_ = next(rendezvous(address, rank=rank, world_size=1, timeout=timeout))
    del held  # `store` shares its listener.
    store.set_timeout(timeout + _ZERO_FIRST)
    return c10d.PrefixStore(f"lumen/{_agree(store, rank, world_size, timeout.total_seconds())}", store)


def _host_and_port(address: str) -> tuple[str, int]:
    if address == "env://":
        return os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    url = urlsplit(address)
    return url.hostname or "", url.port or 0


def _agree(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """A random token that rank 0 makes, and gives to each rank that asks for it by a fresh token of its own."""
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"lumen/here/{rank}", mine)
        token: str = store.get(f"lumen/answer/{mine}").decode()
        store.set(f"lumen/heard/{token}/{rank}", "")
        return token
    missing, deadline_s = list(range(1, world_size)), time.monotonic() + timeout_s
    while missing := [each for each in missing if not store.check([f"lumen/heard/{mine}/{each}"])]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"timed out waiting for ranks {', '.join(map(str, missing))}")
        for each in missing:
            if store.check([f"lumen/here/{each}"]):  # it may be a dead one's: then nobody hears the answer
                store.set(f"lumen/answer/{store.get(f'lumen/here/{each}').decode()}", mine)
        time.sleep(_LOOK_EVERY_S)
    return mine
