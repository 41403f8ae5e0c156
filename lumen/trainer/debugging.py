"""A debugger in a run of several processes: who has the terminal, and what the others do meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.distributed.worker import is_worker

if TYPE_CHECKING:
    from pdb import Pdb


@contextmanager
def debuggable(processes: Processes) -> Iterator[None]:
    """The context of a run in which `breakpoint()` and `pdb.set_trace()` ask in one process.

    Of the workers of Lumen's launcher only rank 0 shows what it writes: the others would take its input away and say
    nothing, so they go on. Without a terminal, and with another debugger in PYTHONBREAKPOINT, nothing is changed.
    """
    if processes.world_size == 1:
        yield
        return
    from pdb import Pdb

    interact, told = Pdb.interaction, False
    has_terminal = processes.is_global_zero or not is_worker()

    def interaction(debugger: Pdb, *args: Any) -> Any:
        nonlocal told
        goes_on = not has_terminal and sys.stdin is not None and sys.stdin.isatty()
        if goes_on and not told:
            _log.warning("rank %d goes on where a debugger would ask: rank 0 has the terminal", processes.rank)
        elif not told:
            _log.warning(
                "rank %d is in a debugger: the other ranks wait for it, at most for timeout_s (%g s) of the strategy",
                processes.rank,
                processes.timeout_s,
            )
        told = True
        return debugger.set_continue() if goes_on else interact(debugger, *args)

    Pdb.interaction = interaction  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Pdb.interaction = interact  # type: ignore[method-assign]
