"""Restore of a run, or of selected parts of a run, from a checkpoint."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import PurePath
from traceback import extract_tb
from typing import Any

from torch import nn

from lumen.checkpoint.format.codec import decode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.config_diff import (
    find_changed_hyperparameters,
    find_changed_settings,
    format_changes,
    log_mode_differences,
)
from lumen.checkpoint.load.load_weights import load_model, load_task_states
from lumen.checkpoint.load.weights_source import Part, format_parts_without
from lumen.checkpoint.named_tensors import get_extra_tensors, get_tensors_as_saved
from lumen.checkpoint.optimizer_state import (
    NEUTRAL_GROUP_KEYS,
    describe_class,
    get_group_names,
    load_gradients,
    load_optimizer_states,
    load_remaining_state,
    names_as_ids,
    restore_groups,
)
from lumen.checkpoint.rank_state import load_logged_values
from lumen.checkpoint.settings import Setting, flatten_settings
from lumen.checkpoint.user_state import HookAdditions, load_states, make_ambiguous_key_error
from lumen.console import logger as _log
from lumen.distributed.process_location import Frame
from lumen.errors import CheckpointDamaged, CheckpointMismatch, ConfigError, LumenError
from lumen.errors.arguments import format_first_names
from lumen.internals.garbage import collect_young_only
from lumen.internals.optimizers import mark_as_stepped
from lumen.run.plan import Progress
from lumen.run.run import Run

_RATE_KEYS = ("lr", "initial_lr", "max_lr", "min_lr")
_MOVED_BY_SCHEDULERS = (*_RATE_KEYS, "momentum", "betas", "weight_decay")


def load_model_and_data(run: Run, checkpoint: Checkpoint, parts: frozenset[Part]) -> None:
    """Load the model, and restore the states of the task, the data module and (in `fit`) the callbacks.

    Call this before the optimizers are built.

    Collective: every rank must call this.

    Raises:
        CheckpointMismatch: The checkpoint is of another model; nothing was changed.
    """

    def load_states() -> None:
        with treat_malformed_as_damaged(checkpoint, while_loading=True):
            extra = get_extra_tensors(run.task, checkpoint)
            if "model" in parts:
                load_task_states(run.task, checkpoint, extra)
            if "data" in parts and run.loaders.datamodule is not None:
                run.loaders.datamodule.load_state_dict(decode(checkpoint.state["datamodule"], extra))
            if "progress" in parts and run.stage == "fit":
                _call_load_hooks(run, decode(checkpoint.state["on_save_checkpoint"], extra), checkpoint.path)

    if "model" in parts:
        load_model(run.task, checkpoint, processes=run.processes)
    run.processes.run_on_all(load_states)


@contextmanager
def treat_malformed_as_damaged(checkpoint: Checkpoint | None, *, while_loading: bool = False) -> Iterator[None]:
    """Context of a resumed run that turns errors due to values of a wrong type into CheckpointDamaged.

    Args:
        checkpoint: The checkpoint that the run resumes from; None: no checkpoint, and all errors are raised unchanged.
        while_loading: Translate errors of all libraries. If False, errors of libraries other than torch are raised
            unchanged, because the user may have passed their objects to Lumen.

    Raises:
        CheckpointDamaged: An error without frames of user code shows that a value has a wrong type.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        frames = [Frame(each.filename, each.lineno or 0, each.name) for each in extract_tb(error.__traceback__)]
        is_users = any(frame.is_in_user_code if while_loading else not frame.is_internal for frame in frames)
        if isinstance(error, RuntimeError):  # most RuntimeErrors concern devices, memory or other processes
            is_users |= type(error) is not RuntimeError or not any("/optim/" in frame.file for frame in frames)
        if checkpoint is None or is_users or isinstance(error, LumenError):
            raise
        raise CheckpointDamaged(
            f"{checkpoint.path} holds a state from which the run cannot resume: {type(error).__name__}: {error}. The "
            "state was changed, or a different version of Lumen wrote the checkpoint. Resume from a different "
            "checkpoint. If a new run fails in the same way, the checkpoint is not the cause."
        ) from error


def _call_load_hooks(run: Run, saved: Mapping[str, Any], path: PurePath) -> None:
    """Call `on_load_checkpoint` of each callback with its saved additions.

    Args:
        run: The run, with its model loaded.
        saved: Additions of the callbacks, by their keys.
        path: Path of the checkpoint, for messages.

    Raises:
        ConfigError: Several callbacks have the key of one entry.
    """
    loading = run.hooks.list_callback_hooks("on_load_checkpoint")
    keys = Counter(callback.state_key for callback, _ in loading)
    for key in saved:
        if keys[key] > 1:
            raise make_ambiguous_key_error(key)
    for callback, hook in loading:
        hook(HookAdditions(callback.state_key, saved.get(callback.state_key, {})))
    if lost := ", ".join(saved.keys() - {each.state_key for each in run.hooks.callbacks}):
        _log.warning("%s holds additions of %s, which this run does not have", path, lost)


