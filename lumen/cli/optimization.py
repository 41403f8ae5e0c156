"""What the settings say of the optimizer and the schedules of its learning rates, and how they are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, final

from jsonargparse import Namespace

from lumen.cli.classes import find_class
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.optim import Lookahead, decay_groups, layer_decay_groups
from lumen.task.hooks import overrides
from lumen.task.task_module import TaskModule


@final
@dataclass
class Schedule:
    """When lr_scheduler moves.

    Args:
        interval: What it counts; tokens are the weights of the steps, for the schedules of lumen.optim.
        frequency: Every how many of them it moves.
        monitor: The logged name that ReduceLROnPlateau reads.
        strict: A monitor that was not logged is an error.
        warmup_steps: Steps of linear warm-up before it, whatever it counts itself.
        warmup_epochs: Epochs of warm-up in place of steps.
        warmup_start: Where the warm-up begins, as a fraction of the learning rate. Unset: 0; of warmup_epochs
            1 / (warmup_epochs + 1), so that the first epoch trains.
        warmup_factor: A function, as module.name, of the steps or epochs so far: the fraction, in place of a line.
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
    """What differs between the parameters of optimizer.

    Args:
        no_decay: Parameters whose weight_decay is 0: "dimension", those of less than two dimensions; "module type",
            biases, norms, embeddings and bare parameters such as pos_emb; names with wildcards; or, together with
            decay, names of classes. Unset: none.
        decay: Classes of the modules whose parameters decay, biases excepted; each other one has to be in no_decay.
        layer_decay: Each layer learns with this share of the rate of the one above, in (0, 1].
        blocks: The layers, for layer_decay: the name of the module that holds them, or their names, lowest first.
        embeddings: What is below the blocks. Unset: what is defined before them.
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
        k: Fast steps for one slow step. Unset: no Lookahead.
        alpha: Part of the way that a slow step goes, in (0, 1].
    """

    k: int | None = None
    alpha: float = 0.5


def configure_optimizers(config: Namespace, task: TaskModule) -> Any:
    """What the settings ask for, as `configure_optimizers` of a task returns it.

    Raises:
        ConfigError: Settings that do not go together, or that a class does not take.
    """
    if overrides(task, "configure_optimizers"):
        _log.info("optimizer: %s, instead of the task's configure_optimizers", config.optimizer.class_path)
    optimizer = _built(config.optimizer, _parameter_groups(config, task))
    if config.lookahead.k is not None:
        optimizer = Lookahead(optimizer, config.lookahead.k, config.lookahead.alpha)
    return [optimizer], [{**entry, "scheduler": _built(entry["scheduler"], optimizer)} for entry in _schedules(config)]


def _schedules(config: Namespace) -> list[dict[str, Any]]:
    """Each scheduler's class, with when it moves."""
    given, when = config.get("lr_scheduler"), config.lr_schedule.as_dict()
    if given and "class_path" in given:
        return [{"scheduler": given, **when}]
    if given and when != vars(Schedule()):
        raise ConfigError(
            "lr_schedule says how one lr_scheduler moves, but there are several. Write it beside each of them: "
            "lr_scheduler: [{scheduler: CLASS, interval: step}, ...]."
        )
    if when != vars(Schedule()):
        _log.warning("lr_schedule says how lr_scheduler moves, but there is none: it is not used")
    return [vars(entry) for entry in vars(given).values()] if given else []


def _parameter_groups(config: Namespace, task: TaskModule) -> list[Any]:
    """What the optimizer is built with: trainable parameters, in groups if any are asked for."""
    wanted, given = config.parameter_groups, config.optimizer.get("init_args", {})
    lr, weight_decay = given.get("lr"), given.get("weight_decay")
    if (wanted.layer_decay is None) != (wanted.blocks is None):
        raise ConfigError("parameter_groups: layer_decay and blocks need each other. Set both or neither.")
    by = _undecayed(wanted.no_decay, wanted.decay)
    for name, needed, value in ("no_decay", "weight_decay", weight_decay), ("layer_decay", "lr", lr):
        if wanted[name] is not None and value is None:
            raise ConfigError(f"parameter_groups.{name}: {config.optimizer.class_path} has no {needed}. Set it there.")
    if wanted.layer_decay is not None:
        return layer_decay_groups(
            task, lr, wanted.layer_decay, wanted.blocks, weight_decay=weight_decay or 0.0, by=by,
            embeddings=wanted.embeddings,
        )  # fmt: skip
    if wanted.no_decay is not None:
        return [group for group in decay_groups(task, weight_decay, by=by) if group["params"]]
    return [parameter for parameter in task.parameters() if parameter.requires_grad]


def _undecayed(no_decay: str | list[str] | None, decay: list[str] | None) -> Any:
    """What does not decay, as `decay_groups` takes it."""
    if decay is None:
        return no_decay or []
    if not isinstance(no_decay, list):
        raise ConfigError(f"parameter_groups.no_decay: beside decay expected names of classes too, found {no_decay!r}.")
    return {"decay": decay, "no_decay": no_decay}


def _built(node: Namespace, subject: Any) -> Any:
    try:
        return find_class(node.class_path)(subject, **node.get("init_args", {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{node.class_path} does not take these arguments: {error}") from error
