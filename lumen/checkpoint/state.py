"""What a checkpoint holds and under which names: Lumen's own walk over a run, the same for every strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lumen.checkpoint.codec import decode, encode
from lumen.checkpoint.folder import find_checkpoints, newest_valid
from lumen.checkpoint.reader import Checkpoint
from lumen.checkpoint.writer import check_tensors, write_checkpoint
from lumen.console import logger as _log
from lumen.errors import CheckpointError, CheckpointMismatch
from lumen.hyperparameters import HasHyperparameters
from lumen.metrics import load_metric_state, metric_state, metrics_of
from lumen.run import Progress, Run
from lumen.task import TaskModule

Task = TypeVar("Task", bound=TaskModule)
Tensors = dict[str, torch.Tensor]


# ---------------------------------------------------------------------- names


def model_tensors(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """Parameters and persistent buffers by canonical name.

    Returns:
        The tensors, tied ones once; and for each further name of a tied tensor the name it is stored under.
    """
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **_persistent_buffers(module)}
        for name, tensor in own.items():
            if tensor is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            stored = first_name.setdefault(id(tensor), path)
            if stored == path:
                tensors[path] = tensor.detach()
            else:
                aliases[path] = stored
    return tensors, aliases


def _persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}


def _extra_state(model: nn.Module) -> dict[str, Any]:
    """Modules' own `get_extra_state`, by module name."""
    default = nn.Module.get_extra_state
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not default
    }


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def keyed(things: Iterable[Any]) -> dict[str, Any]:
    """Callbacks or loggers by their `state_key`, else their class; a second one with the same key gets `#2`."""
    found: dict[str, Any] = {}
    for thing in things:
        key = getattr(thing, "state_key", type(thing).__qualname__)
        same = sum(other.partition("#")[0] == key for other in found)
        found[f"{key}#{same + 1}" if same else key] = thing
    return found


# ---------------------------------------------------------------------- saving


def capture(run: Run) -> tuple[dict[str, Tensors], dict[str, str], dict[str, Any]]:
    """Everything a resumed run needs.

    Returns:
        Tensors by section ("model", "optimizer", "extra"), aliases of tied tensors, and the JSON state.

    Raises:
        CheckpointError: Something is neither plain data nor a tensor; the message names where it is.
    """
    task = run.task
    model, aliases = model_tensors(task)
    optimizer, extra = Tensors(), Tensors()
    added: dict[str, Any] = {}
    task.on_save_checkpoint(added)
    metrics = metrics_of(task)
    metric_names = {id(metric): name for name, metric in metrics.items()}
    parts: dict[str, Any] = {
        "seed": run.seed,
        "progress": run.progress_state(),
        "precision": run.precision.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in run.schedulers],
        "callbacks": {key: callback.state_dict() for key, callback in keyed(run.callbacks).items()},
        "loggers": {key: logger.state_dict() for key, logger in keyed(run.loggers).items()},
        "logged": run.train_metrics.state_dict(lambda metric: metric_names.get(id(metric))),
        "torchmetrics": {name: metric_state(metric) for name, metric in metrics.items()},
        "metrics": run.metrics,
        "hyperparameters": dict(task.hparams),
        "data_hyperparameters": dict(run.datamodule.hparams) if isinstance(run.datamodule, HasHyperparameters) else {},
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "extra_state": _extra_state(task),
        "task": added,
    }
    state = {name: encode(part, extra, name) for name, part in parts.items()}
    state["optimizer"] = _capture_optimizer(run, optimizer)
    return {"model": model, "optimizer": optimizer, "extra": extra}, aliases, state


def _capture_optimizer(run: Run, tensors: Tensors) -> dict[str, Any]:
    """State per parameter by its name; absent state stays absent."""
    names = _parameter_names(run.task)
    groups = [
        {key: encode(value, tensors, f"group {number}.{key}") for key, value in group.items() if key != "params"}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for number, group in enumerate(run.optimizer.param_groups)
    ]
    state = {
        names[id(parameter)]: {
            key: encode(value, tensors, f"{names[id(parameter)]}.{key}") for key, value in entries.items()
        }
        for parameter, entries in run.optimizer.state.items()
    }
    return {"class": type(run.optimizer).__qualname__, "groups": groups, "state": state}


def check_savable(run: Run) -> None:
    """Find out before any work whether everything in a run can be saved.

    Raises:
        CheckpointError: Something cannot; the message names it.
    """
    sections, _, _ = capture(run)
    check_tensors(sections)


