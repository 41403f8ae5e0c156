"""Detection of the process that blocks a run, from the Python stacks of all processes."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import final

import torch

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)
_LUMEN, _TORCH = str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep
_COLLECTIVES, _LOADER = _TORCH + f"distributed{os.sep}", _TORCH + os.path.join("utils", "data", "")
_WAIT_FILE = str(Path(__file__).parent / "processes.py")
_LOOP_FOLDERS = tuple(_LUMEN + folder + os.sep for folder in ("loop", "trainer"))
_AUTOGRAD = _TORCH + f"autograd{os.sep}"
_FORK_FILE = "popen_fork.py"  # in Python's multiprocessing
_LIBRARY_PATH_NAMES = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
_DEBUGGER_FILE = re.compile(r"[/\\](bdb|pdb|IPython[/\\].*|_?pydevd\w*([/\\].*)?|debugpy[/\\].*)\.py$")


@final
@dataclass(frozen=True)
class Frame:
    """Frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_in_lumen(self) -> bool:
        """True if the frame is in Lumen's code."""
        return self.file.startswith(_LUMEN)

    @property
    def is_wait(self) -> bool:
        """True if the frame waits for a collective that Lumen started earlier."""
        return self.file == _WAIT_FILE and self.function == "finish"

    @property
    def calls_wait(self) -> bool:
        """True if the frame is user code that waits for an operation started earlier, as `work.wait()` does."""
        return self.is_in_user_code and ".wait(" in linecache.getline(self.file, self.line)

    @property
    def is_in_user_code(self) -> bool:
        """True if the frame is user code: not code of Lumen or of an installed library."""
        installed = self.file.startswith(_list_library_folders()) or f"{os.sep}site-packages{os.sep}" in self.file
        return not (self.is_in_lumen or installed or self.file.startswith("<"))

    @property
    def is_internal(self) -> bool:
        """True for code of Lumen, of Python, and of torch except its data loaders and collectives."""
        if self.file.startswith((_LUMEN, _TORCH)):
            return not self.file.startswith((_LOADER, _COLLECTIVES))
        is_pythons = self.file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in self.file
        return is_pythons or self.file.startswith("<frozen ")


@cache
def _list_library_folders() -> tuple[str, ...]:
    """Return the folders of installed packages; cached, because the query makes Python import a module."""
    return tuple({sysconfig.get_path(name) + os.sep for name in _LIBRARY_PATH_NAMES})


def is_prompt(code: CodeType) -> bool:
    """Return True if a frame with this code is a debugger's that waits for a command."""
    return code.co_name == "interaction" and _DEBUGGER_FILE.search(code.co_filename) is not None


def parse_frames(stacks: str) -> list[Frame]:
    """Return the main thread's stack from faulthandler's output of all threads, innermost frame first."""
    last = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.M)[-1]  # the main thread comes last
    return [Frame(file, int(line), name) for file, line, name in _FRAME.findall(last)]


