"""What a checkpoint holds and under which names: Lumen's own walk over a run, the same for every strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.checkpoint.codec import encode
from lumen.checkpoint.ranks import own_values
from lumen.checkpoint.sharded import own_part
from lumen.checkpoint.weights import Tensors, model_tensors
from lumen.checkpoint.writer import check_tensors, write_checkpoint
from lumen.errors import NonFiniteLoss
from lumen.hyperparameters import HasHyperparameters
from lumen.run import Run

# ---------------------------------------------------------------------- names


def _extra_state(model: nn.Module) -> dict[str, Any]:
    """Modules' own `get_extra_state`, by module name."""
    default = nn.Module.get_extra_state
    return {
        name: module.get_extra_state()
        for name, module in model.named_modules()
        if type(module).get_extra_state is not default
    }


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of parameters by their id."""
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


def logger_states(run: Run) -> dict[str, Any]:
    """Where the records of all loggers stand, of those too that an earlier part of the run had."""
    return run.absent_records | {key: logger.state_dict() for key, logger in keyed(run.loggers).items()}


def capture(run: Run) -> tuple[dict[str, Tensors], dict[str, str], dict[str, Any]]:
    """Everything a resumed run needs, but for what each process has by itself.

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
    parts: dict[str, Any] = {
        "seed": run.seed,
        "progress": run.progress_state(),
        "precision": run.precision.state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in run.schedulers],
        "configured": run.configured,
        "callbacks": {key: callback.state_dict() for key, callback in keyed(run.callbacks).items()},
        "loggers": logger_states(run) if run.records is None else run.records,
        "metrics": run.metrics,
        "hyperparameters": dict(task.hparams),
        "data_hyperparameters": dict(run.datamodule.hparams) if isinstance(run.datamodule, HasHyperparameters) else {},
        "datamodule": run.datamodule.state_dict() if run.datamodule is not None else {},
        "extra_state": _extra_state(task),
        "modes": {
            "frozen": [name for name, parameter in task.named_parameters() if not parameter.requires_grad],
            "evaluating": [name for name, module in task.named_modules() if not module.training],
        },
        "task": added,
    }
    state = {name: encode(part, extra, name) for name, part in parts.items()}
    state["optimizer"] = _capture_optimizer(run, optimizer)
    return {"model": model, "optimizer": optimizer, "extra": extra}, aliases, state


def _capture_optimizer(run: Run, tensors: Tensors) -> dict[str, Any]:
    """State per parameter by its name; absent state stays absent."""
    names = parameter_names(run.task)
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
    return {"class": kind_of(run.optimizer), "groups": groups, "state": state}


def kind_of(optimizer: Optimizer) -> str:
    """The class of an optimizer, with that of the one inside it."""
    name, inner = type(optimizer).__qualname__, getattr(optimizer, "optimizer", None)
    return f"{name}({kind_of(inner)})" if isinstance(inner, Optimizer) else name


def check_savable(run: Run) -> None:
    """Find out before any work whether everything in a run can be saved. Collective: every rank must call this.

    Raises:
        CheckpointError: Something cannot; the message names it.
    """

    def check() -> None:
        sections, _, _ = capture(run)
        check_tensors(sections | {"ranks": own_values(run)[1]})

    run.strategy.processes.together(check)


def save(run: Run, path: Path, info: Mapping[str, Any]) -> None:
    """Write a checkpoint of a run. Collective: every rank must call this.

    Args:
        run: At a boundary.
        path: The directory to commit; it must not exist.
        info: What a listing of runs shows: plain data.

    Raises:
        CheckpointError: It could not be written; nothing that existed was touched.
        NonFiniteLoss: A loss under way or a parameter is not finite: nothing is committed past it.
    """

    def collect() -> tuple[Any, ...]:
        run.losses.flush()
        _refuse_non_finite(run)
        for logger in run.loggers:
            logger.flush()
        return *capture(run), own_values(run)

    processes = run.strategy.processes
    run.strategy.sync_buffers(run.task)
    sections, aliases, state, own = processes.together(collect)
    state["ranks"] = []
    for values, tensors in processes.gather(own):
        state["ranks"].append(values)
        sections["extra"] |= tensors
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
        processes=processes,
    )


def _refuse_non_finite(run: Run) -> None:
    finite = [own_part(parameter.detach()).isfinite().all() for parameter in run.parameters]
    if torch.stack(finite).all():
        return
    names = parameter_names(run.task)
    broken = [names[id(parameter)] for parameter, whole in zip(run.parameters, finite, strict=True) if not whole]
    raise NonFiniteLoss(
        f"after step {run.progress.step} {len(broken)} parameters are not finite, although its losses are: "
        f"{', '.join(broken[:8])}. No checkpoint is made of them. Look for the derivative of sqrt at 0 or 0/0 behind "
        "torch.where with detect_anomaly: true, or for a learning rate that is too high."
    )
