"""Worker's side of a launch: the worker reports its error, and ends when its launcher ends."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from lumen.internals.proc import read_stat

LAUNCHER = "LUMEN_LAUNCHER"  # variable with the launcher's process id
_PR_SET_PDEATHSIG = 1
_progress: list[Callable[[], int]] = []  # function that returns the completed steps of this process


def is_worker() -> bool:
    """Return True if Lumen's launcher started this process directly; False for children of a worker."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def attach_to_launcher() -> None:
    """Report an uncaught exception to the launcher instead of printing it, and end when the launcher ends."""
    if not is_worker():
        _end_if_orphaned()
        return
    faulthandler.enable()
    sys.excepthook = _report_uncaught
    end_with_parent()
    if not is_worker():  # the launcher ended before `end_with_parent`
        os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_if_orphaned() -> None:
    """Exit if the launcher was killed before `end_with_parent`; keep processes that a running worker has started."""
    if not _is_alive(int(os.environ[LAUNCHER])):
        sys.exit(
            f"error: the launcher of this job (process {os.environ[LAUNCHER]}) has ended, so this process ends too. A "
            f"program that should outlive the job must not inherit {LAUNCHER}, RANK and WORLD_SIZE."
        )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return read_stat(process)[:1] != ["Z"]  # a zombie has ended


def report_error(error: BaseException, text: str) -> bool:
    """Report to the launcher why this process ends; the launcher prints the first error of all processes.

    Args:
        error: The exception that ends this process.
        text: The traceback or message that would be printed for it.

    Returns:
        True if there is a launcher; if False, the caller must print the text.
    """
    if not is_worker():
        return False
    record = {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}},
        "kind": type(error).__name__,
        "text": text,
        "step": _progress[-1]() if _progress else None,
        "time_s": time.time(),
    }
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
        json.dump(record, file)
    return True


def report_steps_with(count_steps: Callable[[], int]) -> None:
    """Include the number of completed steps in later reports."""
    _progress[:] = [count_steps]


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, KeyboardInterrupt):
        report_error(error, "".join(traceback.format_exception(kind, error, trace)))
