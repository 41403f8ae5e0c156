"""A run under a launcher that starts it again: what it notes for that, and what it says once it was."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lumen.checkpoint import Checkpoint
from lumen.checkpoint.storage import MANIFEST
from lumen.distributed.restarts import has_lives, step_notes, told_restart
from lumen.distributed.worker import is_worker, report_steps
from lumen.run.run import Run
from lumen.trainer.logs import record

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


def note_steps(run: Run) -> None:
    """Note where a training begins, and each of its steps, for a launcher that may start it again."""
    directory = run.trainer.run_directory
    if has_lives() and directory is not None:
        progress = run.progress
        report_steps(lambda: progress.step)
        note = step_notes(run.processes.rank, directory, progress.step)
        run.hooks.add("on_step_end", lambda: note(progress.step))


def tell_restart(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Say in one line that the run was started again: why, from where, and what that costs."""
    if not trainer.is_global_zero:
        return
    if trainer.max_restarts and not is_worker():
        record("max_restarts is that of %s, which started this run: not %d", trainer.processes.started_by,
               trainer.max_restarts)  # fmt: skip
    restart = told_restart()
    if restart is None or trainer.origin.rolled_back is not None:
        return
    if restart.directory not in (None, str(trainer.run_directory)):
        return
    step = 0 if checkpoint is None else int(checkpoint.state["progress"]["step"])
    since_s = restart.began_s
    if checkpoint is not None:
        with suppress(OSError):  # it is in an object store
            since_s = max(since_s, Path(checkpoint.path, MANIFEST).stat().st_mtime)
    lost = max(restart.reached - step, 0)
    record(
        "restart %d of %d: %s; going on from step %d; lost: %d step%s, %.1f s",
        restart.number, restart.most, restart.why, step, lost, "" if lost == 1 else "s", time.time() - since_s,
    )  # fmt: skip
