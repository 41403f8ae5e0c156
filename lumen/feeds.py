"""Where a run's batches come from: the call, the data module or the task, in this order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from lumen.data.loaders import Feed, make_feed
from lumen.errors import DataError
from lumen.hooks import overrides
from lumen.run import Run

_log = logging.getLogger("lumen")
_METHODS = {
    "fit": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def open_feeds(run: Run, accumulate: int, global_batch_size: int | None) -> None:
    """Take over the loaders of `fit`, once: training, and validation if there is any.

    Raises:
        DataError: There is no training data.
    """
    if run.train_feed is not None:
        return
    loader = _loader(run, "fit")
    if loader is None:
        raise DataError("there is no training data. Give a DataModule or a loader to fit, or define train_dataloader.")
    run.train_feed = make_feed(loader, run.seed, accumulate, global_batch_size)
    run.plan.limit("train", run.train_feed)
    run.plan.check_validation(run.train_feed)
    if run.train_feed.length == 0:
        _log.warning("the training loader is empty")
    if overrides(run.task, "validation_step") and run.plan.limits["validate"] != 0:
        run.eval_feeds = eval_feeds(run, "validate", required=False)
    elif run.loaders is not None and run.loaders[1] is not None and run.plan.limits["validate"] != 0:
        _log.warning("%s has no validation_step: the validation data is not used", type(run.task).__name__)


def eval_feeds(run: Run, stage: str, *, required: bool = True) -> list[Feed]:
    """Take over the loaders of an evaluation.

    Raises:
        DataError: There is none, and it is required.
    """
    loaders = _loader(run, stage)
    if loaders is None:
        if required:
            raise DataError(f"there is no data to {stage}. Give a DataModule or a loader, or define {_METHODS[stage]}.")
        return []
    feeds = [make_feed(loader, run.seed) for loader in (loaders if isinstance(loaders, Sequence) else [loaders])]
    for feed in feeds:
        run.plan.limit(stage, feed)
    return feeds


def _loader(run: Run, stage: str) -> Any:
    if run.loaders is not None:
        training, evaluation = run.loaders
        given = training if stage == "fit" else evaluation
        if given is not None:
            return given
    for owner in (run.datamodule, run.task):
        if owner is not None and overrides(owner, _METHODS[stage]):
            return getattr(owner, _METHODS[stage])()
    return None
