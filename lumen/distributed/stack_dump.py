"""Stacks of the processes of a host, for the error of a rank that waits for another one in vain."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, final

_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # nobody's own: faulthandler answers it below Python
_PATIENCE_S = 2.0


@final
class Stacks:
    """Lets any process of a host have the others write down their Python stacks, whatever they are doing.

    Collective: every rank must make one.

    Args:
        rank: Rank of this process in the run, from 0.
        gather: Returns every rank's value of plain data, in rank order. Collective.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        places = gather((socket.gethostname(), os.getpid()))
        first = next(number for number, (host, _) in enumerate(places) if host == places[rank][0])
        # an agent's folder for what its workers report goes away with it, should they be killed
        parent = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) or None
        folders = gather(tempfile.mkdtemp(prefix="lumen-stacks-", dir=parent) if rank == first else None)
        self._rank, self._places = rank, places
        self._folder = Path(folders[first])
        self._file = (self._folder / str(rank)).open("w")
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # for as long as this process lives: its pid may be another's later
        faulthandler.register(_SIGNAL, self._file, all_threads=True)
        gather(None)  # a process that is asked before it listens would die of it

    def collect(self) -> str:
        """The stacks of the other processes on this host; also which ranks have ended or run on other hosts."""
        texts = []
        for rank, (host, pid) in enumerate(self._places):
            if rank == self._rank:
                continue
            if host != self._places[self._rank][0]:
                texts.append(f"rank {rank} runs on {host}: see what it says itself")
            else:
                stack = self._ask(rank, pid)
                texts.append(f"rank {rank} (pid {pid}) stands here:\n{stack}" if stack else f"rank {rank} has ended")
        return "\n".join(texts)

    def _ask(self, rank: int, pid: int) -> str | None:
        path = self._folder / str(rank)
        if not path.exists():
            return None
        with path.open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it lives
                before = file.seek(0, os.SEEK_END)
                os.kill(pid, _SIGNAL)
            else:
                return None
            text, deadline = "", time.monotonic() + _PATIENCE_S
            while time.monotonic() < deadline:
                time.sleep(0.1)
                file.seek(before)
                earlier, text = text, file.read()
                if text and text == earlier:
                    break
            return text.rstrip() or "(it does not answer)"

    def close(self) -> None:
        """Remove the signal handler and the files."""
        faulthandler.unregister(_SIGNAL)
        with suppress(OSError):
            (self._folder / str(self._rank)).unlink()
            self._folder.rmdir()  # by the last one
        self._file.close()
