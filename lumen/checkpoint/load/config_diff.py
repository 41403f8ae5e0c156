"""Compares a resumed run with its checkpoint, and warns of or refuses differences before it trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lumen.checkpoint.format.codec import Tensors, decode, encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.weights_source import Part, without
from lumen.checkpoint.optimizer_state import attributes_of
from lumen.console import logger as _log
from lumen.errors import CheckpointError, DataError
from lumen.internals.optimizers import set_by_hand
from lumen.run.plan import Plan, by_epoch
from lumen.run.run import Run
from lumen.run.scheduler_config import lengths_of
from lumen.task.hyperparameters import recorded_hparams

Setting: TypeAlias = bool | int | float | str | None
HOW_TO_STEP = ("params", "fused", "foreach", "capturable", "differentiable")  # how a step is computed, not which step
STEP_SIZES = ("global_batch_size", "batches of a step")  # what adapters call them
_ABSENT = object()


def configured(run: Run) -> dict[str, Setting]:
    """The settings of the optimizer's groups and the schedulers, when they have just been built.

    Returns:
        Plain values by path: `groups[0].lr`, `schedulers[0].T_max`; without a scheduler's rates, which follow from lr.
    """
    found: dict[str, Setting] = {}
    for number, group in enumerate(run.optim.optimizer.param_groups):
        follows = ("lr",) if "initial_lr" in group else ()  # a scheduler has moved it by now
        own = {key: value for key, value in group.items() if key not in (*HOW_TO_STEP, *follows)}
        found.update(settings(f"groups[{number}]", own))
    for place, attributes in attributes_of(run.task, run.optim.optimizer).items():
        found.update(settings(f"optimizer{place and '.'}{place}", attributes))
    for number, config in enumerate(run.optim.schedulers):
        state = dict(config.scheduler.state_dict()) if hasattr(config.scheduler, "state_dict") else {}
        found[f"schedulers[{number}]"] = config.describe(run.optim.optimizer)
        found.update(settings(f"schedulers[{number}]", set_by_hand(state)))
    return found | lengths_of(run.optim.schedulers)


def settings(where: str, value: Any) -> Iterator[tuple[str, Setting]]:
    """Every plain value inside nested dictionaries, lists and tuples, with its path; floats in lists are left out."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # a learning rate on its device
        value = value.item()
    if isinstance(value, Mapping) and any(not isinstance(key, str) for key in value):  # milestones
        yield where, str(sorted(value.items()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from settings(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            if not (isinstance(value, list) and isinstance(item, (float, torch.Tensor))):
                yield from settings(f"{where}[{number}]", item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield where, value


def differences(old: Mapping[str, Setting], new: Mapping[str, Setting]) -> dict[str, tuple[Setting, Setting]]:
    """Settings that both have with different values: (old, new) by path."""
    return {where: (old[where], new[where]) for where in new if where in old and old[where] != new[where]}


def changed_hyperparameters(run: Run, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Hyperparameters of the task and the data module that differ from a checkpoint's.

    Args:
        run: The run, with its task and data module.
        checkpoint: The checkpoint that it is resumed from.

    Returns:
        The checkpoint's value and the run's by name: `model.lr`, `data.batch_size`; None where one has no such name.
    """
    owners = {"model": ("hyperparameters", run.task), "data": ("data_hyperparameters", run.loaders.datamodule)}
    changed: dict[str, tuple[Any, Any]] = {}
    for prefix, (entry, owner) in owners.items():
        old = decode(checkpoint.state[entry], checkpoint.tensors("extra"))
        new = {} if owner is None else recorded_hparams(owner)
        for name in dict.fromkeys([*old, *new]):
            values = old.get(name, _ABSENT), new.get(name, _ABSENT)
            if _comparable(values[0]) != _comparable(values[1]):
                changed[f"{prefix}.{name}"] = old.get(name), new.get(name)
    return changed


def _comparable(value: Any) -> Any:
    """Plain data in a form that is equal if it is saved as the same JSON; for NaN, tensors and arrays too."""
    try:
        return encode(value, tensors := Tensors(), ""), [(tensor.dtype, tensor.tolist()) for tensor in tensors.values()]
    except CheckpointError:  # it was not saved, then
        return value


def trainer_settings(run: Run) -> dict[str, Setting]:
    """The trainer's arguments, and how the training data is cut, as far as they change what is computed.

    Left out: the length of the run, and what is shown and saved.
    """
    plan = run.plan
    interval = f"{plan.val_every_s:g} s" if plan.val_every_s is not None else plan.val_every_epoch_fraction
    return {
        "precision": run.precision.name,
        **run.precision.numerics,
        **run.strategy.numerics,
        **run.saves.switches,
        "compile": str(run.calls.compilation.setting),
        "processes": run.processes.world_size,
        "strategy": run.strategy.__class__.__name__,
        "accumulate_grad_batches": by_epoch(plan.accumulate),
        **_cut(run),
        "gradient_clip_val": plan.clip_norm if plan.clip_value is None else plan.clip_value,
        "gradient_clip_algorithm": "norm" if plan.clip_value is None else "value",
        "limit_train_batches": _limit(plan, "train"),
        "limit_val_batches": _limit(plan, "validate"),
        "overfit_batches": plan.same_batches,
        "val_check_interval": interval if plan.val_every_n_steps is None else plan.val_every_n_steps,
        "check_val_every_n_epoch": plan.val_every_n_epochs,
        "reload_dataloaders_every_n_epochs": plan.reload_every_n_epochs,
    }


def _cut(run: Run) -> dict[str, Setting]:
    """How the training data is cut into batches, and into the steps of all epochs."""
    adapter, sizes = run.loaders.train, run.plan.accumulate
    assert adapter is not None
    cut: dict[str, Setting] = {}
    for name, size in adapter.cut().items():
        cut[name] = size
        if name in STEP_SIZES and size is not None and len(sizes) > 1:
            unit = size // adapter.per_step * run.strategy.data_world_size
            cut[name] = by_epoch({epoch: number * unit for epoch, number in sizes.items()})
    return cut


def _limit(plan: Plan, stage: str) -> int | float | None:
    limit = plan.limits.get(stage)
    return None if isinstance(limit, float) and limit == 1.0 else limit


def data_read(run: Run) -> dict[str, Any]:
    """Fingerprints of the data sets of training and validation, and the epoch for which they were opened."""
    assert run.loaders.train is not None
    return {
        "asked_in": run.loaders.epoch,
        "training": run.loaders.train.identity(),
        "validation": [line for adapter in run.loaders.evaluation for line in adapter.identity()],
    }


def modes_of(task: nn.Module) -> dict[str, list[str]]:
    """Names of frozen parameters, of modules in eval mode and of norms that do not track their statistics."""
    return {
        "frozen": [name for name, parameter in task.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, module in task.named_modules() if not module.training],
        "untracked": [name for name, norm in task.named_modules() if not getattr(norm, "track_running_stats", True)],
    }


_MEANS = {"processes", "accumulate_grad_batches"}  # of making steps as large as they are


def compare(run: Run, checkpoint: Checkpoint, parts: frozenset[Part]) -> None:
    """Warn of settings and data that differ from the checkpoint's, now that the loaders are known.

    Collective: every rank must call this.

    Raises:
        DataError: The run would go on in the middle of an epoch of other data.
    """
    if "progress" in parts:
        run.processes.together(partial(_compare_data, run, checkpoint, exact="data" in parts))
        _compare_settings(run, checkpoint)


def listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The saved and the present value of each setting that differs, in words."""
    shown = [f"{name} {_short(old)} there, {_short(new)} here" for name, (old, new) in changed.items()]
    return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _compare_settings(run: Run, checkpoint: Checkpoint) -> None:
    saved, here = checkpoint.state["settings"], trainer_settings(run)
    pairs = {name: (saved.get(name), here.get(name)) for name in dict.fromkeys([*saved, *here]) if name != "strategy"}
    changed = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    if not any(name in changed for name in STEP_SIZES):  # the same step, made by other means
        _tell_means(checkpoint, saved, here)
        changed = {name: values for name, values in changed.items() if name not in _MEANS}
    if changed:
        advice = " global_batch_size makes a step one size whatever the processes." if "processes" in changed else ""
        _log.warning(
            "settings are not those of %s: %s. Those here count from now on.%s",
            checkpoint.path, listed(changed), advice,
        )  # fmt: skip


def _tell_means(checkpoint: Checkpoint, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say by what other means steps are made now that are as large as they were."""
    names = ("processes", "strategy", "batch_size", "precision")
    values = {name: (saved.get(name), here.get(name)) for name in names}
    values["micro-batches of a step on each process"] = _micro_batches(saved), _micro_batches(here)
    changed = [f"{name}: {old} there, {new} here" for name, (old, new) in values.items() if None not in (old, new)
               and old != new]  # fmt: skip
    if changed:
        _log.info("the same steps as %s by other means: %s", checkpoint.path.name, "; ".join(changed))


def _micro_batches(settings: Mapping[str, Any]) -> int | None:
    """How many micro-batches a process takes in a step, at most; None where steps are not of one known size."""
    size, batch, processes = (settings.get(name) for name in ("global_batch_size", "batch_size", "processes"))
    batches = -(-size // batch) if isinstance(size, int) and isinstance(batch, int) else settings.get(STEP_SIZES[1])
    return -(-batches // processes) if isinstance(batches, int) and isinstance(processes, int) else None


def _compare_data(run: Run, checkpoint: Checkpoint, *, exact: bool) -> None:
    saved, here = checkpoint.state["data"], data_read(run)
    if saved["asked_in"] != here["asked_in"]:  # new loaders were due
        return
    training, validation = (_others(saved[of], here[of]) for of in ("training", "validation"))
    if training and exact and run.progress.batches:
        raise DataError(
            f"this run goes on in the middle of an epoch of other training data than {checkpoint.path} had: "
            f"{training}. Give it the data it had (random_split the seed of its generator). To train on other data, "
            f"{without(checkpoint, 'data')}: its epoch begins anew."
        )
    for what, found in {"training": training, "validation": validation}.items():
        if found:
            _log.warning(
                "the %s data is not what %s had: %s. What was held out may have been trained on already, and the "
                "reverse; values before and after cannot be compared. If that is not meant, give it the data it had "
                "(random_split the seed of its generator).",
                what, checkpoint.path, found,
            )  # fmt: skip


def _others(saved: Sequence[str | None], here: Sequence[str | None]) -> str:
    """The first fingerprint that differs, in words; "" if none does, or the numbers of loaders differ."""
    pairs = zip(saved, here, strict=True) if len(saved) == len(here) else ()
    return next((f"{old} there, {new} here" for old, new in pairs if None not in (old, new) and old != new), "")


def compare_modes(run: Run, checkpoint: Checkpoint) -> None:
    """Log where the task was built with other frozen parameters or modes than at the start; the checkpoint's count.

    Called before these are restored. What a callback has frozen since the start cannot be told from a change of code.
    """
    words = {"frozen": ("trainable", "frozen"), "evaluating": ("in train mode", "in eval mode")}
    changed: dict[str, tuple[str, str]] = {}
    for kind, word in words.items():
        began, here, goes_on = (
            set(of[kind]) for of in (checkpoint.state["built"], run.optim.built, checkpoint.state["modes"])
        )
        for name in sorted((began ^ here) & (here ^ goes_on)):
            changed[name or type(run.task).__name__] = word[name in goes_on], word[name in here]
    if changed:
        _log.warning(
            "the task is built otherwise than when the run of %s began: %s. The checkpoint's counts, so that it goes "
            "on exactly. For the task's own, %s",
            checkpoint.path, listed(changed), without(checkpoint, "progress", "data"),
        )  # fmt: skip
    run.optim.keep_modes(checkpoint.state["built"])
