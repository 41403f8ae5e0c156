"""The configuration of one command: read, checked as a whole, built piece by piece, recorded."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from lumen.cli.classes import base_of, find_class, same_class
from lumen.cli.components import Component, is_plain, is_required, nearest
from lumen.cli.layers import CLASSES, SCHEDULE, Node, as_node, assigned, merged, normalized, read_environment, read_file
from lumen.cli.request import Request, close_option
from lumen.datamodule import DataModule
from lumen.errors import ConfigError
from lumen.trainer import Trainer

_log = logging.getLogger("lumen")
_SUPPLIED = {
    "optimizer": {"params": "It is given the task's parameters."},
    "lr_scheduler": {"optimizer": "It is given the optimizer."},
    "trainer": {"seed": "Use the top-level key seed_everything."},
    "fit": {"ckpt_path": "It belongs to validate, test and predict; to go on from a checkpoint set trainer.resume."},
}


def top_level(
    seed_everything: int | None = None, link_arguments: dict[str, str] | None = None, ckpt_path: str | None = None
) -> dict[str, Any]:
    """The keys that stand alone.

    Args:
        seed_everything: The run's seed, set before the model is built. Default: the checkpoint's when there is one,
            else drawn and recorded.
        link_arguments: Arguments of the model that are read off the data, as `data.NAME: model.NAME`. A name that
            both share needs no link: an argument that the model leaves open (without a default, or None) is taken
            from the data's attribute of the same name.
        ckpt_path: Whose parameters to load: `best` or `last` of the run, or the path of a checkpoint or a run, whose
            config.yaml is used if there is no --config.
    """
    return {"seed_everything": seed_everything, "link_arguments": link_arguments or {}, "ckpt_path": ckpt_path}


def schedule(
    interval: Literal["step", "epoch"] = "epoch", frequency: int = 1, monitor: str | None = None, strict: bool = True
) -> dict[str, Any]:
    """What stands next to the scheduler's `class_path`.

    Args:
        interval: What the scheduler counts.
        frequency: Every how many of them it moves.
        monitor: The logged name that ReduceLROnPlateau reads.
        strict: A monitor that was not logged is an error.
    """
    return {"interval": interval, "frequency": frequency, "monitor": monitor, "strict": strict}


@final
class Settings:
    """The configuration of one command.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        request: The command line.
        environment: Environment variables.

    Attributes:
        trainer: The Trainer's options.
        top: The keys that stand alone.
        classes: What `model`, `data`, `optimizer` and `lr_scheduler` name, as far as they are set.
        schedule: The keys next to the scheduler.

    Raises:
        ConfigError: A file cannot be read, or the layers cannot be put together.
    """

    def __init__(self, command: str, request: Request, environment: Mapping[str, str]) -> None:
        tree = Node({}, "")
        layers = [read_environment(command, environment), *map(read_file, request.configs), assigned(request.settings)]
        for layer in layers:
            tree = merged(tree, normalized(layer), same_class)
        self._tree: dict[str, Node] = tree.value
        self._problems: list[str] = []
        options = dict(self._tree["trainer"].value) if "trainer" in self._tree else {}
        self.trainer = Component("trainer", Trainer, "Trainer", options, _SUPPLIED["trainer"])
        self.classes = {key: component for key in CLASSES if (component := self._class(key)) is not None}
        alone = {key: node for key, node in self._tree.items() if key not in (*CLASSES, "trainer")}
        self.top = Component("", top_level, "lumen", alone, _SUPPLIED.get(command, {}))
        scheduler = self._tree["lr_scheduler"].value if "lr_scheduler" in self.classes else {}
        beside = {key: node for key, node in scheduler.items() if key in SCHEDULE}
        self.schedule = Component("lr_scheduler", schedule, "lr_scheduler", beside)
        self._name_run(request.configs)

    def check(self) -> None:
        """Check everything that can be checked before anything is built.

        Raises:
            ConfigError: All that is wrong.
        """
        unknown = [key for key in self.top.given if key not in self.top.parameters]
        problems = [self._unknown(key) for key in unknown] + self._problems
        self.top.given = {key: node for key, node in self.top.given.items() if key not in unknown}
        for component in (self.top, self.trainer, *self.classes.values(), self.schedule):
            problems += component.problems()
        for key in self.classes.keys() - {"model"}:  # the model's may still come from the data
            problems += self.classes[key].missing_problems()
        if not problems:
            problems = self._link_problems()
        if "lr_scheduler" in self.classes and "optimizer" not in self.classes:
            problems.append("lr_scheduler: it needs the optimizer that it schedules. Set optimizer too.")
        _raise(problems)

    def require_model(self) -> Component:
        """The model.

        Raises:
            ConfigError: None is configured.
        """
        if "model" not in self.classes:
            raise ConfigError("no model is configured. Give --config FILE, or --model module.Class.")
        return self.classes["model"]

    def link(self, data: DataModule | None) -> None:
        """Set the arguments of the model that come from the data, and say so.

        Args:
            data: The data module, or None.

        Raises:
            ConfigError: The data has no such value, or the model still misses one.
        """
        model, problems = self.require_model(), []
        for source, target in self._links().items():
            name, argument = source.removeprefix("data."), target.removeprefix("model.")
            if argument not in model.given and not self._take(model, argument, data, name):
                problems.append(
                    f"link_arguments: {type(data).__name__} has no attribute {name}, or it is not plain data."
                )
        for name, parameter in model.parameters.items():
            if name not in model.given and (is_required(parameter) or parameter.default is None):
                self._take(model, name, data, name)
        hint = "" if data is None else f" {type(data).__name__} has no attribute of that name to take it from."
        _raise(problems + [problem + hint for problem in model.missing_problems()] + model.problems())

    def record(self) -> dict[str, Any]:
        """Plain data from which the same configuration is read."""
        recorded: dict[str, Any] = {"seed_everything": self.top.arguments().get("seed_everything")}
        for key, component in self.classes.items():
            recorded[key] = {"class_path": component.name, "init_args": component.record()}
        if "lr_scheduler" in recorded:
            recorded["lr_scheduler"] |= self.schedule.record()
        recorded["trainer"] = self.trainer.record()
        open_links = {source: target for source, target in self._links().items() if not self._is_set(target)}
        return {**recorded, "link_arguments": open_links} if open_links else recorded

    # ------------------------------------------------------------------ reading

    def _class(self, key: str) -> Component | None:
        node = self._tree.get(key)
        if node is None or node.value is None:
            return None
        base = base_of((key,))
        assert base is not None
        try:
            if not node.is_class:
                raise ConfigError(f"{key} ({node.origin}): no class is named. Add class_path: module.Class.")
            named = node.value["class_path"]
            target, name = find_class(str(named.value), (base,), f"{key} ({named.origin})")
        except ConfigError as error:
            self._problems.append(str(error))
            return None
        given = node.value["init_args"].value if "init_args" in node.value else {}
        return Component(key, target, name, given, _SUPPLIED.get(key, {}))

    def _name_run(self, configs: list[Path]) -> None:
        name = self.trainer.given.get("name")
        if name is None or name.value in (None, "null"):
            if configs:
                self.trainer.given["name"] = Node(configs[0].stem, str(configs[0]))
            elif "model" in self.classes:
                self.trainer.given["name"] = Node(self.classes["model"].target.__name__.lower(), "default")

    # ------------------------------------------------------------------ checking and linking

    def _unknown(self, key: str) -> str:
        where = f"{key} ({self._tree[key].origin})"
        if key in self.top.supplied:
            return f"{where}: there is no such key here. {self.top.supplied[key]}"
        known = [*CLASSES, "trainer", *self.top.parameters]
        likely = close_option(key) or difflib.get_close_matches(key, known, n=2)
        likely += [f"trainer.{name}" for name in difflib.get_close_matches(key, self.trainer.parameters, n=1)]
        hint = f"Did you mean {' or '.join(likely)}?" if likely else f"There are: {', '.join(known)}."
        return f"{where}: there is no such key. {hint}"

    def _links(self) -> dict[str, str]:
        return dict(self.top.arguments().get("link_arguments") or {})

    def _link_problems(self) -> list[str]:
        problems = []
        for source, target in self._links().items():
            link = f"link_arguments, {source}: {target}"
            if not re.fullmatch(r"data\.\w+", source) or not re.fullmatch(r"model\.\w+", target):
                problems.append(f"{link}: expected data.NAME: model.NAME.")
            elif "data" not in self.classes:
                problems.append(f"{link}: no data is configured.")
            elif "model" in self.classes and (name := target[6:]) not in self.classes["model"].parameters:
                model = self.classes["model"]
                problems.append(f"{link}: {model.name} has no option {name}. {nearest(name, model.parameters)}")
        return problems

    def _is_set(self, target: str) -> bool:
        return "model" in self.classes and target.removeprefix("model.") in self.classes["model"].given

    def _take(self, model: Component, argument: str, data: DataModule | None, name: str) -> bool:
        if data is None or hasattr(DataModule, name):
            return False
        value: Any = getattr(data, name, None)
        if value is None:
            value = data.hparams.get(name)
        if hasattr(value, "item") and not value.shape:  # a number of torch or numpy
            value = value.item()
        if value is None or not is_plain(value):
            return False
        model.given[argument] = as_node(value, f"data.{name}")
        _log.info("model.%s is %s, from data.%s", argument, value, name)
        return True


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
