"""When a validation is due."""

from __future__ import annotations

from lumen.data.windows import AccumulationWindow
from lumen.run.run import Run


def validation_due(run: Run, window: AccumulationWindow, *, updated: bool) -> bool:
    """Whether the plan asks for a validation now.

    Args:
        run: The run that trains.
        window: The step that has just ended.
        updated: The step has updated the parameters.
    """
    plan, progress, loaders = run.plan, run.progress, run.loaders
    if not loaders.evaluation or (progress.epoch + 1) % plan.val_every_n_epochs:
        return False
    if plan.val_every_n_steps is not None:
        return updated and progress.step % plan.val_every_n_steps == 0
    if plan.val_every_s is not None:
        return run.ending.vote.now_s - run.ending.validated_at_s >= plan.val_every_s
    fraction = plan.val_every_epoch_fraction
    if fraction is None:
        return False
    if fraction == 1.0:
        return window.last
    assert loaders.train is not None
    batches = plan.batches("train", loaders.train)
    assert batches is not None  # Plan.check_validation
    done = progress.batches
    before = done - window.batches
    return int(done / (batches * fraction) + 1e-9) > int(before / (batches * fraction) + 1e-9)


def validation_done(run: Run) -> None:
    """The validation of this step is complete."""
    run.progress.validation_due = False
    run.values.has_validated = True
    run.ending.validated_at_s = run.ending.vote.now_s
