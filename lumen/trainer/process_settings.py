"""Settings of a run's process: the lock for one run at a time, torch's global settings, and `environment.json`."""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lumen.console import logger
from lumen.errors import ConfigError
from lumen.internals.atomic_files import write_private
from lumen.internals.masking import mask_words
from lumen.loggers import Logger
from lumen.random import preserve_generators
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule
from lumen.task.modes import make_trainable
from lumen.task.task_module import TaskModule
from lumen.version import __version__


@contextmanager
def set_torch_switches(
    *, deterministic: bool | str, detect_anomaly: bool, matmul_precision: str | None, benchmark: bool | None
) -> Iterator[None]:
    """Set torch's global settings within the context; None keeps the current setting."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, finds = torch.backends.cudnn.benchmark, detect_anomaly or torch.is_anomaly_enabled()
    with _set_matmul_precision(matmul_precision), torch.autograd.set_detect_anomaly(finds):
        if deterministic:
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark
        try:
            yield
        finally:
            if deterministic:  # only then, because the function imports torch's compiler, which is slow
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.benchmark = cudnn


@contextmanager
def _set_matmul_precision(precision: str | None) -> Iterator[None]:
    """Set the precision of float32 matrix products within the context.

    This calls torch's older function. After use of the newer per-backend settings, the compiler of torch < 2.14 raises
    an error. The per-backend values are still saved and restored, because the user may have set them.
    """
    if precision is None:
        yield
        return
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before, known = [backend.fp32_precision for backend in backends], "highest"
    with suppress(RuntimeError):  # torch has no name for the user's combination of per-backend settings
        known = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(known)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def write_environment(directory: Path, strategy: Strategy) -> None:
    """Write software, devices and processes of the run to `environment.json`."""
    record: dict[str, Any] = {
        "command": mask_words(sys.orig_argv),
        "working_directory": os.getcwd(),
        "host": platform.node(),
        **_describe_software(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "strategy": strategy.__class__.__name__,
        "processes": strategy.processes.world_size,
        "nodes": strategy.processes.nodes,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    if "SLURM_JOB_ID" in os.environ:
        names, restarts = ("job_id", "array_job_id", "array_task_id"), os.environ.get("SLURM_RESTART_COUNT", "0")
        job = {name: found for name in names if (found := os.environ.get(f"SLURM_{name.upper()}")) is not None}
        record["slurm"] = {**job, "restarts": int(restarts) if restarts.isdigit() else 0}
    write_private(directory / "environment.json", json.dumps(record, indent=2) + "\n")


@cache
def _describe_software() -> dict[str, Any]:
    """Return facts that are constant in a process. Reading them is slow, so they are cached."""
    versions = {"lumen": __version__, "torch": torch.__version__}  # with the build, such as 2.13.0+cu130
    for package in ("numpy", "torchmetrics", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    libc = "".join(platform.libc_ver())
    return {
        # platform.platform() would start a process
        "platform": "-".join(filter(None, [platform.system(), platform.release(), platform.machine(), libc])),
        "python": platform.python_version(),
        "packages": versions,
    }


_turn_lock = threading.RLock()
#: Tasks, strategies and loggers of the thread's open runs; each later run is inside a hook of the run before.
_open: list[tuple[TaskModule, Strategy, Sequence[Logger]]] = []


def _reset_after_fork() -> None:
    """Reset the lock in a forked child, which has no run."""
    global _turn_lock
    _turn_lock = threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def take_process_turn(
    task: TaskModule, datamodule: DataModule | None, strategy: Strategy, loggers: Sequence[Logger], *, trains: bool
) -> Iterator[None]:
    """Hold the lock for a run within the context: no other thread of this process can have a run.

    Generators, torch's settings and logs belong to the whole process, so two runs at once would not be exact. A run
    inside a hook of another run restores that run's generators and data module.

    Args:
        task: The task that the run trains or evaluates.
        datamodule: The data module of the run, or None.
        strategy: The strategy of the run.
        loggers: The loggers of the run that the user has passed.
        trains: True for a run of `fit`, which needs gradients, even inside a hook of an evaluation.

    Raises:
        ConfigError: The task, the strategy or a logger is already in a run.
    """
    if not _turn_lock.acquire(blocking=False):
        logger.warning(
            "the thread %s waits until the run of another thread of this process is over. Random generators belong to "
            "the process: a model built in one thread would change the random numbers of a run in another thread. For "
            "several runs at once, start several processes.",
            threading.current_thread().name,
        )
        _turn_lock.acquire()
    with ExitStack() as closing:
        closing.callback(_turn_lock.release)
        if any(other is task for other, *_ in _open):
            raise ConfigError(
                f"this {type(task).__name__} is in a run of another Trainer. Pass a copy to the inner run: "
                "copy.deepcopy(task)."
            )
        if any(other is strategy for _, other, _ in _open):
            raise ConfigError(
                "the strategy is in a run of another Trainer, whose task it holds. Pass a copy to "
                "the inner Trainer: copy.copy(strategy)."
            )
        for each in loggers:
            if any(each is other for *_, others in _open for other in others):
                raise ConfigError(
                    f"the {type(each).__name__} is in a run of another Trainer, whose record it writes. Pass a new "
                    "logger to the inner Trainer, or logger=False."
                )
        attached = None if datamodule is None else datamodule._run
        if _open:
            closing.enter_context(preserve_generators())
            if attached is not None and attached.stage and datamodule is not None:
                closing.callback(datamodule._attach, attached, datamodule._trainer)
        if trains:
            closing.enter_context(torch.inference_mode(False))
            closing.enter_context(torch.enable_grad())
            make_trainable(task)
        _open.append((task, strategy, loggers))
        closing.callback(_open.pop)
        yield