def restore_run(run: Run, checkpoint: Checkpoint, *, parts: frozenset[Part], continue_records: bool) -> None:
    """Restore a run from a checkpoint, after the model was loaded and the optimizers were built.

    Collective: every rank must call this.

    Args:
        run: The run, with its model loaded and its optimizers built.
        checkpoint: The checkpoint to restore from.
        parts: The parts to restore; `Trainer` documents each part.
        continue_records: Let the loggers append to the records of the run that wrote the checkpoint.

    Raises:
        CheckpointMismatch: The class of the optimizer, its groups, or the schedulers differ from the saved ones.
        ConfigError: A schedule ends before the step at which the run resumes.
    """

    def load() -> None:
        with treat_malformed_as_damaged(checkpoint, while_loading=True):
            _restore_run(run, checkpoint, parts, continue_records=continue_records)

    with collect_young_only():
        run.processes.run_on_all(load)
    checkpoint.release()  # the run keeps the object for its path


def _restore_run(run: Run, checkpoint: Checkpoint, parts: frozenset[Part], *, continue_records: bool) -> None:
    extra = get_extra_tensors(run.task, checkpoint)
    run_entries = ("progress", "metrics", "modes", "callbacks", "precision", "configured")
    needed = (*run_entries, "schedulers", "monitors", "loggers")
    state = {name: decode(checkpoint.state[name], extra) for name in needed}
    if "progress" in parts:
        run.progress.copy_from(Progress(**state["progress"]))
        run.values.restore(state["metrics"], decode(checkpoint.state["logged_as"], extra))
        log_mode_differences(run, checkpoint)
        _load_modes(run.task, state["modes"])
        load_states(run.hooks.callbacks, state["callbacks"], checkpoint.path)
    if "optimizer" in parts:
        run.precision.load_state_dict(state["precision"])
        if "progress" in parts:
            restore_groups(run.task, run.optim.optimizer, checkpoint)
        _load_optimizer(run, checkpoint)
    _load_groups(run, checkpoint, parts, state["configured"])
    if "optimizer" in parts:
        load_remaining_state(run.task, run.optim.optimizer, checkpoint)
    if "schedulers" in parts:
        _load_schedulers(run, checkpoint, state, exact="optimizer" in parts)
    else:
        _advance_schedulers(run)
    if "data" in parts:
        load_logged_values(run, checkpoint)
        run.records.restore_kept_row(decode(checkpoint.state.get("kept_row"), extra))
    else:
        run.progress.return_before_epoch()
    if continue_records:
        load_states(run.records.loggers, state["loggers"], checkpoint.path)
        run.records.keep_logger_states(state["loggers"])
    if changed := find_changed_hyperparameters(run, checkpoint):
        _log.warning("hyperparameters differ from %s: %s", checkpoint.path, format_changes(changed))


def _load_modes(task: nn.Module, modes: Mapping[str, list[str]]) -> None:
    """Restore frozen parameters and modes of modules, after the optimizer was built."""
    frozen, evaluating = set(modes["frozen"]), set(modes["evaluating"])
    for name, parameter in task.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in task.named_modules():
        module.training = name not in evaluating
        if "untracked" in modes and hasattr(module, "track_running_stats"):  # older checkpoints lack the key
            module.track_running_stats = name not in modes["untracked"]


def _load_optimizer(run: Run, checkpoint: Checkpoint) -> None:
    saved, optimizer = checkpoint.state["optimizer"], run.optim.optimizer
    groups = get_group_names(run.task, optimizer)
    if saved["class"] != describe_class(optimizer) or [group["params"] for group in saved["groups"]] != groups:
        saved_names, run_names = {name for group in saved["groups"] for name in group["params"]}, set(chain(*groups))
        schedulers = ["schedulers"] if len(groups) != len(saved["groups"]) else []
        raise CheckpointMismatch(
            f"{checkpoint.path} was saved with {saved['class']} over {[len(g['params']) for g in saved['groups']]} "
            f"parameters per group; this run has {describe_class(optimizer)} over {[len(g) for g in groups]}"
            f"{_describe_names('in the checkpoint', saved_names - run_names)}"
            f"{_describe_names('in this run', run_names - saved_names)}. "
            "Resume with the same optimizer and the same parameter groups, or "
            f"{format_parts_without(checkpoint, 'optimizer', *schedulers)}."
        )
    parameters, wrong = dict(run.task.named_parameters()), []
    for name in saved["state"]:  # find parameters with another shape or dtype
        (dtype, shape), found = checkpoint.get_spec("model", name), parameters[name]
        if (found.dtype, found.shape) != (dtype, shape):
            wrong.append(f"{name}: {tuple(shape)} {dtype} saved, {tuple(found.shape)} {found.dtype} in the model")
    if wrong:
        raise CheckpointMismatch(
            f"{checkpoint.path} holds optimizer state for different parameters: {'; '.join(wrong[:8])}. Build the "
            f"model as it was when the checkpoint was saved, or {format_parts_without(checkpoint, 'optimizer')}."
        )
    load_optimizer_states(run.task, optimizer, checkpoint)
    if run.optim.manual is not None:
        run.optim.manual.restore_gradients(load_gradients(run.task, checkpoint))


