"""Optimizer and learning-rate schedulers built from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from jsonargparse import Namespace

from lumen.cli.classes import find_class
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.optim import Lookahead, decay_groups, layer_decay_groups
from lumen.task.hooks import is_overridden
from lumen.task.task_module import TaskModule


@final
@dataclass
class Schedule:
    """Interval and warm-up of lr_scheduler.

    Args:
        interval: The unit that lr_scheduler counts; tokens are the weights of the steps, for the schedules of
            lumen.optim.
        frequency: The number of units between two changes of the learning rate.
        monitor: The logged name that ReduceLROnPlateau reads.
        strict: True if a monitor that was not logged is an error.
        warmup_steps: Steps of linear warm-up before lr_scheduler, whatever the interval.
        warmup_epochs: Epochs of warm-up, instead of steps.
        warmup_start: The first learning rate of the warm-up, as a fraction. Unset: 0; with warmup_epochs 1 /
            (warmup_epochs + 1), so that the first epoch trains.
        warmup_factor: A function, as module.name, of the steps or epochs so far; it returns the fraction, instead of a
            linear warm-up.
    """

    interval: Literal["step", "epoch", "token"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    warmup_steps: int = 0
    warmup_epochs: int = 0
    warmup_start: float | None = None
    warmup_factor: Callable[[float], float] | None = None


@final
@dataclass
class ParameterGroups:
    """Parameter groups of optimizer: parameters without weight decay, and learning rates by layer.

    Args:
        no_decay: Parameters whose weight_decay is 0: "dimension", parameters of less than two dimensions; "module
            type", biases, norms, embeddings and bare parameters such as pos_emb; names with wildcards; or, together
            with decay, names of classes. Unset: no parameters.
        decay: Classes of the modules whose parameters decay, except biases; no_decay must name every other class.
        layer_decay: The learning rate of each layer, divided by the rate of the layer above, in (0, 1].
        blocks: The layers, for layer_decay: the name of the module that holds them, or their names, lowest first.
        embeddings: The modules below the blocks. Unset: the modules defined before the blocks.
    """

    no_decay: Literal["dimension", "module type"] | list[str] | None = None
    decay: list[str] | None = None
    layer_decay: float | None = None
    blocks: str | list[str] | None = None
    embeddings: list[str] | None = None


@final
@dataclass
class LookaheadOptions:
    """Lookahead around optimizer; see lumen.optim.Lookahead.

    Args:
        k: Fast steps per slow step. Unset: no Lookahead.
        alpha: The fraction of the way from slow to fast weights in a slow step, in (0, 1].
    """

    k: int | None = None
    alpha: float = 0.5


def configure_optimizers(config: Namespace, task: TaskModule, combine: Callable[..., Any] | None) -> Any:
    """Build the optimizer and schedulers of the settings, and return them like `configure_optimizers` of a task.

    Args:
        config: The settings of the command.
        task: The task that the optimizer trains.
        combine: The method `configure_optimizers` of a script's class, which decides what is returned; or None.

    Raises:
        ConfigError: Two settings contradict each other, or a class does not accept an argument.
    """
    if is_overridden(task, "configure_optimizers"):
        _log.info("optimizer: %s, instead of the task's configure_optimizers", config.optimizer.class_path)
    optimizer = _build_node(config.optimizer, _make_parameter_groups(config, task))
    if config.lookahead.k is not None:
        optimizer = Lookahead(optimizer, config.lookahead.k, config.lookahead.alpha)
    entries = [{**entry, "scheduler": _build_node(entry["scheduler"], optimizer)} for entry in _list_schedules(config)]
    if combine is None:
        return [optimizer], entries
    if any(entry != {**vars(Schedule()), "scheduler": entry["scheduler"]} for entry in entries) or len(entries) > 1:
        raise ConfigError(
            "lr_schedule, and a list of lr_scheduler: configure_optimizers of the script's class decides the interval "
            "of a single scheduler. Remove these settings, or the method."
        )
    return combine(task, optimizer=optimizer, lr_scheduler=entries[0]["scheduler"] if entries else None)


def _list_schedules(config: Namespace) -> list[dict[str, Any]]:
    """Return each scheduler's class, with its interval."""
    scheduler, schedule = config.get("lr_scheduler"), config.lr_schedule.as_dict()
    if scheduler and "class_path" in scheduler:
        return [{"scheduler": scheduler, **schedule}]
    if scheduler and schedule != vars(Schedule()):
        raise ConfigError(
            "lr_schedule applies to a single lr_scheduler, but there are several. Write the interval with each: "
            "lr_scheduler: [{scheduler: CLASS, interval: step}, ...]."
        )
    if schedule != vars(Schedule()):
        _log.warning("ignoring lr_schedule: the config has no lr_scheduler")
    return [vars(entry) for entry in vars(scheduler).values()] if scheduler else []


def _make_parameter_groups(config: Namespace, task: TaskModule) -> list[Any]:
    """Return the first argument of the optimizer: trainable parameters, in groups if the settings ask for groups."""
    options, arguments = config.parameter_groups, config.optimizer.get("init_args", {})
    lr, weight_decay = arguments.get("lr"), arguments.get("weight_decay")
    if (options.layer_decay is None) != (options.blocks is None):
        raise ConfigError("parameter_groups: layer_decay and blocks need each other. Set both or neither.")
    by = _choose_undecayed(options.no_decay, options.decay)
    for name, needed, value in ("no_decay", "weight_decay", weight_decay), ("layer_decay", "lr", lr):
        if options[name] is not None and value is None:
            raise ConfigError(
                f"parameter_groups.{name}: {config.optimizer.class_path} has no {needed}. Set optimizer.{needed}."
            )
    if options.layer_decay is not None:
        return layer_decay_groups(
            task, lr, options.layer_decay, options.blocks, weight_decay=weight_decay or 0.0, by=by,
            embeddings=options.embeddings,
        )  # fmt: skip
    if options.no_decay is not None:
        return [group for group in decay_groups(task, weight_decay, by=by) if group["params"]]
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


def _choose_undecayed(no_decay: str | list[str] | None, decay: list[str] | None) -> Any:
    """Return the parameters without weight decay, in the form of `decay_groups`."""
    if decay is None:
        return no_decay or []
    if not isinstance(no_decay, list):
        raise ConfigError(f"parameter_groups.no_decay: with decay, expected a list of class names, found {no_decay!r}.")
    return {"decay": decay, "no_decay": no_decay}


def _build_node(node: Namespace, subject: Any) -> Any:
    try:
        return find_class(node.class_path)(subject, **node.get("init_args", {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{node.class_path} does not accept these arguments: {error}") from error
