"""The signals that ask a job to stop: which of them are one request, and the exit code that each leaves."""

from __future__ import annotations

import signal
from typing import Any

from lumen.internals.proc import has_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: to be tried again later
_OTHERS_TOO = (signal.SIGHUP, signal.SIGUSR1)
_SAME_REQUEST_S = 5.0


def exit_code(number: int) -> int:
    """The exit code of a job that a signal has stopped: 130 for Ctrl-C, 75 for SIGUSR1, else that of SIGTERM, 143."""
    if number == signal.SIGUSR1:
        return REQUEUE
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


LEFT = frozenset(map(exit_code, SIGNALS))


def is_same_request(first: int, number: int, passed_s: float) -> bool:
    """Whether a signal says again what another one has said.

    Who stops a service or a job may send SIGTERM to all of its processes, and SIGHUP after it; launchers pass on
    theirs. Ctrl-C is pressed by somebody who means it.

    Args:
        first: Number of the signal that has asked.
        number: Number of the signal that has come now.
        passed_s: The time between them, in seconds.
    """
    return signal.SIGINT not in (first, number) and passed_s < _SAME_REQUEST_S


def is_obeyed(number: int, handler: Any) -> bool:
    """Whether a signal may be taken as a request to stop. SIGHUP and SIGUSR1 are not where they mean something else.

    Args:
        number: The signal that is sent.
        handler: What `signal.getsignal` says of it.
    """
    if number not in _OTHERS_TOO:
        return True
    return handler == signal.SIG_DFL and not has_handler(number)  # `faulthandler.register` makes one below Python
