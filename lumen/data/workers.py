"""What happens in a DataLoader's workers: signals, threads, and how they end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from threadpoolctl import threadpool_limits
from torch.utils.data import get_worker_info

_GRACE_S = 30


def init_worker(dataset: Any, user_init: Callable[[int], None] | None, worker_id: int) -> None:
    """Prepare a worker, before the user's own `worker_init_fn`, which may change any of this.

    Args:
        dataset: The user's, shown by `get_worker_info` instead of the one around it.
        user_init: The user's `worker_init_fn`.
        worker_id: Number of the worker.
    """
    # a stop request reaches every process of the group; the main one decides, and still needs its data for this step
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_S))
    _limit_threads()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", dataset)
    if user_init is not None:
        user_init(worker_id)


def _limit_threads() -> None:
    """One thread a worker, as torch does for its own: libraries that take every core would slow each other down."""
    for library in ("OMP", "OPENBLAS", "MKL"):  # those loaded from now on
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    threadpool_limits(1)  # those that are here
    if (opencv := sys.modules.get("cv2")) is not None:
        opencv.setNumThreads(0)


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator; garbage collection, after an error, would wait 5 s for each."""
    getattr(iterator, "_shutdown_workers", lambda: None)()
