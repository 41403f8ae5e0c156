"""`fit` around its loop: what is done of a run between its opening and its first step, and after its last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lumen.console import logger as _log
from lumen.data.nested import fill
from lumen.loop.fit import sanity_check
from lumen.run.run import Run
from lumen.task.teacher import Place, places_of
from lumen.trainer.logs import record
from lumen.trainer.open_run import checkpoints_of
from lumen.trainer.prepare import prepare, prepare_training
from lumen.trainer.script_record import record_script
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
    checkpoint = prepare(run, given=configure_optimizers)
    prepare_training(run, configure_optimizers or run.task.configure_optimizers, checkpoint)
    origin = trainer.origin
    if origin.rolled_back is None:
        saved = places_of(run.task, buffers=True, persistent=True)
        found = places_of(run.task, buffers=True).items()
        origin.unsaved = [(place, place[0][place[1]].clone()) for name, place in found if name not in saved]
    else:
        run.progress.left_out = origin.rolled_back[1]
        reset_buffers(origin.unsaved)
    if checkpoint is not None and (reason := run.ending.limit_reached):
        record("nothing to do: %s is finished (%s, step %d)", checkpoint.path, reason, run.progress.step)
    trainer._started = True
    note_steps(run)
    record_script(trainer, run)
    owners = {"model": run.task, "data": run.loaders.datamodule}
    hyperparameters = {name: owner.logged_hparams for name, owner in owners.items() if owner is not None}
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


def end_training(run: Run) -> None:
    """Call the last hooks, and say how the run has ended."""
    for hook in run.hooks.on_fit_end:
        hook()
    run.saves.check_home()
    if run.optim.manual is not None and run.checkpoint is None:
        run.optim.manual.say_idle()
    if skipped := run.precision.skipped_updates:
        _log.info("%s: %d updates were skipped: their gradients overflowed", run.precision.name, skipped)
    home = run.trainer.run_directory
    tell_end(run, [] if home is None else checkpoints_of(run.trainer, home))