@final
@dataclass(frozen=True)
class DataWorker:
    """Data worker, or other process that a process of the run has forked."""

    pid: int
    state: str
    stacks: str

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of user code; None if there is no such frame, as in a worker that waits for work."""
        # Below this file, the stack of a forked worker is the stack of the process that has forked the worker.
        own = itertools.takewhile(lambda frame: Path(frame.file).name != _FORK_FILE, parse_frames(self.stacks))
        return next((frame for frame in own if frame.is_in_user_code), None)

    @property
    def is_forking(self) -> bool:
        """True if the worker is still inside the fork, before its own Python code."""
        frames = parse_frames(self.stacks)
        return bool(frames) and Path(frames[0].file).name == _FORK_FILE


@final
@dataclass(frozen=True)
class ProcessLocation:
    """State and stacks of a process of a run.

    Attributes:
        rank: Rank of the process in the run, from 0.
        pid: Id of the process on its host.
        state: State of the process: `runs`, `stopped`, `traced` by a debugger, `ended`, or `elsewhere, on HOST`.
        stacks: Stacks of all threads of the process, as faulthandler writes them; "": the process did not answer.
        is_busy: The process used the CPU for more than half of the time of the query.
        workers: Data workers of the process, if the process waits for them.
    """

    rank: int
    pid: int
    state: str
    stacks: str = ""
    is_busy: bool = False
    workers: list[DataWorker] = field(default_factory=list)

    @cached_property
    def frames(self) -> list[Frame]:
        """Frames of the main thread, innermost first."""
        return parse_frames(self.stacks)

    @cached_property
    def _library_frames(self) -> list[Frame]:
        """Library frames that the innermost frame of Lumen or of the user has called."""
        number = next((i for i, frame in enumerate(self.frames) if frame.is_in_lumen or frame.is_in_user_code), None)
        return self.frames[:number]

    @property
    def waits_for_data(self) -> bool:
        """True if the process waits for a data worker."""
        return any(frame.file.startswith(_LOADER) for frame in self._library_frames)

    @property
    def waits_for_collective(self) -> bool:
        """True if the process is in a collective, or in a backward that does not compute."""
        if self.frames and (self.frames[0].is_wait or self.frames[0].calls_wait):
            return True
        in_backward = (
            bool(self._library_frames) and self._library_frames[0].file.startswith(_AUTOGRAD) and not self.is_busy
        )
        return in_backward or any(frame.file.startswith(_COLLECTIVES) for frame in self._library_frames)

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of user code that the loop has called; None if the loop itself is running."""
        called_by_loop = itertools.takewhile(lambda frame: not frame.file.startswith(_LOOP_FOLDERS), self.frames)
        return next((frame for frame in called_by_loop if frame.is_in_user_code), None)

    @property
    def is_traced(self) -> bool:
        """True if a debugger or another tracing tool is attached to the process."""
        return self.state == "traced" or any(_DEBUGGER_FILE.search(frame.file) for frame in self.frames)

    def describe(self, *, all_threads: bool = True) -> str:
        """Describe the process with its stacks.

        Args:
            all_threads: True for the stacks of all threads as faulthandler writes them; False for the main thread's
                stack only, in the form of a traceback.
        """
        if self.state.startswith("elsewhere"):
            return f"rank {self.rank} runs {self.state}: see the output there"
        if self.state == "ended":
            return f"rank {self.rank} has ended"
        texts = [f"rank {self.rank} (pid {self.pid}) is here:\n{_format_stacks(self, all_threads=all_threads)}"]
        for worker in self.workers:
            stacks = _format_stacks(worker, all_threads=all_threads)
            texts.append(f"rank {self.rank}, process {worker.pid}, a data worker:\n{stacks}")
        return "\n".join(texts)

    def describe_activity(self, *, is_alone: bool) -> str:
        """Describe the activity of the process, in words that follow its name."""
        if self.state == "stopped":
            return f"is stopped (SIGSTOP; `kill -CONT {self.pid}` resumes the process)"
        if self.state == "ended":
            return "has ended"
        if not self.stacks:
            return f"does not answer (pid {self.pid})"
        if self.waits_for_data:
            return self._describe_data_wait()
        frame = next((frame for frame in self.frames if frame.is_in_user_code), None)
        if self.waits_for_collective and not is_alone:
            return f"waits for other processes at {self._outer_frame}"
        if frame is not None and frame.function != "<module>":
            return f"is in user code: {frame}"
        return f"is at {self._outer_frame}"

    def _describe_data_wait(self) -> str:
        for worker in self.workers:
            if worker.state == "stopped":
                return f"waits for its data worker {worker.pid}, which is stopped (SIGSTOP)"
        for worker in self.workers:
            if worker.is_forking:
                return (
                    f"waits for its data worker {worker.pid}, which hung when it was forked: a thread held a lock "
                    "during the fork, and the worker never gets that lock. Python 3.12 frees such locks; "
                    "persistent_workers=True forks once per run"
                )
            if worker.user_frame is not None:
                return f"waits for its data worker {worker.pid}, which is in user code: {worker.user_frame}"
        pids = ", ".join(str(worker.pid) for worker in self.workers)
        return f"waits for its data workers ({pids})" if pids else "waits for data"

    @property
    def _outer_frame(self) -> Frame | str:
        """The innermost frame of Lumen or of the user."""
        return next((frame for frame in self.frames if frame.is_in_lumen or frame.is_in_user_code), "an unknown place")


def _format_stacks(process: ProcessLocation | DataWorker, *, all_threads: bool) -> str:
    if not process.stacks:
        return "(the process is stopped)" if process.state == "stopped" else "(the process does not answer)"
    frames = [(frame.file, frame.line, frame.function, None) for frame in reversed(parse_frames(process.stacks))]
    return process.stacks if all_threads or not frames else "".join(traceback.format_list(frames)).rstrip()


def describe_stuck_ranks(places: Sequence[ProcessLocation]) -> str:
    """Describe the process that keeps the others waiting: the process that is not in a collective.

    If all processes are in collectives, describe their different places.

    Args:
        places: Places of all processes of the run, in rank order; each host describes only its own processes.
    """
    local = [place for place in places if not place.state.startswith("elsewhere")]
    is_alone = len(places) == 1
    stuck = [place for place in local if place.state in ("stopped", "ended") or not place.stacks]
    stuck = stuck or [place for place in local if is_alone or place.waits_for_data or not place.waits_for_collective]
    if stuck:
        text = "; ".join(f"rank {place.rank} {place.describe_activity(is_alone=is_alone)}" for place in stuck)
        waiting = [place.rank for place in local if place not in stuck]
        return text if not waiting else f"{text}. {_format_ranks(waiting)} {'wait' if len(waiting) > 1 else 'waits'}"
    frames = Counter(str(place._outer_frame) for place in local)
    if len(frames) > 1:
        rarest = min(frames.values())
        rare = [place for place in local if frames[str(place._outer_frame)] == rarest]
        return "the processes wait for one another at different places: " + "; ".join(
            f"rank {place.rank} at {place._outer_frame}" for place in (rare if rarest * 2 < len(local) else local)
        )
    text = f"all processes of this host wait at {next(iter(frames))}"
    return text if len(local) == len(places) else f"{text}; see the output of the other hosts"


def describe_unmatched_ranks(first: ProcessLocation, second: ProcessLocation) -> str:
    """Describe two processes that wait for one another in different collectives."""
    if second.user_frame is not None and first.user_frame is None:
        first, second = second, first
    other = f"is at {second.user_frame}" if second.user_frame is not None else "has continued without this collective"
    return (
        f"rank {first.rank} waits in a collective that rank {second.rank} does not reach: rank {first.rank} is at "
        f"{first.user_frame or first._outer_frame}; rank {second.rank} {other}"
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
