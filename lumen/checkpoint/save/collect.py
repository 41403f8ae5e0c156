"""Collection of a checkpoint's contents, under names that are the same for every strategy."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lumen.checkpoint.format.codec import JSON, Tensors, encode, name_objects
from lumen.checkpoint.named_tensors import describe_sharding, get_model_tensors, mark_all_packed
from lumen.checkpoint.optimizer_state import capture_optimizer, map_parameter_names
from lumen.checkpoint.rank_state import collect_logged_values
from lumen.checkpoint.save.writer import check_same_on_ranks, check_tensors
from lumen.checkpoint.settings import get_data_fingerprints, get_modes, get_trainer_settings
from lumen.checkpoint.user_state import HookAdditions, collect_states, make_ambiguous_key_error
from lumen.console import logger as _log
from lumen.distributed.dtensor import is_sharded
from lumen.distributed.process_location import Frame
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointError, LumenError, NonFiniteLoss
from lumen.internals.masking import lacks_object
from lumen.internals.omegaconf import is_omegaconf
from lumen.run.run import Run
from lumen.strategies import select_by_data_rank, sync_buffers
from lumen.task.hyperparameters import HyperparametersMixin, get_recorded_hparams
from lumen.task.teacher import is_running_statistic

INFO_COUNTERS = ("step", "epoch", "micro_batches")  # counters of the run's progress that a checkpoint shows


def get_logger_states(run: Run) -> dict[str, Any]:
    """Return the states of all loggers, including loggers of the resumed run that this run lacks."""
    return run.records.absent_logger_states | collect_states(run.records.loggers)


def _collect_user_states(run: Run) -> dict[str, Any]:
    """Return the states of the task, the data module and the callbacks."""
    datamodule = run.loaders.datamodule
    return {
        "callbacks": {key: state for key, state in collect_states(run.hooks.callbacks).items() if state},
        "datamodule": datamodule.state_dict() if datamodule is not None else {},
        **_collect_hook_additions(run),
    }


def _collect_hook_additions(run: Run) -> dict[str, Any]:
    """Call `on_save_checkpoint` of the callbacks and then of the task.

    Returns:
        "on_save_checkpoint": the additions of each callback, by its key; "task": the additions of the task.

    Raises:
        CheckpointError: A key has a meaning in Lightning's checkpoints; the message names the key and its owner.
        ConfigError: Two callbacks with additions share a key.
    """
    additions: dict[str, dict[str, Any]] = {}
    for callback, hook in run.hooks.list_callback_hooks("on_save_checkpoint"):
        if added := _call_save_hook(key := callback.state_key, hook):
            if key in additions:
                raise make_ambiguous_key_error(key)
            additions[key] = added
    return {
        "on_save_checkpoint": additions,
        "task": _call_save_hook(type(run.task).__name__, run.task.on_save_checkpoint),
    }


def _call_save_hook(owner: str, hook: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    added = HookAdditions(owner, {})
    if isinstance(returned := hook(added), Mapping):  # Lightning 1 allowed this
        added.update(returned)
    for key in added:
        added.check(key)
    return dict(added)


def capture_run(run: Run, *, complete: bool = True) -> tuple[dict[str, Tensors], dict[str, str], dict[str, Any]]:
    """Return all data that a resumed run needs, except for values that differ between processes.

    Args:
        run: The run, at the end of a step.
        complete: Include the states of the task, the data module and the callbacks.

    Returns:
        Tensors by section ("model", "optimizer", "extra"), aliases of tied tensors, and the JSON state.

    Raises:
        CheckpointError: An entry is neither plain data nor a tensor; the message names its path.
    """
    task, datamodule, extra = run.task, run.loaders.datamodule, Tensors()
    model, aliases = get_model_tensors(task)
    stateful = [each for each in task.named_modules() if type(each[1]).get_extra_state is not nn.Module.get_extra_state]
    entries: dict[str, Any] = {
        "seed": run.seed,
        "progress": dict(vars(run.progress)),
        "precision": run.precision.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in run.optim.schedulers],
        "monitors": [(config.has_value, config.unread) for config in run.optim.schedulers],
        "configured": run.optim.configured,
        "loggers": get_logger_states(run) if run.records.before_evaluation is None else run.records.before_evaluation,
        "metrics": run.values.newest,
        "logged_as": run.values.options,
        "kept_row": run.records.kept_row if run.progress.validation_due else None,
        "hyperparameters": name_objects(get_recorded_hparams(task)),
        "data_hyperparameters": (
            name_objects(get_recorded_hparams(datamodule)) if isinstance(datamodule, HyperparametersMixin) else {}
        ),
        "omegaconf": {
            entry: [name for name, value in owner.hparams.items() if is_omegaconf(value)]
            for entry, owner in (("hyperparameters", task), ("data_hyperparameters", datamodule))
            if isinstance(owner, HyperparametersMixin)
        },
        "extra_state": {name: module.get_extra_state() for name, module in stateful},
        "modes": get_modes(task),
        "built": run.optim.built,
        "settings": get_trainer_settings(run),
        "data": get_data_fingerprints(run),
    }
    if complete:
        entries |= _collect_user_states(run)
    state = {name: encode(entry, extra, name) for name, entry in entries.items()}
    state["optimizer"], optimizer = _capture_optimizer(run)
    sections = {"model": model, "optimizer": optimizer, "extra": extra}
    mark_all_packed(sections)
    state["sharded"] = describe_sharding(sections)
    return sections, aliases, state


def _list_unaveraged_buffers(task: nn.Module) -> list[str]:
    """Return names of floating-point buffers that a mean of checkpoints does not average."""
    buffers = [(name, each) for name, each in task.named_buffers() if each.is_floating_point()]
    return [name for name, each in buffers if not is_running_statistic(name, each)]


def _capture_optimizer(run: Run) -> tuple[dict[str, JSON], Tensors]:
    """Return the optimizer's state and its tensors, including gradients kept by a task with manual optimization."""
    tensors = Tensors()
    captured = capture_optimizer(run.task, run.optim.optimizer, run.optim.built_groups, tensors)
    if run.optim.manual is not None and (kept := run.optim.manual.get_kept_gradients()):
        names = map_parameter_names(run.task)
        gradients = {names[id(parameter)]: gradient for parameter, gradient in kept.items()}
        captured["gradients"] = {name: encode({"grad": each}, tensors, name) for name, each in gradients.items()}
    return captured, tensors


