"""Signals that ask a job to stop: the signals that form one request, and the exit code of each signal."""

from __future__ import annotations

import signal
from typing import Any

from lumen.internals.proc import has_handler

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
_SHARED_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
_SAME_REQUEST_S = 5.0


def get_exit_code(number: int) -> int:
    """Return the exit code of a job that a signal stops: 130 for Ctrl-C, 75 for SIGUSR1, else 143 as for SIGTERM."""
    if number == signal.SIGUSR1:
        return REQUEUE_EXIT_CODE
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


STOP_EXIT_CODES = frozenset(map(get_exit_code, SIGNALS))


def is_same_request(first: int, number: int, passed_s: float) -> bool:
    """Return True if a signal repeats the request of an earlier signal.

    A service manager or scheduler may send SIGTERM to all processes of a job, and SIGHUP afterwards; launchers forward
    their signals. Ctrl-C always counts as a new request.

    Args:
        first: The number of the earlier signal.
        number: The number of the later signal.
        passed_s: The time between the signals, in seconds.
    """
    return signal.SIGINT not in (first, number) and passed_s < _SAME_REQUEST_S


def should_obey(number: int, handler: Any) -> bool:
    """Return True if a signal counts as a request to stop.

    SIGHUP and SIGUSR1 count only with their default handler, because user code may give them a different meaning.

    Args:
        number: The number of the signal.
        handler: The handler that `signal.getsignal` returns for the signal.
    """
    if number not in _SHARED_SIGNALS:
        return True
    # `faulthandler.register` installs a handler that Python does not report.
    return handler == signal.SIG_DFL and not has_handler(number)
