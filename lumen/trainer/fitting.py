"""`fit` around its loop: what is done of a run between its opening and its first step, and after its last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lumen.console import logger as _log
from lumen.loop.fit import sanity_check
from lumen.run.run import Run
from lumen.trainer.logs import record
from lumen.trainer.prepare import prepare, prepare_training

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


def begin_training(trainer: Trainer, run: Run, configure_optimizers: Callable[[], Any] | None) -> bool:
    """Build and load what training needs, up to the sanity check. Collective: every rank must call this.

    Args:
        trainer: The trainer that has opened the run.
        run: A run of the stage "fit" that has just been opened.
        configure_optimizers: Used instead of the task's.

    Returns:
        False: the run that goes on is finished already, and there is nothing to do.
    """
    checkpoint = prepare(run, given=configure_optimizers)
    prepare_training(run, configure_optimizers or run.task.configure_optimizers, checkpoint)
    if checkpoint is not None and (reason := run.ending.limit_reached):
        record("nothing to do: %s is finished (%s, step %d)", checkpoint.path, reason, run.progress.step)
        if not run.progress.in_epoch:
            return False
    trainer._started = True
    owners = {"model": run.task, "data": run.loaders.datamodule}
    hyperparameters = {name: owner.logged_hparams for name, owner in owners.items() if owner is not None}
    for logger in run.records.loggers:
        logger.log_hyperparams(hyperparameters)
    for hook in run.hooks.on_fit_start:
        hook()
    if checkpoint is None and run.loaders.evaluation and run.plan.sanity_batches:
        sanity_check(run)
    return True


def end_training(run: Run) -> None:
    """Call the last hooks, and say how the run has ended."""
    for hook in run.hooks.on_fit_end:
        hook()
    run.saves.check_home()
    if skipped := run.precision.skipped_updates:
        _log.info("%s: %d updates were skipped: their gradients overflowed", run.precision.name, skipped)
    why, progress = run.ending.limit_reached, run.progress
    record("finished: %s at step %d, epoch %d", why, progress.step, progress.epochs_begun)