def _describe_names(where: str, names: Collection[str]) -> str:
    return f"; only {where}: {format_first_names(sorted(names))}" if names else ""


def _load_groups(run: Run, checkpoint: Checkpoint, parts: frozenset[Part], configuration: dict[str, Setting]) -> None:
    """Restore the groups' options; learning rates belong to the schedulers, counters to the optimizer's state."""
    saved = checkpoint.state["optimizer"]["groups"]
    tensors = get_tensors_as_saved(run.task, checkpoint, "optimizer")
    parameters, groups = dict(run.task.named_parameters()), run.optim.optimizer.param_groups
    if not parts & {"optimizer", "schedulers"}:
        return
    if len(saved) != len(groups):
        raise CheckpointMismatch(
            f"{checkpoint.path} has learning rates of {len(saved)} parameter groups, but the run has {len(groups)}. "
            f"Resume with the same groups, or {format_parts_without(checkpoint, 'optimizer', 'schedulers')}."
        )
    for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
        for key in values.keys() - NEUTRAL_GROUP_KEYS:
            value = names_as_ids(decode(values[key], tensors), parameters)
            moved = {*flatten_settings(f"groups[{number}].{key}", value)} - configuration.items()
            is_rate = "schedulers" in parts and key in _RATE_KEYS and key in group
            is_option = "optimizer" in parts and key not in _MOVED_BY_SCHEDULERS and moved
            if parts >= {"optimizer", "schedulers"} or is_rate or is_option:
                group[key] = value


def _load_schedulers(run: Run, checkpoint: Checkpoint, state: Mapping[str, Any], *, exact: bool) -> None:
    """Restore the schedulers, and log configured settings that the checkpoint's values replace."""
    configuration: dict[str, Setting] = state["configured"]
    schedulers = run.optim.schedulers
    found = [run.optim.configured[f"schedulers[{number}]"] for number in range(len(schedulers))]
    saved = [configuration[f"schedulers[{number}]"] for number in range(len(state["schedulers"]))]
    if found != saved:
        raise CheckpointMismatch(
            f"{checkpoint.path} was saved with the schedulers {saved}, but the run has {found}. Resume with the same "
            f"schedulers, or {format_parts_without(checkpoint, 'schedulers')}."
        )
    for config, scheduler_state, monitor in zip(schedulers, state["schedulers"], state["monitors"], strict=True):
        config.restore(scheduler_state, monitor)
        optimizer = getattr(config.scheduler, "optimizer", None)
        if run.progress.step and optimizer is not None:
            mark_as_stepped(optimizer)
    lengths = {where: value for where, value in configuration.items() if where.startswith("lengths")}
    for old, new in find_changed_settings(lengths, run.optim.configured).values():
        _log.warning(
            "lr_scheduler: the schedule ends after %s steps in %s, but after %s in this run. The new length applies "
            "from the next step of the scheduler on, at which the learning rate jumps.", old, checkpoint.path, new,
        )  # fmt: skip
    restored = {
        where: value
        for where, value in configuration.items()
        if where not in lengths and (exact or where.startswith("schedulers") or where.rpartition(".")[2] in _RATE_KEYS)
    }
    if changed := find_changed_settings(restored, run.optim.configured):
        _log.warning(
            "the configuration of the optimizer or its schedule differs from %s: %s. The checkpoint's values apply, so "
            "that the run resumes exactly. To use the configured values, %s",
            checkpoint.path, format_changes(changed), format_parts_without(checkpoint, "schedulers"),
        )  # fmt: skip
    run.optim.record_saved_settings(restored)


def _advance_schedulers(run: Run) -> None:
    """Move new schedulers to the run's step as if epochs had equal lengths; skip schedulers with a monitor."""
    progress = run.progress
    in_epochs = round(progress.step * (1 - progress.batches / max(progress.micro_batches, 1)))  # in complete epochs
    epochs = [min(step, in_epochs) * progress.epoch // max(in_epochs, 1) for step in range(progress.step + 1)]
    moving = [config for config in run.optim.schedulers if config.monitor is None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of missing optimizer steps, which were made before the restart
        try:
            for step in range(progress.step if moving else 0):
                for interval, moments in (("step", [step]), ("epoch", range(epochs[step], epochs[step + 1]))):
                    for config in moving:
                        due = sum((moment + 1) % config.frequency == 0 for moment in moments)
                        for _ in range(due if config.interval == interval else 0):
                            config.step()
        except ValueError as error:
            raise ConfigError(f"lr_scheduler: the schedule ends before step {progress.step}: {error}") from error
        for config in moving:
            if config.interval == "token" and progress.units:
                config.move_to(progress.units, counted=True)
