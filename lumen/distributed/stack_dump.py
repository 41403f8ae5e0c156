"""Python stacks of all processes of a host, and detection of ranks in different collectives, for a hung run."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, final

from lumen.distributed.process_location import DataWorker, ProcessLocation
from lumen.internals.proc import has_handler, read_stat
from lumen.internals.process_groups import get_group_members, read_recorded_collectives

GROUP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # an unused signal, which faulthandler answers in C
SINGLE_SIGNAL = GROUP_SIGNAL - 1  # for a run of one process, possibly inside a process of a group
#: The watch of a run polls at least each second.
_REQUEST_TIMEOUT_S, _ANSWER_TIMEOUT_S, _POLL_INTERVAL_S, _SETTLED_POLLS = 2.5, 7.5, 0.1, 10
_LAST_LINE = re.compile(rb"(in <module>|in _run_module_as_main|^ *\.\.\.)\n\Z", re.M)  # end of the main thread's stack
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@final
class StackDumper:
    """Access to the Python stacks of all processes of a host, regardless of the processes' activity.

    Collective: every rank must create one.

    Args:
        rank: Rank of this process in the run, from 0.
        gather: Function that returns every rank's value of plain data, in rank order. Collective.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        host_pids = gather((socket.gethostname(), os.getpid()))
        first = next(number for number, (host, _) in enumerate(host_pids) if host == host_pids[rank][0])
        # The agent removes its folder of error reports even if its workers are killed.
        parent = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) or None
        folders = gather(tempfile.mkdtemp(prefix="lumen-stacks-", dir=parent) if rank == first else None)
        self._rank, self._host_pids = rank, host_pids
        self._folder = Path(folders[first])
        self._file = (self._folder / str(rank)).open("w+")
        self._claim_file = (self._folder / "ending").open("a+")
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # until this process ends: another process may get the same pid later
        faulthandler.register(GROUP_SIGNAL, self._file, all_threads=False)
        gather(None)  # the signal would kill a process without a handler

    def get_host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return str(self._host_pids[rank][0])

    def locate_processes(self) -> list[ProcessLocation]:
        """Return the places of all ranks in rank order: with stacks for this host, and without for other hosts."""
        own_host = self._host_pids[self._rank][0]
        files = {rank: self._open_file(rank) for rank, (host, _) in enumerate(self._host_pids) if host == own_host}
        with ExitStack() as closing:
            for file in files.values():
                if file not in (None, self._file):
                    closing.enter_context(file)
            alive = {r: (self._host_pids[r][1], file.fileno()) for r, file in files.items() if file is not None}
            locations = locate_each(alive, GROUP_SIGNAL, self._folder)
        return [
            locations.get(rank) or ProcessLocation(rank, pid, "ended" if host == own_host else f"elsewhere, on {host}")
            for rank, (host, pid) in enumerate(self._host_pids)
        ]

    def answer_request(self) -> None:
        """Write the stacks of this process if another process of its host has requested them."""
        if _withdraw_request(self._folder, self._rank):
            faulthandler.dump_traceback(self._file)

    def collect_stacks(self) -> str:
        """Return the stacks of the other processes on this host, and the ranks that ended or run on other hosts."""
        return "\n".join(place.describe() for place in self.locate_processes() if place.rank != self._rank)

    def exchange_collectives(self, collectives: CollectivesBegun | None) -> dict[int, CollectivesBegun]:
        """Write the collectives that this process has started, and read collectives of other processes on this host.

        Args:
            collectives: The collectives of this process; None: its main thread does not wait in a collective.

        Returns:
            The collectives of each rank on this host whose main thread waits in one; empty if `collectives` is None.
        """
        path = self._folder / f"begun-{self._rank}"
        if collectives is None:
            path.unlink(missing_ok=True)
            return {}
        draft, found = path.with_suffix(".tmp"), dict[int, CollectivesBegun]()
        with suppress(OSError):  # The disk is full, or the folder was removed: a rank without a file is not compared.
            draft.write_text(json.dumps(collectives))
            draft.rename(path)
        for each in self._folder.glob("begun-*[0-9]"):
            with suppress(OSError):  # the process has continued and removed its file
                found[int(each.name.removeprefix("begun-"))] = CollectivesBegun(*json.loads(each.read_text()))
        return found

    def claim_termination(self) -> bool:
        """Return True if this process becomes the one on its host that ends the job."""
        try:
            fcntl.lockf(self._claim_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release_claim(self) -> None:
        """Release the claim of `claim_termination`, so that another process may end the job."""
        fcntl.lockf(self._claim_file, fcntl.LOCK_UN)

    def announce_end(self, reason: str) -> None:
        """Announce to the other processes of this host that the job ends, with the reason."""
        (self._folder / "why").write_text(reason)
        (self._folder / "why").rename(self._folder / "over")

    @property
    def end_reason(self) -> str | None:
        """The reason why the job ends, if another process of this host has announced it; otherwise None."""
        try:
            return (self._folder / "over").read_text()
        except OSError:
            return None

    def end_other_processes(self, within_s: float) -> None:
        """Wait for the other processes of this host to end; kill stopped and late processes with their children."""
        deadline_s = time.monotonic() + within_s
        local_ranks = [rank for rank, (host, _) in enumerate(self._host_pids) if host == self._host_pids[self._rank][0]]
        remaining = [rank for rank in local_ranks if rank != self._rank]
        while remaining:
            is_late = time.monotonic() > deadline_s
            for pid in [self._host_pids[rank][1] for rank in remaining]:
                for each in (*list_children(pid), pid) if is_late or get_process_state(pid) == "stopped" else ():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(each, signal.SIGKILL)
            time.sleep(_POLL_INTERVAL_S)
            remaining = [] if is_late else [rank for rank in remaining if self._is_alive(rank)]

    def _is_alive(self, rank: int) -> bool:
        file = self._open_file(rank)
        if file is not None:
            file.close()
        return file is not None

    def _open_file(self, rank: int) -> Any:
        """Return the file of a process if the process is alive.

        The file of this process is not opened again: closing a second file object would release its lock.
        """
        if rank == self._rank:
            return self._file
        try:
            file = (self._folder / str(rank)).open("r+")
        except OSError:
            return None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return file
        file.close()
        return None

    def close(self) -> None:
        """Remove the signal handler and the files."""
        faulthandler.unregister(GROUP_SIGNAL)
        self._claim_file.close()
        with suppress(OSError):
            for kind in ("begun", "wanted"):
                (self._folder / f"{kind}-{self._rank}").unlink(missing_ok=True)
            (self._folder / str(self._rank)).unlink()
            (self._folder / "ending").unlink(missing_ok=True)
            self._folder.rmdir()  # fails except for the last process
        self._file.close()


def locate_each(
    processes: dict[int, tuple[int, int]], number: int, folder: Path | None = None
) -> dict[int, ProcessLocation]:
    """Query places of processes on this host, and the data workers of processes that wait for data.

    Args:
        processes: The pid and a descriptor of the file for stacks, by rank.
        number: The signal that faulthandler answers with a stack, in processes and in their forked children.
        folder: The folder for requests to other processes; None: `processes` is only this process.

    Returns:
        The place of each rank's process.
    """
    before = {rank: _get_cpu_time_s(pid) for rank, (pid, _) in processes.items()}
    began_s = time.monotonic()
    texts = _request_stacks(processes, number, folder)
    places = {}
    for rank, (pid, _) in processes.items():
        spent = (_get_cpu_time_s(pid) - before[rank]) / max(time.monotonic() - began_s, _POLL_INTERVAL_S)
        places[rank] = ProcessLocation(rank, pid, get_process_state(pid), texts[rank], is_busy=spent > 0.5)
    waiting = {
        # Only forked children. Other children, such as a logger's service or another run, have no handler, so that the
        # signal would end them, or write to their own file.
        rank: [
            pid
            for pid in list_children(place.pid)
            if has_handler(number, pid) and _has_file_open(pid, processes[rank][1])
        ]
        for rank, place in places.items()
        if place.waits_for_data
    }
    for turn in range(max(map(len, waiting.values()), default=0)):
        workers = {rank: (pids[turn], processes[rank][1]) for rank, pids in waiting.items() if turn < len(pids)}
        texts = _request_stacks(workers, number)
        for rank, (pid, _) in workers.items():
            places[rank].workers.append(DataWorker(pid, get_process_state(pid), texts[rank]))
    return places


def open_stack_file() -> int:
    """Return the descriptor of the file to which this process and its forks write stacks at `SINGLE_SIGNAL`."""
    file = _create_stack_file()
    if not has_handler(SINGLE_SIGNAL):
        # Other code may have reset all signals, as Lightning's trainer does. A registration that faulthandler still
        # knows would change nothing. The handler is permanent: a run may be inside another run's hook.
        faulthandler.unregister(SINGLE_SIGNAL)
        faulthandler.register(SINGLE_SIGNAL, file, all_threads=False)
    return file


@cache
def _create_stack_file() -> int:
    file, path = tempfile.mkstemp(prefix="lumen-stacks-")
    os.unlink(path)
    return file


def _request_stacks(processes: dict[int, tuple[int, int]], number: int, folder: Path | None = None) -> dict[int, str]:
    """Return the stacks that processes write on request; stopped processes are skipped.

    The stacks of all threads can only be read while no thread changes them, which is while the reader holds Python's
    lock: faulthandler crashes otherwise. So this process writes its own stacks, and the watch of each other rank writes
    that rank's. A process that does not answer, and a data worker, gets the signal, and its main thread writes the
    stack of this thread alone.
    """
    starts = {
        rank: os.fstat(file).st_size for rank, (pid, file) in processes.items() if get_process_state(pid) != "stopped"
    }
    began_s, to_signal = time.monotonic(), set[int]()
    for rank in starts:
        pid, file = processes[rank]
        if pid == os.getpid():
            faulthandler.dump_traceback(file)
        elif folder is not None and _write_request(folder, rank):
            to_signal.add(rank)
        else:
            _signal(pid, number)
    texts, unchanged_polls = dict.fromkeys(processes, b""), dict.fromkeys(starts, 0)
    remaining, deadline_s = set(starts), began_s + _ANSWER_TIMEOUT_S
    while remaining and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
        for rank in [*remaining]:
            (pid, file), before = processes[rank], texts[rank]
            texts[rank] = os.pread(file, os.fstat(file).st_size - starts[rank], starts[rank])
            unchanged_polls[rank] = unchanged_polls[rank] + 1 if texts[rank] == before != b"" else 0
            if unchanged_polls[rank] == _SETTLED_POLLS or (unchanged_polls[rank] and _LAST_LINE.search(texts[rank])):
                remaining.remove(rank)
            elif folder is not None and rank in to_signal and time.monotonic() > began_s + _REQUEST_TIMEOUT_S:
                to_signal.remove(rank)
                if _withdraw_request(folder, rank):
                    _signal(pid, number)
    return {rank: text.decode(errors="replace").strip() for rank, text in texts.items()}


def _write_request(folder: Path, rank: int) -> bool:
    """Request a rank's stacks from its watch; return False if the file cannot be written."""
    try:
        (folder / f"wanted-{rank}").touch()
    except OSError:
        return False
    return True


def _withdraw_request(folder: Path, rank: int) -> bool:
    """Remove the request for a rank's stacks; return False if another process has removed it, or nobody has made it."""
    try:
        (folder / f"wanted-{rank}").unlink()
    except OSError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def get_process_state(pid: int) -> str:
    """Return `runs`, `stopped`, `traced` by a debugger, or `ended`; without /proc always `runs`."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return "ended" if Path("/proc/self/status").exists() else "runs"
    except OSError:
        return "runs"
    if re.search(r"^TracerPid:\s*[1-9]", status, re.M):
        return "traced"
    found = re.search(r"^State:\s*(\w)", status, re.M)
    return {"T": "stopped", "Z": "ended", "X": "ended"}.get(found[1] if found else "", "runs")


def list_children(pid: int) -> list[int]:
    """Return the pids of living children of a process on this host; empty without /proc."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)


def _get_cpu_time_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = read_stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _has_file_open(pid: int, file: int) -> bool:
    """Return True if a process has opened the file of this process's descriptor."""
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(file)):
                return True
    return False


