"""Processes of a case: each system runs in its own process, in turns."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, final

from benchmarks.cases import PEERS, Case
from benchmarks.worker import MARKER

TIME_LIMIT_S = 300


class Failed(Exception):
    """Error of a system, with its last line of output."""


def installed(system: str) -> bool:
    """Return True if a system is installed."""
    package, *_ = system.split("-")
    return package not in PEERS or find_spec(package) is not None


def run_round(case: Case, systems: Sequence[str], *options: str, start: int = 0) -> dict[str, dict[str, Any] | str]:
    """Run a case once for every system, in new processes.

    Args:
        case: The case.
        systems: The systems. Each turn begins with a different system.
        options: Options of the worker.
        start: Index of the first system.

    Returns:
        The output of `benchmarks.worker` for each system, or the error as a text.
    """
    found: dict[str, dict[str, Any] | str] = {}
    turns: dict[str, Iterator[Any]] = {system: _turns(case, system, options) for system in systems}
    try:
        while turns:
            order = [system for system in systems if system in turns]
            start = (start + 1) % len(order)
            for system in order[start:] + order[:start]:
                try:
                    message = next(turns[system])
                except Failed as failure:
                    message = str(failure)
                if message is not None:
                    found[system] = message
                    turns.pop(system)
    finally:
        for left in turns.values():
            left.close()
    return found


def _turns(case: Case, system: str, options: Sequence[str]) -> Iterator[Any]:
    """Start the processes of a system; yield None after each turn, and the sample at the end."""
    words = ["-m", "benchmarks.worker", case.name, system, *options, *(["--turns"] if case.takes_turns else [])]
    command = [sys.executable, *words]
    ranks = [Process(command, environment, terminal=case.full) for environment in environments(case.ranks)]
    try:
        while True:
            messages = [rank.read() for rank in ranks]
            if None not in messages:
                yield _together(messages)
                return
            yield None
            for rank in ranks:
                rank.go_on()
    finally:
        for rank in ranks:
            rank.close()


def environments(ranks: int) -> list[dict[str, str]]:
    """Return environment variables as `torchrun` sets them, with one thread per process."""
    bytecode = "PYTHONDONTWRITEBYTECODE"  # If set, every process compiles the library again.
    common = {name: value for name, value in os.environ.items() if name != bytecode} | {
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", "COLUMNS": "120",
    }  # fmt: skip
    if ranks == 1:
        return [common]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "benchmark",
    }  # fmt: skip
    return [common | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _together(samples: list[Any]) -> Any:
    """Merge the samples of all ranks, with the sum of their CPU times."""
    first = samples[0]
    if any((sample["digest"], len(sample["cpu_s"])) != (first["digest"], len(first["cpu_s"])) for sample in samples):
        raise Failed("the ranks ended with different parameters")
    cpu_s = [sum(parts) for parts in zip(*(sample["cpu_s"] for sample in samples), strict=True)]
    return first | {"cpu_s": cpu_s}


@final
class Process:
    """Worker process, whose output is read from a pipe, or from a terminal for a progress bar."""

    def __init__(self, command: list[str], environment: dict[str, str], *, terminal: bool):
        self._output, output = pty.openpty() if terminal else os.pipe()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        os.close(output)
        self._text = ""

    def read(self) -> Any:
        """Return the next message: None before a turn, else the sample."""
        end_s = time.monotonic() + TIME_LIMIT_S
        while True:
            *_, text = self._text.rpartition(MARKER)
            if MARKER in self._text and "\n" in text:
                self._text = ""
                return json.loads(text.split("\n")[0])
            part = b""
            if select.select([self._output], [], [], max(0.0, end_s - time.monotonic()))[0]:
                with suppress(OSError):  # A terminal raises OSError after all its processes ended.
                    part = os.read(self._output, 1 << 16)
            if not part:
                lines = [line for line in self._text.splitlines() if line.strip()]
                raise Failed(lines[-1] if lines else "it printed nothing")
            self._text = (self._text + part.decode(errors="replace"))[-100_000:]

    def go_on(self) -> None:
        """Start the turn of this process."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends the workers of its loader
        self._process.wait()
        os.close(self._output)
        if self._process.stdin is not None:
            self._process.stdin.close()
