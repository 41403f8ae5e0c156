"""Watch over a run: reports where a hung process is and terminates the job; lets debuggers work with several ranks."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch

from lumen.callbacks import ProgressBar
from lumen.checkpoint import CheckpointSaver
from lumen.console import in_notebook, logger as _log, stderr
from lumen.distributed.process_location import (
    ProcessLocation,
    describe_stuck_ranks,
    describe_unmatched_ranks,
    is_prompt,
)
from lumen.distributed.stack_dump import (
    SINGLE_SIGNAL,
    CollectivesBegun,
    find_unmatched_ranks,
    locate_each,
    open_stack_file,
    read_collectives_begun,
)
from lumen.distributed.worker import is_worker, report_error
from lumen.errors import HUNG, ProcessStuck
from lumen.internals.garbage import pause_automatic_collection
from lumen.internals.process_groups import RECORDERS, read_recorded_collectives
from lumen.loop.manual import run_manual_step
from lumen.loop.step import train_step
from lumen.run.run import Run
from lumen.trainer.logs import log_status
from lumen.trainer.stop_request import call_with_timeout

if TYPE_CHECKING:
    from pdb import Pdb


_SAVES = CheckpointSaver.finish_save.__code__.co_filename
_STEPS = {train_step.__code__, run_manual_step.__code__}
_COLLECTIVES = str(Path(torch.distributed.__file__).parent) + os.sep
_WATCHER_NAMES = {"ipykernel", "debugpy", "pydevd"}
_PERIOD_FACTOR = 5  # the limit is at least this factor times the longest time so far
_LONGEST_PERIOD_S, _POLLS_PER_LIMIT = 1.0, 40
_REPORT_TIMEOUT_S, _EXIT_TIMEOUT_S = 5.0, 5.0
_TAKES_LONG = (
    "If the work only takes long, set a longer timeout_s of the strategy (outside of steps, startup_timeout_s): "
    "strategy: {class_path: lumen.DDP, init_args: {timeout_s: 3600}}, or with lumen.FSDP or lumen.SingleDevice."
)
_CALL_EQUALLY_OFTEN = (
    "All ranks must call a collective equally often. A condition on batch_idx is true on one rank at a time, since "
    "batch_idx counts the batches of all ranks, and one rank may have a batch more. Log values with self.log, which "
    "needs no collective, or call collectives in hooks such as on_validation_epoch_end."
)
_MIN_HELD_S, _MAX_HELD_SHARE = 1.0, 0.1  # a process that a signal holds is late and uses no CPU time
_UNMATCHED_AFTER_S = 3.0  # shorter waits are not checked for unmatched collectives


_watches: list[_HangWatch] = []  # of the open runs: a run inside a hook of another run comes after it


@contextmanager
def watch_run(run: Run, directory: Path | None) -> Iterator[threading.Event]:
    """Watch a run within the context, and terminate the job if it hangs: if no step and no batch completes in time.

    The limit is `timeout_s` in a step and in waits for other processes. It is `startup_timeout_s` before the first
    step, between steps and in evaluations. The limit is 5 times the longest duration of the same kind so far, if that
    is more. At half of the limit Lumen logs a warning. In a debugger, a notebook or an interactive session Lumen only
    warns.

    Yields:
        An event that ends the watch, if set.
    """
    over = threading.Event()
    watch = _HangWatch(run, directory, over, threading.get_ident())
    thread = threading.Thread(target=watch.watch, name="lumen-watch", daemon=True)
    _watches.append(watch)
    thread.start()
    try:
        yield over
    finally:
        over.set()
        thread.join()
        _watches.remove(watch)


@final
class _HangWatch:
    """Thread that watches the thread of a run.

    Args:
        run: The run that is watched.
        directory: The run directory, to which the stacks are written; None if the run writes nothing.
        over: Event that is set when the run is over.
        thread: The id of the run's thread.
    """

    def __init__(self, run: Run, directory: Path | None, over: threading.Event, thread: int) -> None:
        self._run, self._directory, self._over, self._thread = run, directory, over, thread
        self._processes, self._stacks = run.processes, run.processes.stacks
        self._file, self._is_fit = open_stack_file(), run.stage == "fit"
        self._is_traced = sys.gettrace() is not None
        self._posted: dict[int, CollectivesBegun] = {}
        self._longest_s = {True: 0.0, False: 0.0}  # longest time without progress: True in a step, False elsewhere

    def watch(self) -> None:
        """Watch until the run is over."""
        processes, vote = self._processes, self._run.ending.vote
        polls, idle_s, is_in_step, patience, warned = vote.polls, 0.0, False, 1, False
        used_share = 0.0  # Fraction of the limit, which differs between a slow disk and a collective after it.
        period_s = min(_LONGEST_PERIOD_S, min(processes.timeout_s, processes.startup_timeout_s) / _POLLS_PER_LIMIT)
        while True:
            before_s, cpu_s = time.monotonic(), time.process_time()
            if self._over.wait(period_s):
                return
            passed_s, used_s = time.monotonic() - before_s, time.process_time() - cpu_s
            if passed_s > period_s + _MIN_HELD_S and used_s < _MAX_HELD_SHARE * passed_s and not self._is_prompting:
                self._run.step.counters.note_held(passed_s - period_s)
            if self._stacks is not None:
                self._stacks.answer_request()
                if (why := self._stacks.end_reason) is not None:
                    call_with_timeout(_REPORT_TIMEOUT_S, partial(self._record_end, why))
                    self._exit_process()
            if vote.polls != polls:
                if is_in_step or self._is_past_first_step:  # the time of the start does not predict later times
                    self._longest_s[is_in_step] = max(self._longest_s[is_in_step], idle_s)
                polls, idle_s, used_share, patience, warned = vote.polls, 0.0, 0.0, 1, False
                continue
            # limited, so that the time in which this process was suspended does not count
            passed_s = min(passed_s, 2 * period_s)
            if self._is_prompting or _watches[-1] is not self:  # A run inside a hook has a watch of its own.
                idle_s, used_share, warned = 0.0, 0.0, False
                continue
            is_in_step, limit_s = self._get_limit()
            limit_s *= patience
            idle_s += passed_s
            used_share += passed_s / limit_s
            if (pair := self._find_unmatched_ranks(idle_s)) is not None and (places := self._claim_termination(polls)):
                headline = describe_unmatched_ranks(*(places[rank] for rank in pair))
                self._end_job(places, headline, _CALL_EQUALLY_OFTEN, warns=not warned)
                warned = True
            if used_share > 1 and (places := self._claim_termination(polls)):
                headline = f"no step and no batch was done for {idle_s:.3g} s: {describe_stuck_ranks(places)}"
                self._end_job(places, headline, _TAKES_LONG)
                patience, idle_s, used_share, warned = 2 * patience, 0.0, 0.0, True
            elif used_share > 0.5 and not warned:
                warned = True
                place = self._locate_this_process()
                activity = place.describe_activity(is_alone=self._processes.world_size == 1)
                self._print_warning(
                    f"no step and no batch was done for {idle_s:.3g} s: rank {place.rank} {activity}. Lumen ends the "
                    f"job after {limit_s:.3g} s. If you expect this, set a longer timeout_s."
                )

    def _find_unmatched_ranks(self, idle_s: float) -> tuple[int, int] | None:
        """Return two ranks of this host that wait for each other in different collectives, seen twice, or None."""
        if self._stacks is None:
            return None
        waits = idle_s > _UNMATCHED_AFTER_S and self._is_in_collective()
        posted = self._stacks.exchange_collectives(read_collectives_begun(self._thread) if waits else None)
        before, self._posted = self._posted, posted
        pair = find_unmatched_ranks(posted)
        return pair if pair is not None and all(before.get(rank) == posted[rank] for rank in pair) else None

    def _iterate_frames(self) -> Iterator[FrameType]:
        """Yield the frames of the watched thread, the innermost first."""
        # In Python before 3.11.9 a collection inside this call can deadlock with a thread that starts or ends.
        with pause_automatic_collection():
            frame = sys._current_frames().get(self._thread)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _is_in_collective(self) -> bool:
        """Return True if the watched thread waits in a collective."""
        codes = ((frame.f_code, frame.f_lineno) for frame in self._iterate_frames())
        lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in codes]
        return ProcessLocation(self._processes.rank, os.getpid(), "runs", "\n".join(lines)).waits_for_collective

    @property
    def _is_prompting(self) -> bool:
        """True if a debugger waits for a command in the watched thread."""
        return any(is_prompt(frame.f_code) for frame in self._iterate_frames())

    def _get_limit(self) -> tuple[bool, float]:
        """Return whether the run is in a step, and its time limit in seconds."""
        processes, codes = self._processes, [frame.f_code for frame in self._iterate_frames()]
        in_step = any(code is step for code in codes for step in _STEPS)  # compiled code may have no hash
        files = [code.co_filename for code in codes]
        waits = any(file.startswith(_COLLECTIVES) for file in files) and _SAVES not in files  # a disk may be slow
        if not self._is_past_first_step:
            return in_step, processes.startup_timeout_s
        is_together = self._is_fit and (in_step or waits)
        floor_s = processes.timeout_s if is_together else max(processes.startup_timeout_s, processes.timeout_s)
        limit_s = max(floor_s, _PERIOD_FACTOR * self._longest_s[in_step])
        if is_together:
            processes.extend_timeout(limit_s)
        return in_step, limit_s

    @property
    def _is_past_first_step(self) -> bool:
        """True after the first step of a training, and in all other stages."""
        return bool(self._run.step.weighted_windows) or not self._is_fit

    def _print_warning(self, text: str) -> None:
        call_with_timeout(_REPORT_TIMEOUT_S, partial(_log.warning, "%s", text))

    def _claim_termination(self, polls: int) -> list[ProcessLocation]:
        """Return the places of all processes if this process is to end the job.

        The list is empty if a different process ends the job, or if the run has progressed meanwhile.
        """
        if self._stacks is not None and not self._stacks.claim_termination():
            return []
        places = self._stacks.locate_processes() if self._stacks is not None else [self._locate_this_process()]
        if self._run.ending.vote.polls == polls:
            return places
        self._release_claim()
        return []

    def _release_claim(self) -> None:
        if self._stacks is not None:
            self._stacks.release_claim()

    def _end_job(self, places: Sequence[ProcessLocation], headline: str, advice: str, *, warns: bool = True) -> None:
        """Write the stacks of all processes to a file and the log, and end the job; failures to write are ignored.

        In a notebook, a debugger or an interactive session only warn.
        """
        is_interactive = in_notebook or hasattr(sys, "ps1") or bool(sys.flags.interactive) or self._is_traced
        if is_interactive or not _WATCHER_NAMES.isdisjoint(sys.modules) or any(place.is_traced for place in places):
            self._release_claim()
            if warns:
                self._print_warning(f"{headline}. Lumen does not end an interactive or debugged run.")
            return
        try:
            self._report(places, headline, advice)
        finally:
            self._exit_process(_EXIT_TIMEOUT_S)

    def _report(self, places: Sequence[ProcessLocation], headline: str, advice: str) -> None:
        """Report the end of the job to files, the launcher or the terminal, and the other processes."""
        text, written = "\n".join([headline + ".", *(place.describe() for place in places)]), list[Path]()
        shown = "\n".join(place.describe(all_threads=False) for place in places)
        call_with_timeout(_REPORT_TIMEOUT_S, lambda: self._write_log_file("stacks.txt", f"{text}\n".encode(), written))
        where = f"The stacks of all threads are in {written[0]}. " if written else ""
        report = f"{shown}\n{where}{advice}\nerror: {headline}."
        call_with_timeout(_REPORT_TIMEOUT_S, partial(self._record_end, headline))
        is_reported = False
        with suppress(OSError):  # such as a full disk
            is_reported = report_error(ProcessStuck(headline), report)
        if not is_reported:
            call_with_timeout(_REPORT_TIMEOUT_S, partial(print, report, file=stderr, flush=True))
        if self._stacks is not None:
            self._stacks.announce_end(headline)

    def _exit_process(self, wait_s: float = 0.0) -> NoReturn:
        """End this process in any state, after waiting for the other processes of its host."""
        for child in active_children():  # data workers would continue
            with suppress(OSError, ValueError):
                child.kill()
        if self._stacks is not None and wait_s:
            self._stacks.end_other_processes(wait_s)
        if self._stacks is not None:
            faulthandler.dump_traceback_later(
                _EXIT_TIMEOUT_S, exit=True, file=self._file
            )  # a device may block this process
            with suppress(Exception):  # Save the last collectives of this process with the stacks.
                for recorder in RECORDERS:
                    if b'"entries"' in (recorded := read_recorded_collectives(recorder)):
                        self._write_log_file(f"collectives-{recorder}-rank{self._processes.rank}.json", recorded, [])
        os._exit(HUNG)

    def _record_end(self, headline: str) -> None:
        """Log the failure, and let the progress bar show the last step and leave the terminal."""
        step, error = self._run.progress.step, ProcessStuck(headline)
        log_status("failed: ProcessStuck: %s (after step %d)", headline, step, error=error)
        for callback, on_exception in self._run.hooks.list_callback_hooks("on_exception"):
            if isinstance(callback, ProgressBar):
                on_exception(error)

    def _write_log_file(self, name: str, content: bytes, written: list[Path]) -> None:
        """Write a file into the folder of logs, with host and step in its name, and append its path to `written`."""
        if self._directory is not None:
            file = Path(self._directory, "logs", name)
            file = file.with_stem(f"{file.stem}-{socket.gethostname()}-step{self._run.progress.step}")
            with suppress(OSError):
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
                written.append(file)

    def _locate_this_process(self) -> ProcessLocation:
        return locate_each({self._processes.rank: (os.getpid(), self._file)}, SINGLE_SIGNAL)[self._processes.rank]


@contextmanager
def handle_debuggers(run: Run) -> Iterator[None]:
    """Let `breakpoint()` and `pdb.set_trace()` prompt in one process only within the context, and time their prompts.

    Lumen's launcher shows the output of rank 0 only. Other workers would silently take its input, so they continue
    instead. Without a terminal, or with another debugger in PYTHONBREAKPOINT, nothing changes.
    """
    from pdb import Pdb

    processes = run.processes
    interact, has_warned = Pdb.interaction, processes.world_size == 1
    has_terminal = processes.is_global_zero or not is_worker()

    def interaction(debugger: Pdb, *args: Any) -> Any:
        nonlocal has_warned
        continues = not has_terminal and sys.stdin is not None and sys.stdin.isatty()
        if continues and not has_warned:
            _log.warning(
                "rank %d continues at its breakpoint without a prompt: only rank 0 has the terminal", processes.rank
            )
        elif not has_warned:
            _log.warning(
                "rank %d is in a debugger: the other ranks wait at most timeout_s of the strategy (%g s)",
                processes.rank, processes.timeout_s,
            )  # fmt: skip
        has_warned, began_s = True, time.perf_counter()
        try:
            return debugger.set_continue() if continues else interact(debugger, *args)
        finally:
            run.step.counters.note_held(time.perf_counter() - began_s)

    Pdb.interaction = interaction  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Pdb.interaction = interact  # type: ignore[method-assign]
