"""Watch: says where a process stands that gets no further."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lumen.run.run import Run

_log = logging.getLogger("lumen")
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 1  # nobody's own; the one above is that of `Stacks`
_ANSWER_S = 0.5


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """The context of a run that warns where no step or batch is done for `timeout_s`, and twice, four times as long.

    It does not end the run: what takes long may be meant to. Processes that wait for one another have an end of theirs.
    The warning shows the stacks of all threads, and of data workers that were forked.
    """
    over = threading.Event()
    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.register(_SIGNAL, stacks, all_threads=True)  # workers inherit it
        thread = threading.Thread(target=_watch, args=(run, over, stacks), name="lumen-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            faulthandler.unregister(_SIGNAL)


def _watch(run: Run, over: threading.Event, stacks: IO[str]) -> None:
    processes, beats, patience = run.processes, -1, 1
    while True:
        limit_s = (processes.timeout_s if run.ending.vote.polls else processes.startup_timeout_s) * patience
        if over.wait(limit_s):
            return
        if run.ending.vote.polls == beats:
            _log.warning(
                "rank %d has done no step and no batch for %g s. If that is no surprise, set a longer timeout_s. It "
                "stands here:\n%s",
                processes.rank, limit_s, _stacks(stacks),
            )  # fmt: skip
            patience *= 2
        else:
            beats, patience = run.ending.vote.polls, 1


def _stacks(file: IO[str]) -> str:
    """Where this process and its forked data workers stand."""
    texts = []
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)):
        if pid == os.getpid() or _listens(pid):
            before = os.fstat(file.fileno()).st_size
            with suppress(ProcessLookupError):
                os.kill(pid, _SIGNAL)
                time.sleep(_ANSWER_S)
            file.seek(before)
            texts.append(f"process {pid}{'' if pid == os.getpid() else ', a data worker'}:\n{file.read().rstrip()}")
    return "\n".join(texts)


def _listens(pid: int) -> bool:
    """Whether a process has the handler: the signal would end one that has not."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)
