"""Starts the processes of variants, waits for them, and hears what they tell."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import final

from lumen.internals.interpreters import SearchPath, safe_path
from lumen.proof.outcome import Outcome
from lumen.proof.variants import Size, Variant
from lumen.proof.worker import Maker, work

MORE = "LUMEN_PRELOAD"
"""Environment variable: a file with what is imported beforehand; a command line has no room for thousands of names."""

_LOOK_EVERY_S, _PATIENCE_S = 0.02, 5.0


@final
@dataclass
class Result:
    """What became of a variant.

    Attributes:
        variant: The one that was run.
        folder: Where it has written its run.
        outcomes: Of each rank that came to its end, in rank order.
        failure: What the first rank failed by: kind, message, place, text; None: nothing.
        seconds: From its start to its end.
        killed: It was killed, by itself as it was asked to.
    """

    variant: Variant
    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    failure: dict[str, str] | None = None
    seconds: float = 0.0
    killed: bool = False

    @property
    def outcome(self) -> Outcome:
        """That of rank 0, with what the other ranks computed of their micro-batches."""
        return self.outcomes[0]


@final
class Pool:
    """Runs variants, as many at a time as this machine has cores for.

    Args:
        make: Builds task, data and trainer.
        size: How much each variant does.
        folder: A directory for all of them.
        slots: Processes at a time.
        preload: Modules that each process imports, of libraries alone: imported once, for all of them.
    """

    def __init__(self, make: Maker, size: Size, folder: Path, slots: int, preload: Sequence[str]) -> None:
        self._make, self._size, self._folder, self._slots = make, size, folder, max(slots, 2)
        self._free, self._changed = self._slots, threading.Condition()
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["lumen.proof.preload"])
        self._spawns = multiprocessing.get_context("spawn")
        more = folder / "preload.txt"
        more.write_text("\n".join(preload), encoding="utf-8")
        os.environ[MORE] = str(more)
        with safe_path():
            ensure_running()
        del os.environ[MORE]
        self._starting = threading.Lock()
        self._alive: list[BaseProcess] = []

    def run(self, variant: Variant, precision: str | None, *, again: bool = False) -> Result:
        """Run a variant; a thread may do so while others run others.

        Args:
            variant: The one that was run.
            precision: Of variants that are not exact.
            again: It goes on in the folder of the run that was killed.
        """
        folder = self._folder / variant.name
        folder.mkdir(exist_ok=again)
        for old in (*folder.glob("rank-*.json"), *folder.glob("store*")):
            old.unlink()
        with self._places(variant.world):
            began_s = time.monotonic()
            processes = self._start(variant, precision, folder)
            failure = self._wait(processes, folder)
            result = Result(variant, folder, failure=failure, seconds=time.monotonic() - began_s)
        codes = [process.exitcode for process in processes]
        result.killed = variant.kill is not None and codes == [-signal.SIGKILL]
        answers = [_read(folder, rank) for rank in range(variant.world)]
        result.outcomes = [Outcome.from_json(answer["outcome"]) for answer in answers if answer]
        failures = [answer["failure"] for answer in answers if answer and answer["failure"]]
        lost = [each for each in failures if each["kind"] in ("ProcessLost", "ProcessStuck", "RuntimeError")]
        first = [each for each in failures if each not in lost] or lost
        if failure is None and first:
            result.failure = first[0]
        elif failure is None and not result.killed and not all(answers):
            code = next(code for code, answer in zip(codes, answers, strict=True) if not answer)
            said = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("rank-*.log")))
            result.failure = _failed("Ended", f"a process ended with exit code {code}.", said)
        return result

    def close(self) -> None:
        """End what still runs."""
        for process in self._alive:
            if process.is_alive():
                process.kill()
                process.join()

    @contextmanager
    def _places(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()

    def _start(self, variant: Variant, precision: str | None, folder: Path) -> list[BaseProcess]:
        path = SearchPath()
        with self._starting, safe_path():  # the standard library's server is asked by one thread at a time
            processes: list[BaseProcess] = []
            for rank in range(variant.world):
                arguments = (path, self._make, variant, self._size, precision, str(folder), rank)
                context = self._spawns if variant.fresh else self._forks
                processes.append(context.Process(target=work, args=arguments, daemon=False))  # it may have workers
                processes[-1].start()
            self._alive += processes
        return processes

    def _wait(self, processes: Sequence[BaseProcess], folder: Path) -> dict[str, str] | None:
        """Wait until all have ended. Returns where they stood, if they never did."""
        deadline_s = time.monotonic() + self._size.limit_s
        is_short = False
        while any(process.is_alive() for process in processes):
            if not is_short and any(self._has_failed(process, folder, rank) for rank, process in enumerate(processes)):
                deadline_s, is_short = min(deadline_s, time.monotonic() + _PATIENCE_S), True
            if time.monotonic() > deadline_s:
                return self._end(processes, folder, hung=not is_short)
            time.sleep(_LOOK_EVERY_S)
        return None

    def _has_failed(self, process: BaseProcess, folder: Path, rank: int) -> bool:
        """Whether a process has left the others alone, which may wait for it; one that is done has not."""
        if process.is_alive():
            return False
        answer = _read(folder, rank)
        return answer is None or bool(answer["failure"])

    def _end(self, processes: Sequence[BaseProcess], folder: Path, *, hung: bool) -> dict[str, str] | None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        for process in processes:
            process.kill()
            process.join()
        if not hung:
            return None
        stacks = [f"rank {rank}:\n{(folder / f'rank-{rank}.stacks').read_text()}" for rank in range(len(processes))]
        said = f"not done after {self._size.limit_s:.0f} s: a process hangs, or one rank alone does what needs all."
        return _failed("Hangs", said, "\n".join(stacks))


def _failed(kind: str, message: str, text: str) -> dict[str, str]:
    return {"kind": kind, "message": message, "place": "", "text": text, "ours": "False"}


def _read(folder: Path, rank: int) -> dict[str, dict[str, str]] | None:
    try:
        answer: dict[str, dict[str, str]] = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return answer


def libraries() -> list[str]:
    """Names of the modules imported here that are installed, or of Lumen: not the user's own, which may draw."""
    found = ((name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items()))
    return [name for name, file in found if "site-packages" in file or name.partition(".")[0] == "lumen"]
