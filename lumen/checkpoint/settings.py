"""Settings of a run as plain values: optimizer, schedulers, trainer, data and modes of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from lumen.checkpoint.optimizer_state import NEUTRAL_GROUP_KEYS, get_extra_attributes
from lumen.internals.optimizers import drop_derived_state
from lumen.run.exact_reduction import describe_numerics
from lumen.run.plan import Plan, format_by_epoch
from lumen.run.run import Run
from lumen.run.scheduler_config import get_schedule_lengths
from lumen.strategies import count_training_parts

Setting: TypeAlias = bool | int | float | str | None
STEP_SIZE_KEYS = ("global_batch_size", "batches of a step")  # names that data adapters use


def get_configured_settings(run: Run) -> dict[str, Setting]:
    """Return the settings of the optimizer's groups and of the schedulers, just after they were built.

    Returns:
        Plain values by path: `groups[0].lr`, `schedulers[0].T_max`. Rates that a scheduler computes are omitted.
    """
    found: dict[str, Setting] = {}
    for number, group in enumerate(run.optim.optimizer.param_groups):
        computed = ("lr",) if "initial_lr" in group else ()  # a scheduler has already changed the rate
        options = {key: value for key, value in group.items() if key not in (*NEUTRAL_GROUP_KEYS, *computed)}
        found.update(flatten_settings(f"groups[{number}]", options))
    for place, attributes in get_extra_attributes(run.task, run.optim.optimizer).items():
        found.update(flatten_settings(f"optimizer{place and '.'}{place}", attributes))
    for number, config in enumerate(run.optim.schedulers):
        state = dict(config.scheduler.state_dict()) if hasattr(config.scheduler, "state_dict") else {}
        found[f"schedulers[{number}]"] = config.describe(run.optim.optimizer)
        found.update(flatten_settings(f"schedulers[{number}]", drop_derived_state(state)))
    return found | get_schedule_lengths(run.optim.schedulers)


def flatten_settings(where: str, value: Any) -> Iterator[tuple[str, Setting]]:
    """Yield each plain value inside nested dictionaries, lists and tuples with its path; omit floats in lists."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:  # a learning rate on its device
        value = value.item()
    if isinstance(value, Mapping) and any(not isinstance(key, str) for key in value):  # scheduler milestones
        yield where, str(sorted(value.items()))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten_settings(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            if not (isinstance(value, list) and isinstance(item, (float, torch.Tensor))):
                yield from flatten_settings(f"{where}[{number}]", item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield where, value


def get_trainer_settings(run: Run) -> dict[str, Setting]:
    """Return the trainer's arguments and the batch sizes of the training data, if they affect the computed values.

    The length of the run and all settings for display and saving are omitted.
    """
    plan = run.plan
    interval = f"{plan.val_every_s:g} s" if plan.val_every_s is not None else plan.val_every_epoch_fraction
    return {
        "precision": run.precision.name,
        **run.precision.numerics,
        **run.strategy.numerics,
        **run.saves.numerics,
        **describe_numerics(run.strategy),
        "compile": str(run.calls.compilation.setting),
        "processes": run.processes.world_size,
        "strategy": run.strategy.__class__.__name__,
        "accumulate_grad_batches": format_by_epoch(plan.accumulate),
        **_get_batching_settings(run),
        "gradient_clip_val": plan.clip_norm if plan.clip_value is None else plan.clip_value,
        "gradient_clip_algorithm": "norm" if plan.clip_value is None else "value",
        "limit_train_batches": _get_limit(plan, "train"),
        "limit_val_batches": _get_limit(plan, "validate"),
        "overfit_batches": plan.same_batches,
        "val_check_interval": interval if plan.val_every_n_steps is None else plan.val_every_n_steps,
        "check_val_every_n_epoch": plan.val_every_n_epochs,
        "reload_dataloaders_every_n_epochs": plan.reload_every_n_epochs,
    }


def _get_batching_settings(run: Run) -> dict[str, Setting]:
    """Return the sizes that divide the training data into batches and into the steps of all epochs."""
    adapter, sizes = run.loaders.train, run.plan.accumulate
    assert adapter is not None
    batching: dict[str, Setting] = {}
    for name, size in adapter.get_batching().items():
        batching[name] = size
        if name in STEP_SIZE_KEYS and size is not None and len(sizes) > 1:
            unit = size // adapter.per_step * count_training_parts(run.strategy)
            batching[name] = format_by_epoch({epoch: number * unit for epoch, number in sizes.items()})
    return batching


def _get_limit(plan: Plan, stage: str) -> int | float | None:
    limit = plan.limits.get(stage)
    return None if isinstance(limit, float) and limit == 1.0 else limit


def get_data_fingerprints(run: Run) -> dict[str, Any]:
    """Return fingerprints of the training and validation datasets, and the epoch for which they were opened."""
    assert run.loaders.train is not None
    return {
        "asked_in": run.loaders.epoch,
        "training": run.loaders.train.get_fingerprints(),
        "validation": [line for adapter in run.loaders.evaluation for line in adapter.get_fingerprints()],
    }


def get_modes(task: nn.Module) -> dict[str, list[str]]:
    """Return names of frozen parameters, of modules in eval mode and of norms that do not track their statistics."""
    return {
        "frozen": [name for name, parameter in task.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, module in task.named_modules() if not module.training],
        "untracked": [name for name, norm in task.named_modules() if not getattr(norm, "track_running_stats", True)],
    }