def check_savable(run: Run) -> None:
    """Check before any work that Lumen's own data can be saved. Collective: every rank must call this.

    Raises:
        CheckpointError: An entry cannot be saved; the message names the entry.
    """
    run.processes.run_on_all(
        lambda: check_tensors(capture_run(run, complete=False)[0] | {"ranks": collect_logged_values(run)[1]})
    )
    if absent := [name for name, value in run.task.hparams.items() if lacks_object(name_objects(value))]:
        kind = type(run.task).__name__
        _log.info(
            "checkpoints omit objects in hparams: %s. Pass them to %s.load_from_checkpoint", ", ".join(absent), kind
        )


def check_first_state(run: Run) -> None:
    """Check that the state which the first update has created can be saved. Collective: every rank must call this.

    Raises:
        CheckpointError: An entry cannot be saved or differs between ranks; the message names the entry.
    """

    def check() -> Tensors:
        check_tensors({"optimizer": (tensors := _capture_optimizer(run)[1])})
        return tensors

    check_same_on_ranks({"optimizer": run.processes.run_on_all(check)}, run.processes)
    run.saves.checks_update = False


def check_additions(run: Run) -> None:
    """Check that the states of the task, the data module and the callbacks can be saved.

    Call this when training begins, because the states may not exist earlier. If `state_dict` or a hook fails even then,
    a warning is logged, and only a save can check the states.

    Collective: every rank must call this.

    Raises:
        CheckpointError: An entry cannot be saved; the message names its owner and key.
    """

    def check() -> None:
        try:
            states = _collect_user_states(run)
        except LumenError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            users = [each for each in frames if Frame(each.filename, each.lineno or 0, each.name).is_in_user_code]
            frame = (users or frames)[-1]
            _log.warning(
                "cannot check before training that all states can be saved: %s line %d, in %s: %r. Every save fails "
                "like this, unless training creates the missing data",
                frame.filename, frame.lineno, frame.name, error,
            )  # fmt: skip
            return
        extra = Tensors()
        for name, entry in states.items():
            encode(entry, extra, name)
        check_tensors({"extra": extra})

    run.processes.run_on_all(check)


@final
class CheckpointContents(NamedTuple):
    """Contents of one checkpoint. Afterwards the run changes only the values of its tensors.

    Attributes:
        sections: Tensors by section ("model", "optimizer", "extra") and name; the run's own, not copies. "extra"
            contains only tensors that this process writes.
        aliases: Names of tied tensors of the section "model": alias to stored name.
        state: All other data, as JSON; complete on rank 0.
        info: Plain data for the manifest, which listings show.
        trained: Names of the parameters in "model" that the optimizer updates.
    """

    sections: dict[str, Tensors]
    aliases: dict[str, str]
    state: dict[str, JSON]
    info: dict[str, Any]
    trained: list[str]


