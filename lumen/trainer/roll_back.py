"""Going back: a run closes, to be opened again from an earlier checkpoint, and leaves out what led to that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath

from lumen.checkpoint.folder import find_checkpoints, newest_valid, read_info, remove_checkpoints
from lumen.console import logger as _log
from lumen.errors import TrainingError
from lumen.loop.around_step import RolledBack
from lumen.loop.fit import StopRequested
from lumen.run.run import Run


@contextmanager
def rolling_back(run: Run, folders: Sequence[PurePath]) -> Iterator[None]:
    """The context of a training that may ask to go back: the trainer's origin is then where it is to begin again.

    Args:
        run: The run in training.
        folders: Where its checkpoints lie, that with the best one first.

    Raises:
        StopRequested: The run was asked to leave meanwhile; when it goes on, it will come here again.
        TrainingError: There is no checkpoint from before what is to be left out.
    """
    try:
        yield
        return
    except RolledBack as asked:
        left_out = asked.left_out
    run.ending.agree()
    if run.ending.vote.stop_signal is not None:
        raise StopRequested
    trainer, progress = run.trainer, run.progress
    run.saves.settle()
    newer = run.processes.on_rank_zero(partial(_newer, folders, left_out[0]))
    kept = None
    if trainer.run_directory is not None:
        kept = newest_valid(folders[0], _log.warning, run.processes, sections=(), beside=folders[1:], without=newer)
    if kept is None:
        but = f", only {newer[0].name} and newer ones" if newer else ""
        raise TrainingError(
            f"the run is to go back from step {progress.step} to before its micro-batch {left_out[0]}, and there is no "
            f"checkpoint from then{but}. Let ModelCheckpoint save more often or keep more (every_n_train_steps, "
            "keep_last), leave out fewer steps before a spike, or look for spikes only once a checkpoint is old enough "
            "(SpikeDetection: before, warmup)."
        )
    run.processes.on_rank_zero(partial(remove_checkpoints, newer))
    _log.warning(
        "going back from step %d to %s, to leave out the micro-batches %d to %d of the run",
        progress.step, kept.path.name, left_out[0], left_out[1] - 1,
    )  # fmt: skip
    trainer.origin = trainer.origin.back(trainer.run_directory, [*progress.left_out, left_out])


def _newer(folders: Sequence[PurePath], micro_batches: int) -> list[PurePath]:
    """The checkpoints of more than so many micro-batches."""
    found = [path for folder in folders for path in find_checkpoints(folder)]
    return [path for path in found if read_info(path)["micro_batches"] > micro_batches]
