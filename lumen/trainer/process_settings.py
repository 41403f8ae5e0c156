"""What a run changes in its process while it lasts: signals, torch's switches. All of it is put back."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch

from lumen.console import in_notebook, logger
from lumen.run.run import Run
from lumen.strategies import Strategy
from lumen.trainer.logs import record

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST_S = 5.0


@contextmanager
def stop_signals(run: Run) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets the step finish and the run save; a second one waits for no more than a save.

    Who stops a service or a job may send SIGTERM to all of its processes, and launchers pass on theirs: one that
    follows within `_SAME_REQUEST_S` is the same request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before: dict[int, Any] = {}
    request = _StopRequest(run, before)
    before |= {number: signal.signal(number, request) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@final
class _StopRequest:
    """The signal handler of a run.

    Args:
        run: The run that a signal asks to stop.
        before: The handlers before it, by signal; the second signal puts them back.
    """

    def __init__(self, run: Run, before: Mapping[int, Any]) -> None:
        self._run, self._before = run, before
        self._process, self._first_s = os.getpid(), -math.inf
        self._is_telling = False
        self._meanwhile: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ask the run to stop; leave it if it was asked already."""
        vote = self._run.ending.vote
        if os.getpid() != self._process:  # a forked worker: the main process decides
            return
        if number == vote.requested == signal.SIGTERM and time.monotonic() - self._first_s < _SAME_REQUEST_S:
            return
        if self._is_telling and self._meanwhile is None:  # interrupted, what is being written would be written twice
            self._meanwhile = number
        elif vote.requested is not None:  # also where a terminal that stands still keeps the answer from being written
            self._leave(number)
        else:
            vote.requested, self._first_s, self._is_telling = number, time.monotonic(), True
            logger.info("%s: finishing this step; once more leaves at once", signal.Signals(number).name)
            self._is_telling = False
            if self._meanwhile is not None:
                self._leave(self._meanwhile)

    def _leave(self, number: int) -> None:
        for known, handler in self._before.items():
            signal.signal(known, handler)
        record("stopped at once: %s", signal.Signals(number).name)
        if self._run.saves.is_writing:
            logger.warning("%s: leaving when the checkpoint under way is written", signal.Signals(number).name)
        raise interruption(number)


def interruption(number: int | None) -> BaseException:
    """How a process ends that was asked to: as Python does for Ctrl-C, else with 128 + the signal's number."""
    return KeyboardInterrupt() if number in (None, signal.SIGINT) else SystemExit(128 + int(number or 0))


def resume_command(run_directory: Path) -> str:
    """The command, or in a notebook the line, that goes on from where a run stopped."""
    trainer = f'Trainer(..., name={json.dumps(run_directory.name, ensure_ascii=False)}, resume="auto")'
    if in_notebook:
        return f"{trainer}.fit(...)"
    if (run_directory / "config.yaml").exists():
        return f"lumen fit --config {shlex.quote(str(run_directory / 'config.yaml'))} --trainer.resume auto"
    script = " ".join(shlex.quote(word) for word in [Path(sys.executable).name, *sys.orig_argv[1:]])
    return f"{script}   # with {trainer}"


@contextmanager
def torch_settings(
    deterministic: bool, detect_anomaly: bool, matmul_precision: str | None = None, benchmark: bool | None = None
) -> Iterator[None]:
    """Torch's global switches for the time of a run; None leaves one as it is."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark
    with (
        _float32_matmul(matmul_precision),
        torch.autograd.set_detect_anomaly(detect_anomaly or torch.is_anomaly_enabled()),
    ):
        if deterministic:
            torch.use_deterministic_algorithms(True)
        if benchmark is not None:
            torch.backends.cudnn.benchmark = benchmark
        try:
            yield
        finally:
            if deterministic:  # the function imports torch's compiler, which takes longer than many a run
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.benchmark = cudnn


@contextmanager
def _float32_matmul(precision: str | None) -> Iterator[None]:
    """Set the precision with which float32 matrices are multiplied.

    The function that torch has had for long is used to set it: after the per-backend switches have been, the compiler
    of torch < 2.14 refuses to work. Those are read and put back all the same, for who has set them.
    """
    if precision is None:
        yield
        return
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        known = torch.get_float32_matmul_precision()
    except RuntimeError:  # they were set, and this has no name for it
        known = "highest"
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(known)
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def write_environment(directory: Path, strategy: Strategy) -> None:
    """Record what the run runs on, as `environment.json`."""
    record = {
        "command": sys.orig_argv,
        "working_directory": os.getcwd(),
        "host": platform.node(),
        **_software(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "strategy": strategy.__class__.__name__,
        "processes": strategy.processes.world_size,
        "nodes": strategy.processes.nodes,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    (directory / "environment.json").write_text(json.dumps(record, indent=2) + "\n")


@cache
def _software() -> dict[str, Any]:
    """What stays for as long as the process: each is a file that is read, some of them large."""
    versions = {}
    for package in ("lumen", "torch", "numpy", "torchmetrics", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    libc = "".join(platform.libc_ver())
    return {
        # not platform.platform(), which starts a process
        "platform": "-".join(filter(None, [platform.system(), platform.release(), platform.machine(), libc])),
        "python": platform.python_version(),
        "packages": versions,
    }