def collect_contents(run: Run, info: Mapping[str, Any]) -> CheckpointContents:
    """Collect a run's state, and let its loggers save. Collective: every rank must call this.

    Raises:
        CheckpointError: An entry is neither plain data nor a tensor; the message names its path.
        NonFiniteLoss: A loss that was not yet on the host is not finite.
        TrainingError: Ranks hold different values.
    """

    def collect() -> tuple[Any, ...]:
        run.step.nonfinite.flush()
        for logger in run.records.loggers:
            logger.save()
        return *capture_run(run), collect_logged_values(run)

    processes = run.processes
    run.records.guard.wait_for_comparison()
    sync_buffers(run.strategy, run.task)
    sections, aliases, state, (values, tensors) = processes.run_on_all(collect)
    state["ranks"] = select_by_data_rank(processes.gather_on_rank_zero((run.strategy.data_rank, values)))
    # Callbacks of other ranks may have different states, or no states.
    shared = {name: tensor for name, tensor in sections["extra"].items() if processes.rank == 0 or is_sharded(tensor)}
    sections["extra"] = shared | tensors
    shown = {name: vars(run.progress)[name] for name in INFO_COUNTERS}
    shown |= {"metrics": dict(run.values.newest), "copied": _list_unaveraged_buffers(run.task)}
    for callback in run.hooks.callbacks:  # path of the weights that validations evaluate
        if kept := callback.evaluated_state_key:
            shown["evaluated"] = f"callbacks.{callback.state_key}.{kept}"
    if taken := sorted(shown.keys() & info.keys()):
        raise CheckpointError(f"info has the entry {taken[0]!r}, which Lumen writes. Choose a different name.")
    return CheckpointContents(sections, aliases, state, shown | dict(info), _list_trained_names(run))


def get_trained_tensors(run: Run) -> tuple[dict[str, Tensors], list[str]]:
    """Return the tensors of model and optimizer (nearly all bytes of a checkpoint), and names of trained parameters."""
    return {"model": get_model_tensors(run.task)[0], "optimizer": _capture_optimizer(run)[1]}, _list_trained_names(run)


def _list_trained_names(run: Run) -> list[str]:
    """Return names of the parameters that the optimizer updates, the same on all processes."""
    names = map_parameter_names(run.task)
    return [names[id(parameter)] for parameter in run.optim.parameters]


def refuse_non_finite(collected: CheckpointContents, tensors: Mapping[str, torch.Tensor], processes: Processes) -> None:
    """Refuse to save parameters that are NaN or infinite. Collective: every rank must call this.

    Args:
        collected: The checkpoint's contents; only `trained` and the step in `info` are used.
        tensors: Tensors of the section "model" that this process writes, by name.
        processes: The processes that write the checkpoint.

    Raises:
        NonFiniteLoss: Some parameters are NaN or infinite; the message names them.
    """

    def refuse(found: Callable[[], list[list[str]]]) -> None:
        non_finite = set().union(*found())
        if names := [name for name in collected.trained if name in non_finite]:
            raise NonFiniteLoss(
                f"after step {collected.info['step']} {len(names)} parameters are not finite, although the losses are: "
                f"{', '.join(names[:8])}. Lumen does not save these parameters. Set detect_anomaly: true and look for "
                "the derivative of sqrt at 0 or for 0/0 behind torch.where, or lower the learning rate."
            )

    trained = {name: tensors[name] for name in collected.trained if name in tensors}
    processes.run_and_conclude(partial(_find_non_finite, trained), refuse)


def _find_non_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of tensors with NaN or infinity, by minimum and maximum, because `isfinite` needs more memory."""
    extremes: dict[tuple[torch.dtype, torch.device], dict[str, Any]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if tensor.numel():
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            extremes[numbers.dtype, numbers.device][name] = numbers.aminmax()
    found = [torch.stack([*chain(*ends.values())]).isfinite().view(-1, 2).all(1) for ends in extremes.values()]
    all_finite = torch.cat([each.to(found[0].device) for each in found]).tolist() if found else []  # one wait for all
    return [name for name, is_finite in zip(chain(*extremes.values()), all_finite, strict=True) if not is_finite]
