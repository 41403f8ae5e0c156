"""What a process does for the launcher that started it: says why it fails, and does not outlive it."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from types import TracebackType

LAUNCHER = "LUMEN_LAUNCHER"  # the launcher's process
_PR_SET_PDEATHSIG = 1


def is_worker() -> bool:
    """Whether Lumen's launcher started this very process: those that it starts itself inherit the environment."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def attach() -> None:
    """Report what ends this process instead of printing it, and end with the launcher."""
    if not is_worker():
        return
    faulthandler.enable()
    sys.excepthook = _report_uncaught
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if not is_worker():  # it died before that
            os.kill(os.getpid(), signal.SIGTERM)


def report(error: BaseException, text: str) -> bool:
    """Tell the launcher why this process ends; the launcher prints the first error of all processes.

    Args:
        error: What ends it.
        text: What would be printed.

    Returns:
        Whether there is a launcher; if not, the text is to be printed here.
    """
    if not is_worker():
        return False
    record = {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}},
        "kind": type(error).__name__,
        "text": text,
        "time_s": time.time(),
    }
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
        json.dump(record, file)
    return True


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, KeyboardInterrupt):
        report(error, "".join(traceback.format_exception(kind, error, trace)))
