"""`fit` around its loop: from the opening of a run to its first step, after its last one, and back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

from lumen.checkpoint.format.folder import find_checkpoints, newest_valid, read_info, remove_checkpoints
from lumen.console import logger as _log
from lumen.data.nested import fill
from lumen.errors import TrainingError
from lumen.loop.fit import StopRequested, sanity_check
from lumen.run.run import Run
from lumen.task.hyperparameters import logged_hparams
from lumen.task.teacher import Place, places_of
from lumen.trainer.logs import record
from lumen.trainer.prepare import Origin, prepare, prepare_training
from lumen.trainer.script_record import record_script
from lumen.trainer.session import checkpoints_of
from lumen.trainer.telling import note_steps, tell_end, tell_setup

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


def begin_training(trainer: Trainer, run: Run, configure_optimizers: Callable[[], Any] | None) -> None:
    """Build and load what training needs, up to the sanity check. Collective: every rank must call this.

    A finished run begins too: it has nothing left to train, and ends as it did before.

    Args:
        trainer: The trainer that has opened the run.
        run: A run of the stage "fit" that has just been opened.
        configure_optimizers: Used instead of the task's.
    """
    checkpoint = prepare(trainer, run, given=configure_optimizers)
    prepare_training(trainer, run, configure_optimizers or run.task.configure_optimizers, checkpoint)
    origin = trainer.origin
    if origin.rolled_back is None:
        saved = places_of(run.task, buffers=True, persistent=True)
        found = places_of(run.task, buffers=True).items()
        origin.unsaved = [(place, place[0][place[1]].clone()) for name, place in found if name not in saved]
    else:
        run.progress.leave_out(origin.rolled_back[1])
        reset_buffers(origin.unsaved)
    if checkpoint is not None and (reason := run.ending.limit_reached):
        record("nothing to do: %s is finished (%s, step %d)", checkpoint.path, reason, run.progress.step)
    trainer._started = True
    note_steps(run, trainer.run_directory)
    record_script(trainer, run)
    owners = {"model": run.task, "data": run.loaders.datamodule}
    hyperparameters = {name: logged_hparams(owner) for name, owner in owners.items() if owner is not None}
    for logger in run.records.loggers:
        logger.log_hyperparams(hyperparameters)
    tell_setup(run)
    for hook in run.hooks.on_fit_start:
        hook()
    if checkpoint is None and run.loaders.evaluation and run.plan.sanity_batches:
        sanity_check(run)


def reset_buffers(places: Iterable[tuple[Place, torch.Tensor]]) -> None:
    """Set buffers to the given values, as a new process would make them."""
    for (held, key), value in places:
        if (buffer := held.get(key)) is not None and buffer.shape == value.shape:
            fill(buffer, value)
        else:
            held[key] = value.clone()


def end_training(trainer: Trainer, run: Run) -> None:
    """Call the last hooks, and say how the run has ended."""
    for hook in run.hooks.on_fit_end:
        hook()
    run.saves.check_home()
    if run.optim.manual is not None and run.checkpoint is None:
        run.optim.manual.say_idle()
    if skipped := run.precision.skipped_updates:
        _log.info("%s: %d updates were skipped: their gradients overflowed", run.precision.name, skipped)
    home = trainer.run_directory
    tell_end(trainer, run, [] if home is None else checkpoints_of(trainer, home))


def go_back(trainer: Trainer, run: Run, left_out: list[int]) -> Origin:
    """Remove the checkpoints that know the micro-batches to leave out. Collective: every rank must call this.

    Args:
        trainer: The trainer in `fit`.
        run: Its run, in which hooks of all ranks have asked to go back.
        left_out: The micro-batches of the run, from and to, to leave out.

    Returns:
        The origin with which `fit` opens the run again: the newest checkpoint from before them.

    Raises:
        StopRequested: The run was asked to leave meanwhile; once it is resumed, it goes back.
        TrainingError: There is no checkpoint from before them.
    """
    run.ending.agree()
    if run.ending.vote.stop_signal is not None:
        raise StopRequested
    progress, home = run.progress, trainer.run_directory
    folders = checkpoints_of(trainer, home or trainer.default_root_dir / str(trainer.name))
    run.saves.settle()
    newer = run.processes.on_rank_zero(partial(_newer, folders, left_out[0]))
    kept = None
    if home is not None:
        kept = newest_valid(folders[0], _log.warning, run.processes, sections=(), beside=folders[1:], without=newer)
    if home is None or kept is None:
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
    return trainer.origin.back(home, [*progress.left_out, left_out])


def _newer(folders: Sequence[PurePath], micro_batches: int) -> list[PurePath]:
    """The checkpoints of more than so many micro-batches."""
    found = [path for folder in folders for path in find_checkpoints(folder)]
    return [path for path in found if read_info(path)["micro_batches"] > micro_batches]
