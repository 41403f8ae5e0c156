"""The time that a run has once it was asked to stop: one that needs longer is left where it stands."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import final

from lumen.console import stderr, stdout
from lumen.internals.stop_signals import exit_code

_LAST_WORDS_S = 2.0  # a terminal or a store that stands still keeps nobody
_OVER = b"\0"


@contextmanager
def limited(grace_s: float | None) -> Iterator[Grace | None]:
    """The context of a run whose process ends `grace_s` after the first signal if the run does not; None: no limit."""
    if grace_s is None:
        yield None
        return
    grace = Grace(grace_s)
    try:
        yield grace
    finally:
        grace.end()


@final
class Grace:
    """A thread that waits for a signal, and then for the end of the run.

    It hears of signals from the system: a main thread that stands in a collective calls no handler.

    Args:
        limit_s: How long the run may take from the signal on, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._over = threading.Event()
        self._heard, self._hears = os.pipe()
        os.set_blocking(self._hears, False)
        self._numbers: Collection[int] = ()
        self._tell: Callable[[int], None] = lambda number: None
        self._thread = threading.Thread(target=self._wait, name="lumen-grace", daemon=True)
        self._thread.start()

    @contextmanager
    def listening(self, numbers: Collection[int], tell: Callable[[int], None]) -> Iterator[None]:
        """The context, in the main thread, in which the first signal lets the time begin.

        Args:
            numbers: Signals that ask the run to stop; they have handlers.
            tell: Called with the signal when the time is up, to say how the run stands.
        """
        self._numbers, self._tell = numbers, tell
        before = signal.set_wakeup_fd(self._hears, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)

    def end(self) -> None:
        """The run is over."""
        self._over.set()
        os.write(self._hears, _OVER)
        self._thread.join()
        os.close(self._hears)
        os.close(self._heard)

    def _wait(self) -> None:
        number = -1
        while number not in self._numbers:
            number = os.read(self._heard, 1)[0]
            if self._over.is_set():
                return
        if self._over.wait(self.limit_s):
            return
        telling = threading.Thread(target=self._say, args=(number,), daemon=True)
        telling.start()
        telling.join(_LAST_WORDS_S)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(exit_code(number))

    def _say(self, number: int) -> None:
        self._tell(number)
        stdout.flush()
        stderr.flush()


def _hear_no_more() -> None:
    """A forked child tells its parent nothing of the signals it gets."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_hear_no_more)