def save(run: Run, path: Path, info: Mapping[str, Any]) -> None:
    """Write a checkpoint of a run.

    Args:
        run: At a boundary.
        path: The directory to commit; it must not exist.
        info: What a listing of runs shows: plain data.

    Raises:
        CheckpointError: It could not be written; nothing that existed was touched.
        NonFiniteLoss: A loss under way turned out not to be finite: nothing is committed past it.
    """
    run.losses.flush()
    for logger in run.loggers:
        logger.flush()
    sections, aliases, state = capture(run)
    write_checkpoint(
        path,
        sections,
        state,
        aliases=aliases,
        info={
            "step": run.progress.step,
            "epoch": run.progress.epoch,
            "micro_batches": run.progress.micro_batches,
            "metrics": dict(run.metrics),
            **info,
        },
    )


# ---------------------------------------------------------------------- loading


def find_checkpoint(where: str, folder: Path) -> Checkpoint | None:
    """The checkpoint that a `resume` or `ckpt_path` setting means.

    Args:
        where: "auto" or "last": the newest valid one of the run; "best": the one its monitor named best; otherwise
            the path of a checkpoint or of a run directory.
        folder: The checkpoints among which "auto", "last" and "best" choose.

    Returns:
        None only for "auto" without any checkpoint.

    Raises:
        CheckpointError: There is none, or the one named is damaged.
    """
    if where not in ("auto", "last", "best"):
        path = Path(where)
        if (path / "manifest.json").exists():
            return Checkpoint.open(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = newest_valid(folder, _log.warning) if folder.is_dir() else None
    if where == "best" and newest is not None:
        best = newest.info.get("best")
        if not best:
            raise CheckpointError(
                f"{folder}: no checkpoint is known as best, because no monitor was set or it was never logged. "
                "Set `monitor` of ModelCheckpoint, or use last or a path."
            )
        return Checkpoint.open(folder / Path(best).name)
    if newest is None and folder.is_dir() and find_checkpoints(folder):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; nothing was changed. Set trainer.resume to null for a new run."
        )
    if newest is None and where != "auto":
        raise CheckpointError(
            f"no valid checkpoint found in {folder}. Give the path of a checkpoint (a step-... directory) or of a run."
        )
    return newest


def load_model(model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True) -> None:
    """Copy parameters and buffers in place.

    Raises:
        CheckpointMismatch: Names (if strict), shapes or dtypes differ; nothing was changed.
    """
    tensors, aliases = model_tensors(model)
    saved = set(checkpoint.names("model"))
    complaints = []
    missing = [name for name in tensors if name not in saved and checkpoint.aliases.get(name) is None]
    unexpected = [name for name in saved if name not in tensors and name not in aliases]
    if missing:
        complaints.append(f"not in the checkpoint: {_some(missing)}")
    if unexpected:
        complaints.append(f"only in the checkpoint: {_some(sorted(unexpected))}")
    wrong = []
    sources = {}
    for name, tensor in tensors.items():
        source = name if name in saved else checkpoint.aliases.get(name)
        if source is None:
            continue
        dtype, shape = checkpoint.spec("model", source)
        if (dtype, tuple(shape)) != (tensor.dtype, tuple(tensor.shape)):
            wrong.append(f"{name}: {tuple(shape)} {dtype} saved, {tuple(tensor.shape)} {tensor.dtype} in the model")
        sources[name] = source
    if wrong or (strict and complaints):
        raise CheckpointMismatch(
            f"{checkpoint.path} is a checkpoint of another model: "
            + "; ".join([*complaints, *wrong[:8]])
            + ". Build the model with the checkpoint's hyperparameters"
            + (", or load with strict=False to leave names that differ alone." if not wrong else ".")
        )
    for complaint in complaints:
        _log.warning("%s: %s", checkpoint.path, complaint)
    with torch.no_grad():
        for name, source in sources.items():
            checkpoint.copy_into("model", source, tensors[name])
    extra = decode(checkpoint.state["extra_state"], checkpoint.tensors("extra"))
    for name, module in model.named_modules():
        if name in extra:
            module.set_extra_state(extra[name])


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def load_user_state(run: Run, checkpoint: Checkpoint) -> None:
    """Hand the task and the data module what they saved; before the optimizers are built."""
    extra = checkpoint.tensors("extra")
    run.task.on_load_checkpoint(decode(checkpoint.state["task"], extra))
    if run.datamodule is not None:
        run.datamodule.load_state_dict(decode(checkpoint.state["datamodule"], extra))


