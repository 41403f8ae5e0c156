"""What happens in a DataLoader's workers: signals, threads, and how they end."""

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

from lumen.data.seeded_dataset import early_end
from lumen.internals.garbage import collect_in_worker, workers_are_begun
from lumen.internals.process_groups import wait_for_gloo
from lumen.internals.stop_signals import is_obeyed

_GRACE_S = 30
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")
_INHERITS_LOCKS = sys.version_info < (3, 12)  # https://github.com/python/cpython/issues/112275


def init_worker(dataset: Any, user_init: Callable[[int], None] | None, worker_id: int) -> None:
    """Prepare a DataLoader's worker. The user's own `worker_init_fn` runs last, and may change any of this.

    Args:
        dataset: The user's data set, which `get_worker_info().dataset` is to show instead of Lumen's wrapper.
        user_init: The user's `worker_init_fn`, or None.
        worker_id: Index of the worker, from 0, as torch passes it.
    """
    # a stop request reaches every process of the group; the main one decides, and still needs its data for this step
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE_S))
    for number in (signal.SIGHUP, signal.SIGUSR1):
        if is_obeyed(number, signal.getsignal(number)):  # a worker that was not forked
            signal.signal(number, signal.SIG_IGN)
    _limit_threads()
    collect_in_worker()
    info = get_worker_info()
    assert info is not None
    object.__setattr__(info, "dataset", dataset)
    if user_init is not None:
        user_init(worker_id)


def _limit_threads() -> None:
    """Let libraries use one thread in this worker, as torch does: all cores in every worker would be slower."""
    from threadpoolctl import threadpool_limits

    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))  # Libraries that the data import later read these.
    threadpool_limits(1)  # Loaded libraries have read them already, and threadpoolctl does not know OpenCV's pool.
    if (opencv := sys.modules.get("cv2")) is not None:
        opencv.setNumThreads(0)


@contextmanager
def begun(workers: int) -> Iterator[None]:
    """The context in which a loader forks its workers.

    Python 3.11 may hand a worker a lock that a thread of torch holds at that moment, for ever: a thread that is done
    with a collective takes it to free a tensor of Python's. They are given the time to do so first.

    Args:
        workers: How many are forked; 0: none.
    """
    if workers and _INHERITS_LOCKS and dist.is_available() and dist.is_initialized():
        wait_for_gloo()
    with workers_are_begun():
        yield


@contextmanager
def prepared(loader: Any) -> Iterator[None]:
    """The context in which a DataLoader that Lumen does not replace is to begin a pass.

    Its workers are prepared by `init_worker`, and a StopIteration in its collate function becomes a clear error.
    """
    if not isinstance(loader, DataLoader):
        yield
        return
    before = loader.worker_init_fn, loader.collate_fn
    if loader.num_workers:
        loader.worker_init_fn = partial(init_worker, loader.dataset, loader.worker_init_fn)
    loader.collate_fn = partial(_collate, loader.dataset, loader.collate_fn)
    try:
        with begun(loader.num_workers):
            yield
    finally:
        loader.worker_init_fn, loader.collate_fn = before


def _collate(dataset: Any, collate: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate(samples)
    except StopIteration as error:
        raise early_end(dataset, "in its collate function") from error
