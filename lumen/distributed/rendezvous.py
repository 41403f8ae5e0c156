"""The rendezvous of a run's processes: a store that no processes of an earlier attempt share."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed.distributed_c10d as c10d
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from lumen.distributed.cluster_environment import is_loopback, loopback_names

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
