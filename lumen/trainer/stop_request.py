"""Signals that stop a run: the first lets it finish its step and save. Afterwards the handlers are restored."""

from __future__ import annotations

import math
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, final

from lumen.console import in_notebook, logger, stderr, stdout
from lumen.internals.stop_signals import SIGNALS, get_exit_code, is_same_request, should_obey
from lumen.run.run import Run
from lumen.trainer.logs import log_status
from lumen.trainer.status_messages import log_stop

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer

_FINAL_OUTPUT_S = 2.0  # limit for the last messages, which a blocked terminal or store may delay
_EVALUATION_S = 30.0  # default limit of an evaluation, which saves nothing
_SECOND_S = 5.0  # limit after the second signal; a main thread that runs Python obeys within milliseconds
_OVER, _LATE = 0, -1


@final
class GracePeriod:
    """Thread that waits for a signal, and ends the process if the run does not end in time.

    The thread reads signals from the operating system's wakeup descriptor, because a main thread inside a collective
    calls no handler.

    Args:
        limit_s: Seconds from the first signal until the run must end. None: no limit, but 30 s for a run that saves
            nothing, unless the signal is Ctrl-C.
        saves: True if the run saves checkpoints.
    """

    def __init__(self, limit_s: float | None, *, saves: bool) -> None:
        self._limit_s, self._saves = limit_s, saves
        self._is_interactive = in_notebook or hasattr(sys, "ps1") or bool(sys.flags.interactive)
        self._received, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._numbers: Collection[int] = ()
        self._log_reason: Callable[[int, str], None] = lambda number, reason: None
        self._obeys: Callable[[], bool] = lambda: True
        self._thread = threading.Thread(target=self._watch_signals, name="lumen-grace", daemon=True)
        self._thread.start()

    @contextmanager
    def listen(
        self, numbers: Collection[int], log_reason: Callable[[int, str], None], obeys: Callable[[], bool]
    ) -> Iterator[None]:
        """Start the time limit at the first signal within the context. Call it in the main thread.

        Args:
            numbers: Signals that ask the run to stop; they have handlers.
            log_reason: Function that logs the status of the run; called with the signal and the reason before the
                process ends.
            obeys: Function that returns True if the main thread obeys a second signal, or a save is in progress.
        """
        self._numbers, self._log_reason, self._obeys = numbers, log_reason, obeys
        before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def close(self) -> None:
        """End the thread after the run."""
        os.write(self._write_end, bytes([_OVER]))
        self._thread.join()
        os.close(self._write_end)
        os.close(self._received)

    def _watch_signals(self) -> None:
        if (first := self._wait_for_signal(math.inf)) == _OVER:
            return
        began_s, second = time.monotonic(), None
        limit_s, text = self._get_limit(first)
        while True:
            left_s = limit_s - (time.monotonic() - began_s)
            number = self._wait_for_signal(left_s if second is None else min(left_s, _SECOND_S))
            passed_s = time.monotonic() - began_s
            if number == _OVER:
                return
            if number != _LATE:
                if not (self._is_interactive or is_same_request(first, number, passed_s)):
                    second = number
            elif passed_s >= limit_s:
                self._exit_process(first, f"not done within {text}")
            elif second is not None and not self._obeys():
                self._exit_process(second, "at once")

    def _get_limit(self, number: int) -> tuple[float, str]:
        """Return the time limit after a signal, in seconds and in words."""
        if self._limit_s is not None:
            return self._limit_s, f"grace_s={self._limit_s:g}"
        if self._saves or self._is_interactive or number == signal.SIGINT:  # the user can press Ctrl-C again
            return math.inf, ""
        return _EVALUATION_S, f"{_EVALUATION_S:g} s, which grace_s changes"

    def _wait_for_signal(self, limit_s: float) -> int:
        """Return the next signal that asks the run to stop, `_OVER` for an ended run, or `_LATE` after `limit_s`."""
        until_s = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(self._received, select.POLLIN)
        while (left_s := until_s - time.monotonic()) > 0:
            if poll.poll(None if left_s == math.inf else left_s * 1000):
                number = os.read(self._received, 1)[0]
                if number == _OVER or number in self._numbers:
                    return number
        return _LATE

    def _exit_process(self, number: int, reason: str) -> NoReturn:
        call_with_timeout(_FINAL_OUTPUT_S, lambda: self._announce(number, reason))
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(get_exit_code(number))

    def _announce(self, number: int, reason: str) -> None:
        self._log_reason(number, reason)
        stdout.flush()
        stderr.flush()


