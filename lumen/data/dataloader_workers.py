"""Set-up of a DataLoader's workers: signals, threads, and their end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info

from lumen.data.seeded_dataset import make_early_end_error
from lumen.internals.garbage import collect_in_worker, pause_collection_for_fork
from lumen.internals.process_groups import wait_for_gloo
from lumen.internals.stop_signals import should_obey

_GRACE_S = 30
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
_INHERITS_LOCKS = sys.version_info < (3, 12)  # https://github.com/python/cpython/issues/112275


def init_worker(dataset: Any, user_init: Callable[[int], None] | None, worker_id: int) -> None:
    """Prepare a DataLoader's worker. The user's own `worker_init_fn` runs last, and may change all of it.

    Args:
        dataset: The user's data set, which replaces Lumen's wrapper in `get_worker_info().dataset`.
        user_init: The user's `worker_init_fn`, or None.
        worker_id: Index of the worker, from 0, as torch passes it.
    """
    # A stop request reaches every process of the group. The main process decides, and still needs data for this step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_S))
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if should_obey(number, signal.getsignal(number)):  # True in a worker that was not forked
            signal.signal(number, signal.SIG_IGN)
    _limit_threads()
    collect_in_worker()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", dataset)
    if user_init is not None:
        user_init(worker_id)


def _limit_threads() -> None:
    """Limit libraries to one thread in this worker, as torch does: using all cores in every worker would be slower."""
    from threadpoolctl import threadpool_limits

    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # for libraries that the data set imports later
    threadpool_limits(1)  # for libraries that are loaded already, except OpenCV
    if (opencv := sys.modules.get("cv2")) is not None:
        opencv.setNumThreads(0)


@contextmanager
def fork_workers(workers: int) -> Iterator[None]:
    """Return a context in which a loader forks its workers.

    In Python 3.11 a forked worker may inherit a lock that a thread of torch holds at that moment, and hang. Such a
    thread takes the lock after a collective, to free a Python tensor. The context waits for these threads first.

    Args:
        workers: Number of workers to fork; 0: none.
    """
    if workers and _INHERITS_LOCKS and dist.is_available() and dist.is_initialized():
        wait_for_gloo()
    with pause_collection_for_fork():
        yield


@contextmanager
def prepare_pass(loader: Any) -> Iterator[None]:
    """Return a context in which a DataLoader that Lumen does not replace begins a pass.

    `init_worker` prepares its workers, and a StopIteration in its collate function becomes a clear error.
    """
    if not isinstance(loader, DataLoader):
        yield
        return
    before = loader.worker_init_fn, loader.collate_fn
    if loader.num_workers:
        loader.worker_init_fn = partial(init_worker, loader.dataset, loader.worker_init_fn)
    loader.collate_fn = partial(_call_collate, loader.dataset, loader.collate_fn)
    try:
        with fork_workers(loader.num_workers):
            yield
    finally:
        loader.worker_init_fn, loader.collate_fn = before


def _call_collate(dataset: Any, collate: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate(samples)
    except StopIteration as error:
        raise make_early_end_error(dataset, "in its collate function") from error
