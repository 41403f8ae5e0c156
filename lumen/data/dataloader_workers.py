"""What happens in a DataLoader's workers: signals, threads, and how they end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from lumen.data.seeded_dataset import early_end
from lumen.internals.garbage import collect_in_worker

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
    collect_in_worker()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", dataset)
    if user_init is not None:
        user_init(worker_id)


def _limit_threads() -> None:
    """One thread a worker, as torch does for its own: libraries that take every core would slow each other down."""
    from threadpoolctl import threadpool_limits

    for library in ("OMP", "OPENBLAS", "MKL"):  # those loaded from now on
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    threadpool_limits(1)  # those that are here
    if (opencv := sys.modules.get("cv2")) is not None:
        opencv.setNumThreads(0)


@contextmanager
def prepared(loader: Any) -> Iterator[None]:
    """The context in which a loader of the user's own begins a pass.

    It starts workers that `init_worker` prepares, and a StopIteration of its collate function does not end the data.
    """
    if not isinstance(loader, DataLoader):
        yield
        return
    before = loader.worker_init_fn, loader.collate_fn
    if loader.num_workers:
        loader.worker_init_fn = partial(init_worker, loader.dataset, loader.worker_init_fn)
    loader.collate_fn = partial(_collate, loader.dataset, loader.collate_fn)
    try:
        yield
    finally:
        loader.worker_init_fn, loader.collate_fn = before


def _collate(dataset: Any, collate: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate(samples)
    except StopIteration as error:
        raise early_end(dataset, "in its collate function") from error