def call_with_timeout(limit_s: float, function: Callable[[], object]) -> None:
    """Call a function in a thread, and wait at most `limit_s` seconds, because a hung run may hold a lock."""
    thread = threading.Thread(target=function, daemon=True)
    with suppress(RuntimeError):  # The system allows no further thread.
        thread.start()
        thread.join(limit_s)


def _ignore_in_child() -> None:
    """Detach a forked child from the wakeup descriptor, so that its signals do not reach the parent."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_ignore_in_child)


@contextmanager
def handle_stop_signals(trainer: Trainer, run: Run, grace: GracePeriod) -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 within the context finish the step, save and end the run.

    A second signal ends the run at once, except that a save in progress is completed. Lumen does not handle SIGHUP and
    SIGUSR1 if they are ignored, as under nohup, or have a handler of the user.

    Args:
        trainer: The trainer of the run.
        run: The run to stop.
        grace: The thread that limits the time after the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def log_reason(number: int, reason: str) -> None:
        log_stop(trainer, run, number, reason)

    before: dict[int, Any] = {}
    request = _StopHandler(run, before)
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _StopHandler) or should_obey(number, handler):  # handler of an outer run
            before[number] = signal.signal(number, request)
    try:
        with grace.listen(before.keys(), log_reason, lambda: request.has_left or run.saves.is_writing):
            yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


@final
class _StopHandler:
    """Signal handler of a run.

    Args:
        run: The run that a signal asks to stop.
        before: The previous handlers, by signal; the second signal restores them.

    Attributes:
        has_left: True if a second signal has made the main thread exit the run.
    """

    def __init__(self, run: Run, before: Mapping[int, Any]) -> None:
        self._run, self._before = run, before
        self._process, self._first_s = os.getpid(), -math.inf
        self._is_announcing = self.has_left = False
        self._meanwhile: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ask the run to stop; exit the run if it was already asked."""
        vote = self._run.ending.vote
        if os.getpid() != self._process:
            # A forked child: the run decides about requests to stop, but a pool ends its children by SIGTERM. A worker
            # of a DataLoader is here only until `init_worker` has set its own handler.
            target = vars(multiprocessing.current_process()).get("_target")
            loads_data = target is not None and str(target.__module__).startswith("torch.utils.data")
            if number == signal.SIGTERM and not loads_data:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if vote.requested_signal is not None and is_same_request(
            vote.requested_signal, number, time.monotonic() - self._first_s
        ):
            return
        if self._is_announcing and self._meanwhile is None:  # an interrupted message would be written twice
            self._meanwhile = number
        elif vote.requested_signal is not None:  # even if a blocked terminal delays the answer
            self._leave_run(number)
        else:
            self._first_s = time.monotonic()  # before the request: a signal may come between these lines
            vote.request_stop(number)
            self._is_announcing = True
            logger.info("%s: finishing this step; a second signal stops at once", signal.Signals(number).name)
            self._is_announcing = False
            if self._meanwhile is not None:
                self._leave_run(self._meanwhile)

    def _leave_run(self, number: int) -> None:
        self.has_left = True
        for known, handler in self._before.items():
            signal.signal(known, handler)
        log_status("stopped at once: %s", signal.Signals(number).name)
        if self._run.saves.is_writing:
            logger.warning("%s: stopping once the checkpoint in progress is written", signal.Signals(number).name)
        raise make_interruption(number)


def make_interruption(number: int | None) -> BaseException:
    """Return the exception for a stop request: KeyboardInterrupt for Ctrl-C, else SystemExit with an exit code."""
    return KeyboardInterrupt() if number in (None, signal.SIGINT) else SystemExit(get_exit_code(int(number or 0)))
