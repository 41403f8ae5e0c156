"""Properties of a process of this machine, from Linux's /proc; empty on other systems."""

from __future__ import annotations

import re
from pathlib import Path


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of a process in proc(5) from the third, its state, on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def has_handler(number: int, pid: int | str = "self") -> bool:
    """Return True if a process has a handler for a signal, also if Python does not know the handler."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
