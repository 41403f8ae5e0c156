"""Opening of a run's loaders, from the arguments of the call, the data module or the task, in this order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import isclass
from typing import Any

from lumen.console import logger as _log
from lumen.data.adapter import LoaderAdapter
from lumen.data.combined import holds_loaders
from lumen.data.content_digests import check_same_data
from lumen.data.loaders import adapt_loader
from lumen.data.windows import RankSlice
from lumen.errors import ConfigError, DataError
from lumen.errors.arguments import describe_type
from lumen.random import EVALUATIONS, Domain, make_key
from lumen.run.run import Run
from lumen.strategies import count_training_parts, gather_from_data_ranks
from lumen.task.data_module import DataModule
from lumen.task.hooks import check_loaders, is_overridden

_NAMES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
_METHODS = {stage: f"{name}_dataloader" for stage, name in _NAMES.items()}
_BEFORE_THE_FIRST_EPOCH = ("on_fit_start", "on_train_start", "on_train_epoch_start")
NO_TRAINING = "there is no batch to train on: {}. Check the source of the data, or lower the batch_size."


def open_loaders(run: Run) -> None:
    """Open the training and validation loaders of `fit`, if they are not open or this epoch reloads them.

    A resumed run requests the loaders as the uninterrupted run did: with the generators and the `current_epoch` of the
    epoch that reloaded them.

    Raises:
        DataError: There is no training data, or the training data is empty.
    """
    progress, every = run.progress, run.plan.reload_every_n_epochs
    due = progress.epoch - progress.epoch % every if every else 0
    if run.loaders.train is not None:
        if run.loaders.epoch == due:
            return
        run.loaders.close()
        run.loaders.train, run.loaders.evaluation = None, []
    epoch, progress.epoch = progress.epoch, due
    if due:
        run.step.seed_hooks(2)
    try:
        _open_loaders(run)
    finally:
        progress.epoch = epoch
    run.loaders.epoch = due


def _open_loaders(run: Run) -> None:
    plan = run.plan
    if (loader := _get_loader(run, "fit")) is None:
        raise DataError("there is no training data. Pass a DataModule or a loader to fit, or define train_dataloader.")
    is_manual = not run.task.automatic_optimization
    communicates = is_manual or run.strategy.has_collectives_in("forward")
    rank_slice = _make_rank_slice(run, count_training_parts(run.strategy), needs_dummies=communicates)
    rank_slice = rank_slice._replace(splits=is_manual)
    per_step = plan.get_accumulation(run.progress.epoch) * rank_slice.world_size
    run.loaders.train = train = adapt_loader(
        loader, run.seed, per_step, plan.global_batch_size, rewinds=plan.same_batches, rank_slice=rank_slice
    )
    steps, length = train.count_steps(None), train.length or 0
    accumulates = plan.has_accumulation or (steps is not None and length > steps * rank_slice.world_size)
    run.calls.compilation.check_graphs(run.strategy.device, shards=run.strategy.shards, accumulates=accumulates)
    plan.get_limit("train", train)
    plan.check_validation(train)
    if train.length == 0 and not _may_hook_provide_data(run):
        raise DataError(NO_TRAINING.format(train.explain_empty()))
    if is_overridden(run.task, "validation_step") and plan.limits["validate"] != 0:
        run.loaders.evaluation = open_evaluation_loaders(run, "validate", required=False, training_loader=loader)
    elif (
        run.loaders.user_loaders is not None
        and run.loaders.user_loaders[1] is not None
        and plan.limits["validate"] != 0
    ):
        _log.warning("%s has no validation_step: the validation data is not used", type(run.task).__name__)
    run.calls.choose_arguments(run.loaders)
    if rank_slice.processes > 1:
        check_same_data(rank_slice, {"training data": loader, "validation data": run.loaders.sources.get("validate")})


def _may_hook_provide_data(run: Run) -> bool:
    """Return True if the user has a hook before the first epoch, which may fill an empty data set."""
    owners = (each for each in (run.task, *run.hooks.callbacks) if not type(each).__module__.startswith("lumen."))
    return any(is_overridden(owner, hook) for owner in owners for hook in _BEFORE_THE_FIRST_EPOCH)


def choose_source(loaders: Any, datamodule: DataModule | None, val_loaders: Any = None) -> Any:
    """Return the data source of a stage: loaders, or a data module, which may be passed in place of loaders.

    Raises:
        ConfigError: Both were passed, or `datamodule` is no data module.
    """
    source = loaders if datamodule is None else datamodule
    if datamodule is not None and loaders is not None:
        raise ConfigError("loaders and a datamodule were passed, but a datamodule has loaders. Pass one of the two.")
    if datamodule is not None and not isinstance(datamodule, DataModule):
        advice = "Pass loaders by position."
        if isclass(datamodule):
            advice = f"Create an object: {datamodule.__name__}(...)."
        raise ConfigError(f"datamodule: expected a lumen.DataModule, found {describe_type(datamodule)}. {advice}")
    if not isinstance(source, DataModule):
        check_loaders("dataloaders", source)
        check_loaders("val_dataloaders", val_loaders)
    elif val_loaders is not None:
        raise ConfigError(
            "val_dataloaders and a DataModule were passed, but a DataModule has its loaders. Pass one of the two."
        )
    return source


def open_for_evaluation(run: Run, stage: str) -> None:
    """Open the loaders of an evaluation outside of `fit`; see `open_evaluation_loaders`."""
    run.loaders.evaluation = open_evaluation_loaders(run, stage)
    run.calls.choose_arguments(run.loaders)


def open_evaluation_loaders(
    run: Run, stage: str, *, required: bool = True, training_loader: Any = None
) -> list[LoaderAdapter]:
    """Open the loaders of an evaluation. Loaders in a dictionary keep their names.

    Args:
        run: The run that evaluates.
        stage: "validate", "test" or "predict".
        required: True to raise an error if there is no loader.
        training_loader: The loader of the training that the evaluation interrupts.

    Raises:
        DataError: A required loader is missing, loaders are nested in several levels, or the loader would take batches
            from the training.
    """
    if (found := _get_loader(run, stage)) is None:
        if required:
            raise DataError(f"there is no data to {stage}. Pass a DataModule or a loader, or define {_METHODS[stage]}.")
        return []
    is_list = isinstance(found, Sequence) and not isinstance(found, (str, bytes))
    loaders = [*(found.values() if isinstance(found, Mapping) else found if is_list else [found])]
    if any(map(holds_loaders, loaders)):
        raise DataError(
            f"{_METHODS[stage]}: a list or dictionary of loaders contains a list or dictionary, but an evaluation "
            "reads one loader after the other. Return one list or dictionary of loaders; or a CombinedLoader, whose "
            "mode says how Lumen reads several loaders together."
        )
    is_shared = isinstance(training_loader, Iterator) and any(each is training_loader for each in loaders)
    if is_shared and run.plan.val_every_epoch_fraction != 1.0:
        raise DataError(
            f"training and validation read one {type(training_loader).__name__}, which is an iterator: each would take "
            "batches from the other. Pass two loaders."
        )
    rank_slice = _make_rank_slice(
        run, run.strategy.data_world_size, needs_dummies=run.strategy.has_collectives_in("evaluation")
    )
    adapters = []
    for number, loader in enumerate(loaders):
        seed = make_key(run.seed, EVALUATIONS[stage], Domain.LOADER, number)
        adapters.append(adapt_loader(loader, seed, rank_slice.world_size, rewinds=True, rank_slice=rank_slice))
    for adapter, name in zip(adapters, found if isinstance(found, Mapping) else [""] * len(adapters), strict=True):
        adapter.set_name(str(name))
        run.plan.get_limit(stage, adapter)
    if required and rank_slice.processes > 1:  # Within fit they are compared together with the training data.
        check_same_data(rank_slice, {f"{stage} data": found})
    return adapters


def _make_rank_slice(run: Run, parts: int, *, needs_dummies: bool) -> RankSlice:
    """Return the part of this process of `parts`; successive data ranks have the same part if there are fewer parts."""
    strategy = run.strategy
    shared_by = strategy.data_world_size // parts

    def gather(value: Any) -> list[Any]:
        return gather_from_data_ranks(strategy, value)[::shared_by]

    return RankSlice(
        strategy.data_rank // shared_by, parts, needs_dummies, gather,
        processes=run.processes.world_size, gather_all=run.processes.all_gather,
    )  # fmt: skip


def _get_loader(run: Run, stage: str) -> Any:
    """Return the loader or loaders of a stage, and note them as the source; None if there are none."""
    found, method = (run.loaders.user_loaders or (None, None))[stage != "fit"], _METHODS[stage]
    owners = [each for each in (run.loaders.datamodule, run.task) if each is not None and is_overridden(each, method)]
    run.loaders.sources[stage] = found = (
        _call_dataloader_method(owners[0], method) if found is None and owners else found
    )
    return found


def _call_dataloader_method(owner: Any, method: str) -> Any:
    """Call a loader method of a data module or a task."""
    try:
        return getattr(owner, method)()
    except ValueError as error:
        if not re.match("(batch_size|num_samples) should be a positive integer", str(error)):  # torch's own
            raise
        advice = "Shuffling needs a data set with samples: check their source."
        raise DataError(
            f"{method} of {type(owner).__name__} cannot make its loader: {error}. "
            + (advice if "num_samples" in str(error) else "Set batch_size to at least 1.")
        ) from error
