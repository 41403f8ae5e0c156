"""What a signal does to a run: it finishes its step, saves and leaves. The handlers before it are put back."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Any, final

from lumen.console import logger
from lumen.internals.stop_signals import SIGNALS, exit_code, is_obeyed, is_same_request
from lumen.run.run import Run
from lumen.trainer.grace import Grace
from lumen.trainer.logs import record
from lumen.trainer.telling import tell_stop


@contextmanager
def stop_signals(run: Run, grace: Grace, folders: Sequence[PurePath]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 lets the step finish and the run save.

    A second one waits for no more than a save. SIGHUP and SIGUSR1 are left alone where they are ignored, as under
    nohup, or have a handler of the user's.

    Args:
        run: The run that they ask to stop.
        grace: How long it has then.
        folders: Where its checkpoints lie.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, reason: str) -> None:
        tell_stop(run, number, run.trainer.run_directory, folders, reason)

    before: dict[int, Any] = {}
    request = _StopRequest(run, before)
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _StopRequest) or is_obeyed(number, handler):  # of the run around this one
            before[number] = signal.signal(number, request)
    try:
        with grace.listening(before.keys(), tell, lambda: request.has_left or run.saves.is_writing):
            yield
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)


@final
class _StopRequest:
    """The signal handler of a run.

    Args:
        run: The run that a signal asks to stop.
        before: The handlers before it, by signal; the second signal puts them back.

    Attributes:
        has_left: A second signal has made the main thread leave the run.
    """

    def __init__(self, run: Run, before: Mapping[int, Any]) -> None:
        self._run, self._before = run, before
        self._process, self._first_s = os.getpid(), -math.inf
        self._is_telling = self.has_left = False
        self._meanwhile: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Ask the run to stop; leave it if it was asked already."""
        vote = self._run.ending.vote
        if os.getpid() != self._process:  # a forked worker: the main process decides
            return
        if vote.requested is not None and is_same_request(vote.requested, number, time.monotonic() - self._first_s):
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
        self.has_left = True
        for known, handler in self._before.items():
            signal.signal(known, handler)
        record("stopped at once: %s", signal.Signals(number).name)
        if self._run.saves.is_writing:
            logger.warning("%s: leaving when the checkpoint under way is written", signal.Signals(number).name)
        raise interruption(number)


def interruption(number: int | None) -> BaseException:
    """How a process ends that was asked to: as Python does for Ctrl-C, else with the signal's exit code."""
    return KeyboardInterrupt() if number in (None, signal.SIGINT) else SystemExit(exit_code(int(number or 0)))