class CollectivesBegun(NamedTuple):
    """Collectives of a process whose main thread waits in a collective.

    Attributes:
        newest: Number of the newest collective that the process has started, by name of the process group.
        unfinished: Name of the process group, number, and ranks of each unfinished collective of the main thread.
    """

    newest: dict[str, int]
    unfinished: list[list[Any]]


def read_collectives_begun(thread: int) -> CollectivesBegun:
    """Read the collectives of this process from torch's flight recorder; empty if this torch does not record them.

    Args:
        thread: Identifier of the main thread.
    """
    newest, unfinished, members = dict[str, int](), list[list[Any]](), get_group_members()
    for entry in json.loads(read_recorded_collectives("torch")).get("entries", []):
        group, number = str((entry.get("process_group") or [""])[0]), int(entry.get("collective_seq_id", 0))
        if not entry.get("is_p2p"):
            newest[group] = max(number, newest.get(group, 0))
            if entry.get("retired") is False and entry.get("thread_id") == str(thread):
                unfinished.append([group, number, members.get(group, [])])
    return CollectivesBegun(newest, unfinished)


def find_unmatched_ranks(processes: Mapping[int, CollectivesBegun]) -> tuple[int, int] | None:
    """Return two ranks that wait for one another in different collectives; None if no such pair is certain.

    Args:
        processes: Collectives of each process whose main thread waits in a collective, by rank.
    """
    for rank, other in combinations(sorted(processes), 2):
        if _is_awaited_in_all(processes, rank, other) and _is_awaited_in_all(processes, other, rank):
            return rank, other
    return None


def _is_awaited_in_all(processes: Mapping[int, CollectivesBegun], rank: int, other: int) -> bool:
    """Return True if `rank` waits only for collectives that `other` must join and has not started."""
    unfinished, newest = processes[rank].unfinished, processes[other].newest
    return bool(unfinished) and all(
        other in members and newest.get(group, 0) < number for group, number, members in unfinished
    )
