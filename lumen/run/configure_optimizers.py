"""Normalization and checks of what `configure_optimizers` returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import isclass
from itertools import permutations
from typing import Any

from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lumen.console import logger as _log
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import describe_type
from lumen.internals.optimizers import StepGuard
from lumen.optim import MultiOptimizer, Schedule, Warmup, needs_closure
from lumen.precision import Precision
from lumen.run.gradients import list_parameters
from lumen.run.scheduler_config import SchedulerConfig
from lumen.task.hooks import is_overridden
from lumen.task.materialize import update_references
from lumen.task.task_module import TaskModule

_ABSOLUTE_SCHEDULERS = (
    Schedule,
    lr_scheduler.LambdaLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
)
_KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name")
_WARMUP = ("warmup_steps", "warmup_epochs", "warmup_start", "warmup_factor")
_ACCEPTED = {*_KEYS, *_WARMUP, "reduce_on_plateau"}


def build_optimizers(
    task: TaskModule, configure: Callable[[], Any], precision: Precision
) -> tuple[Optimizer, list[SchedulerConfig]]:
    """Call the user's function and check what it returned.

    Raises:
        ConfigError: The function returned no optimizer; or the optimizer has no parameters, has parameters of a
            different model, or does not work with the precision; or a scheduler or its entry cannot work.
    """
    try:
        returned = configure()
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ConfigError(
            f"configure_optimizers of {type(task).__name__} built an optimizer without parameters. "
            "Give it self.parameters(); if layers are built in configure_model, build the optimizer from them."
        ) from error
    optimizers, schedulers = _unpack_returned(returned)
    for each in optimizers:
        if each is None:
            raise ConfigError(
                "configure_optimizers returned None, but fit needs an optimizer. To train nothing, set "
                "automatic_optimization = False, and return torch.optim.SGD(self.parameters(), lr=0.0)."
            )
        if not isinstance(each, Optimizer) or not hasattr(each, "param_groups"):
            raise ConfigError(
                f"configure_optimizers returned {describe_type(each)}; expected a torch.optim.Optimizer, "
                '([optimizer], [scheduler]), or {"optimizer": ..., "lr_scheduler": ...}.'
            )
    for each in (inside for outer in optimizers for inside in getattr(outer, "optimizers", [outer])):
        if callable(getattr(each, "train", None)) and callable(getattr(each, "eval", None)):
            raise ConfigError(
                f"{type(each).__name__} has methods train() and eval(), which exchange the parameters. Lumen would "
                "validate, save and export different parameters. Use another optimizer with lumen.EMA, which "
                "validates, saves and exports its average."
            )
    is_manual = not task.automatic_optimization
    if len(optimizers) != 1 and not (is_manual and optimizers):
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers; automatic optimization has exactly one. "
            "To call step() in training_step, set self.automatic_optimization = False in __init__. To step all "
            "together, return lumen.optim.MultiOptimizer([...]). For several learning rates, use parameter groups of "
            "one optimizer."
        )
    optimizer = optimizers[0] if len(optimizers) == 1 else MultiOptimizer(optimizers, by_hand=True)
    for each in filter(needs_closure, optimizers if precision.handles_overflow else ()):
        raise make_closure_in_fp16_error(each)
    check_parameters_held(task, optimizer)
    held = {*map(id, list_parameters(optimizer))}
    if left_out := [name for name, each in task.named_parameters() if each.requires_grad and id(each) not in held]:
        _log.warning(
            "the optimizer does not have %d trainable parameters, which will not change: %s. Give the optimizer these "
            "parameters, or set their requires_grad to False, which saves the memory of their gradients",
            len(left_out), ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else ""),
        )  # fmt: skip
    configs = (
        _list_manual_schedulers(schedulers) if is_manual else _pair_with_warmup(_iterate_configs(task, schedulers))
    )
    for config in configs:
        moved = getattr(config.scheduler, "optimizer", optimizer)
        if not {*map(id, moved.param_groups)} <= {*map(id, optimizer.param_groups)}:
            raise ConfigError(
                f"lr_scheduler: the {type(config.scheduler).__name__} sets the learning rates of a different optimizer "
                f"than the {type(optimizer).__name__} that trains. Build the scheduler with the optimizer that trains."
            )
    if not is_manual:
        _refuse_overwriting([config.scheduler for config in configs])
    return optimizer, configs


def make_closure_in_fp16_error(optimizer: Optimizer) -> ConfigError:
    """Return the error for an optimizer that evaluates the loss several times, under a gradient scaler."""
    return ConfigError(
        f"{type(optimizer).__name__} evaluates the loss several times in one step, which a gradient scaler does not "
        "support: it could not skip a step halfway. Use precision: bf16 or fp32."
    )


def _list_manual_schedulers(schedulers: Sequence[Any]) -> list[SchedulerConfig]:
    """Return the schedulers that the task steps in manual optimization."""
    configs, ignored_keys = [], set()
    for entry in schedulers:
        options = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
        ignored_keys |= set(options) - {"scheduler", "name"}
        configs.append(SchedulerConfig(_check_scheduler(options.get("scheduler")), "hand", name=options.get("name")))
    if ignored_keys:
        _log.warning(
            "lr_scheduler: configure_optimizers returned %s, which manual optimization ignores. Call step() of each "
            "scheduler in self.lr_schedulers() in training_step or a hook",
            ", ".join(sorted(ignored_keys)),
        )
    return configs


def _unpack_returned(returned: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if isinstance(returned, Mapping):
        if "optimizer" not in returned or set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
            hints = {"scheduler": 'Write "lr_scheduler" instead of "scheduler".', "lr_schedulers": "Return "
                     "([optimizer], [scheduler, ...]) for several schedulers.", "frequency": 'The frequency of a '
                     'scheduler belongs into {"scheduler": ..., "frequency": ...}; optimizers take turns in manual '
                     "optimization."}  # fmt: skip
            advice = [hint for key, hint in hints.items() if key in returned]
            raise ConfigError(
                f"configure_optimizers returned a dictionary with the keys {', '.join(map(str, returned))}; expected "
                f'"optimizer" and optionally "lr_scheduler" and "monitor". {" ".join(advice)}'.rstrip()
            )
        scheduler = returned.get("lr_scheduler")
        if scheduler is not None and "monitor" in returned and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            return returned[0], returned[1] if isinstance(returned[1], (list, tuple)) else [returned[1]]
        if returned and all(isinstance(each, Mapping) for each in returned):
            unpacked = [_unpack_returned(each) for each in returned]
            return [each for some, _ in unpacked for each in some], [each for _, some in unpacked for each in some]
        return returned, []
    return [returned], []


def _iterate_configs(task: TaskModule, schedulers: Iterable[Any]) -> Iterator[SchedulerConfig]:
    """Yield the schedulers of the user's entries; two for an entry whose warm-up has a separate interval.

    A key `warmup_steps` or `warmup_epochs` becomes a `Warmup` around the scheduler.
    """
    for entry in schedulers:
        options = dict(entry) if isinstance(entry, Mapping) else {"scheduler": entry}
        if unknown := set(options) - _ACCEPTED:
            raise ConfigError(
                f"lr_scheduler: unknown key {', '.join(sorted(unknown))}; known keys: {', '.join((*_KEYS, *_WARMUP))}."
            )
        if "scheduler" not in options:
            raise ConfigError(f"lr_scheduler: the key 'scheduler' is missing; found {', '.join(options) or 'no key'}.")
        _check_scheduler(options["scheduler"], needs_step=not is_overridden(task, "lr_scheduler_step"))
        reduces = options.pop("reduce_on_plateau", None)  # Lightning needs this key, Lumen does not.
        warmup = [options.pop(key, None) for key in _WARMUP]
        config = SchedulerConfig(**options)
        user_warmup = config.scheduler if isinstance(config.scheduler, Warmup) else None
        inner_scheduler = config.scheduler if user_warmup is None else user_warmup.scheduler
        _check_config(config, inner_scheduler, reduces=bool(reduces))
        if not isinstance(inner_scheduler, ReduceLROnPlateau):
            config.monitor = None
        if (first := _make_warmup(config, *warmup)) is not None:
            yield from (first, config)
        elif user_warmup is not None and config.monitor:
            yield SchedulerConfig(user_warmup, config.interval)
            yield SchedulerConfig(inner_scheduler, "epoch", config.frequency, config.monitor, config.strict)
        else:
            yield config


def _make_warmup(
    config: SchedulerConfig, steps: int | None, epochs: int | None, start: float | None, factor: Any
) -> SchedulerConfig | None:
    """Return the warm-up before a scheduler; None if no key sets one."""
    name, length = ("warmup_steps", steps) if steps else ("warmup_epochs", epochs)
    if steps and epochs:
        raise ConfigError(
            f"lr_scheduler: warmup_steps = {steps} and warmup_epochs = {epochs} both set the length of the warm-up. "
            "Remove one of the two."
        )
    if factor is not None and not length:
        raise ConfigError("lr_scheduler: warmup_factor is for a warm-up. Set warmup_steps or warmup_epochs too.")
    if factor is not None and start is not None:
        raise ConfigError(
            "lr_scheduler: warmup_start and warmup_factor both set the beginning of the warm-up. Remove one of the two."
        )
    if not length:
        return None
    if (warms := isinstance(config.scheduler, Warmup)) or config.interval == "token":
        raise ConfigError(
            f"lr_scheduler: {name} = {length}, but this {type(config.scheduler).__name__} "
            f"{'warms up itself' if warms else 'counts tokens'}. Remove {name}; lumen.optim.Warmup counts in the unit "
            "of its interval."
        )
    if start is None:  # With a start of 0 the whole first epoch would train nothing.
        start = 1 / (length + 1) if not steps and length > 0 else 0.0
    return SchedulerConfig(Warmup(config.scheduler, length, start, factor), "step" if steps else "epoch")


def _check_config(config: SchedulerConfig, inner_scheduler: Any, *, reduces: bool) -> None:
    if config.interval not in ("step", "epoch", "token"):
        raise ConfigError(f'lr_scheduler: interval must be "step", "epoch" or "token", found {config.interval!r}.')
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigError(f"lr_scheduler: frequency must be an integer >= 1, found {config.frequency!r}.")
    if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None:
        raise _make_no_monitor_error()
    if config.interval == "token" and not isinstance(inner_scheduler, Schedule):
        raise ConfigError(
            f'lr_scheduler: {type(inner_scheduler).__name__} counts its steps, so its interval cannot be "token". '
            "Use a schedule of lumen.optim (linear, cosine, inverse_sqrt, wsd), whose lengths are then tokens."
        )
    if config.interval == "token" and config.frequency != 1:
        raise ConfigError(f'lr_scheduler: interval "token" moves at every step; found frequency {config.frequency}.')
    if reduces and not isinstance(inner_scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"lr_scheduler: reduce_on_plateau is set for {type(inner_scheduler).__name__}, but only a "
            "ReduceLROnPlateau gets values of its monitor. Remove reduce_on_plateau, or derive the scheduler from "
            "ReduceLROnPlateau."
        )


def _check_scheduler(scheduler: Any, *, needs_step: bool = False) -> Any:
    """Return a scheduler; raise an error for anything else."""
    if isclass(scheduler):
        raise ConfigError(
            f"lr_scheduler: expected a scheduler, found {describe_type(scheduler)}. Create one: "
            f"{scheduler.__name__}(optimizer, ...)."
        )
    methods = ["state_dict", "load_state_dict", *["step"] * needs_step]
    if missing := [name for name in methods if not hasattr(scheduler, name)]:
        advice = " To call another method, define lr_scheduler_step in the task." if missing == ["step"] else ""
        raise ConfigError(
            f"lr_scheduler: expected a scheduler, found {type(scheduler).__name__}, which has no {missing[0]}.{advice}"
        )
    return scheduler


def _make_no_monitor_error() -> ConfigError:
    return ConfigError(
        "lr_scheduler: ReduceLROnPlateau needs the name of a logged value. "
        'Return {"scheduler": ..., "monitor": "val_loss"} for the scheduler.'
    )


def _pair_with_warmup(entries: Iterable[SchedulerConfig]) -> list[SchedulerConfig]:
    """Let a scheduler with its own entry wait for the warm-up around it, and then step as its entry says.

    The scheduler comes before its warm-up, so that the update that ends the warm-up does not step the scheduler yet. A
    ReduceLROnPlateau keeps its place, because it watches its metric during the warm-up.
    """
    configs = [*entries]
    by_scheduler = {id(config.scheduler): config for config in configs}
    if len(by_scheduler) < len(configs):
        raise ConfigError("lr_scheduler: a scheduler has two entries and would move twice. Remove one entry.")
    for config in list(configs):
        if not isinstance(warmup := config.scheduler, Warmup):
            continue
        inner_config = by_scheduler.get(id(warmup.scheduler))
        if isinstance(warmup.scheduler, ReduceLROnPlateau):
            if inner_config is None:
                raise _make_no_monitor_error()
        elif inner_config is not None:
            warmup.leave_steps()
            inner_config.warmup = warmup
            configs.remove(inner_config)
            configs.insert(configs.index(config), inner_config)
    return configs


def _refuse_overwriting(schedulers: Sequence[Any]) -> None:
    """Refuse a schedule that overwrites learning rates which a second scheduler changes too."""
    for one, other in permutations(schedulers, 2):
        if not isinstance(one, _ABSOLUTE_SCHEDULERS) or getattr(other, "scheduler", None) is one:
            continue
        if {*map(id, one.optimizer.param_groups)} & {*map(id, getattr(other, "optimizer", one.optimizer).param_groups)}:
            raise ConfigError(
                f"lr_scheduler: each move of the {type(one).__name__} overwrites the learning rates that the "
                f"{type(other).__name__} has set. For a warm-up, set warmup_steps or warmup_epochs of the scheduler "
                "after it, with a warmup_factor. For other schedulers in sequence, use SequentialLR."
            )


def check_parameters_held(task: nn.Module, optimizer: Optimizer) -> None:
    """Check that an optimizer holds only parameters of the task, after references to replaced ones are updated.

    Raises:
        ConfigError: The optimizer holds other parameters, which would be neither saved nor equal on all processes; or
            holds a parameter twice.
    """
    update_references(optimizer)
    if unknown_count := len({*map(id, list_parameters(optimizer))} - {*map(id, task.parameters())}):
        raise ConfigError(
            f"the optimizer holds {unknown_count} parameters that are not the task's. Build the optimizer in "
            "configure_optimizers, from self.parameters(). A parameter that a hook adds to the optimizer must be an "
            "attribute of the task, or of a module in the task."
        )


_LEAVE_ADVICE = (
    "but Lumen calls step once in each training step: the parameters would move twice. Remove step, zero_grad and "
    "backward from training_step and the hooks, and return the loss. To call step yourself, set "
    "automatic_optimization = False. To change gradients, use on_before_optimizer_step; for several micro-batches in "
    "one step, set accumulate_grad_batches; to change the update, write a subclass of the optimizer."
)
_TAKE_ADVICE = (
    "but Lumen must sum gradients over the processes, skip updates that overflow in fp16, and count steps. Call "
    "step() of the optimizer that self.optimizers() returns."
)


def guard_steps(optimizer: Optimizer, is_allowed: Callable[[], bool], *, is_manual: bool) -> StepGuard:
    """Raise an error when user code calls an optimizer's `step` where Lumen makes the step.

    Args:
        optimizer: The optimizer that trains the task.
        is_allowed: Function that returns True if a call is allowed; called at each `step` that is not by
            `get_unwrapped_step`.
        is_manual: True in manual optimization.
    """

    def refuse() -> None:
        if not is_allowed():
            raise TrainingError(
                f"{type(optimizer).__name__}.step was called in a training step, "
                + (_TAKE_ADVICE if is_manual else _LEAVE_ADVICE)
            )

    return StepGuard(optimizer, refuse)