def load_run(run: Run, checkpoint: Checkpoint, *, continue_records: bool) -> None:
    """Make a run, with its model loaded and its optimizers built, go on from a checkpoint.

    Args:
        run: The run.
        checkpoint: Where it goes on.
        continue_records: The loggers go on with the records of the run that wrote the checkpoint.

    Raises:
        CheckpointMismatch: The optimizer or the schedulers are not the ones saved.
    """
    extra = checkpoint.tensors("extra")
    state = {name: decode(part, extra) for name, part in checkpoint.state.items() if name != "optimizer"}
    _load_optimizer(run, checkpoint)
    if len(run.schedulers) != len(state["schedulers"]):
        raise CheckpointMismatch(
            f"{checkpoint.path} has {len(state['schedulers'])} schedulers, the run {len(run.schedulers)}. "
            "Resume with the configuration it was saved with."
        )
    for config, saved in zip(run.schedulers, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    run.progress = Progress(**state["progress"])
    run.precision.load_state_dict(state["precision"])
    run.metrics = state["metrics"]
    metrics = metrics_of(run.task)
    for name, saved in state["torchmetrics"].items():
        if name in metrics:
            load_metric_state(metrics[name], saved)
    run.train_metrics.load_state_dict(state["logged"], metrics.__getitem__, run.strategy.device)
    _load_states(keyed(run.callbacks), state["callbacks"], checkpoint)
    if continue_records:
        _load_states(keyed(run.loggers), state["loggers"], checkpoint)


def _load_states(things: dict[str, Any], saved: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    for key, state in saved.items():
        if key in things:
            things[key].load_state_dict(state)
        elif state:
            _log.warning("%s holds the state of %s, which this run does not have", checkpoint.path, key)


def _load_optimizer(run: Run, checkpoint: Checkpoint) -> None:
    saved, tensors = checkpoint.state["optimizer"], checkpoint.tensors("optimizer")
    optimizer, names = run.optimizer, _parameter_names(run.task)
    parameters = dict(run.task.named_parameters())
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if saved["class"] != type(optimizer).__qualname__ or [group["params"] for group in saved["groups"]] != groups:
        raise CheckpointMismatch(
            f"{checkpoint.path} was saved with {saved['class']} over {[len(g['params']) for g in saved['groups']]} "
            f"parameters per group; this run has {type(optimizer).__qualname__} over {[len(g) for g in groups]}. "
            "Resume with the optimizer and the parameter groups it was saved with."
        )
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: decode(value, tensors) for key, value in values.items() if key != "params"})
    optimizer.state.clear()
    for name, entries in saved["state"].items():
        parameter = parameters[name]
        moves_with_it = {"fused", "capturable"} & {
            key for group in optimizer.param_groups for key, value in group.items() if value is True
        }
        optimizer.state[parameter] = {
            key: _placed(decode(value, tensors), parameter, plain=key == "step" and not moves_with_it)
            for key, value in entries.items()
        }


def _placed(value: Any, parameter: nn.Parameter, *, plain: bool) -> Any:
    return value if plain or not isinstance(value, torch.Tensor) else value.to(parameter.device)


def load_task(kind: type[Task], path: Path, *, strict: bool, overrides: Mapping[str, Any]) -> Task:
    """Build a task from a checkpoint's hyperparameters and load its parameters; see `load_from_checkpoint`."""
    checkpoint = find_checkpoint(str(path), path)
    assert checkpoint is not None
    hyperparameters = decode(checkpoint.state["hyperparameters"], checkpoint.tensors("extra")) | dict(overrides)
    try:
        task = kind(**hyperparameters)
    except TypeError as error:
        raise CheckpointMismatch(
            f"{kind.__name__} cannot be built from the hyperparameters of {checkpoint.path} "
            f"({', '.join(hyperparameters) or 'none saved'}): {error}. Call save_hyperparameters() in its __init__, "
            "or give the missing arguments to load_from_checkpoint."
        ) from error
    task.configure_model()
    load_model(task, checkpoint, strict=strict)
    task.on_load_checkpoint(decode(checkpoint.state["task"], checkpoint.tensors("extra")))
    return task
