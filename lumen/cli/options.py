"""All options of a command, and what a script of the user's own adds to them."""

from __future__ import annotations

from argparse import Action
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, final

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, DefaultHelpFormatter  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lumen.callbacks import Callback
from lumen.checkpoint import Weights
from lumen.cli.classes import defaults_of, find_class
from lumen.cli.config_layers import NODE, Tree, is_class, merge, nested
from lumen.cli.optimization import LookaheadOptions, ParameterGroups, Schedule
from lumen.errors import ConfigError
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

SUPPLIED = {"optimizer": {"params"}, "lr_scheduler": {"optimizer"}, "trainer": {"seed"}}
"""Arguments of classes that Lumen gives them."""
_PRINT_CONFIG = (
    "Print the settings as a config file, and do nothing else. =skip_default leaves out what has its default, "
    "=skip_unset what is null; both with a comma."
)
_SEVERAL = "Several of them belong into configure_optimizers of the task."


@final
@dataclass
class Options:
    """Options of the command itself.

    Args:
        seed_everything: The run's seed. Default, and true: drawn and recorded.
        ckpt_path: best, last, the path of a checkpoint or run, or weights as trainer.init_from has them.
        average: parameters, EMA, SWA, last:5 or best:3 for the mean of checkpoints, or a list of paths. Default: what
            validations evaluated, the average of a run with EMA or SWA.
        output: Where results are written: .json, .jsonl, .safetensors.
    """

    seed_everything: int | bool | None = None
    ckpt_path: Weights | str | None = None
    average: str | list[str] | None = None
    output: str | None = None


OPTIONS = {field.name for field in fields(Options)}


@final
class _Help(DefaultHelpFormatter):
    """Says what Lumen takes where jsonargparse says what it would: config files are `--config` alone."""

    def add_argument(self, action: Action) -> None:
        """Describe an option."""
        if "--print_config" in action.option_strings:
            action.help = _PRINT_CONFIG
        elif action.metavar == "CONFIG":
            action.metavar, action.help = "{NAME: VALUE, ...}", "Several of these at once."
        elif isinstance(action.metavar, str):
            action.metavar = action.metavar.removeprefix("CONFIG | ")
        super().add_argument(action)


@final
class OptionParser(ArgumentParser):
    """Reads all options of a command, and those that a script adds: a parser of jsonargparse, which knows of classes.

    Attributes:
        classes: The class whose arguments the options of each group are.
        fixed: Of the model and the data those whose class the script names.
        bases: For each option that names a class, what this has to be derived from.
        linked: For each argument that is computed from others, which these are.
        callbacks: The groups that are callbacks of the trainer.
        script: What the script sets, below all other settings.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(*args, **settings)
        self.classes: dict[str, type] = {}
        self.fixed: dict[str, type] = {}
        self.bases: dict[str, type] = {}
        self.linked: dict[str, str] = {}
        self.callbacks: list[str] = []
        self.script: Tree = {}

    def heads(self) -> set[str]:
        """The first words of all options."""
        return {key.partition(".")[0] for key in self.get_defaults().as_flat().__dict__} - {"config"} | {*self.fixed}

    def types_of_single(self) -> dict[str, Any]:
        """The type of each option that is no argument of a class; those without one take any text."""
        known = {*self.classes, *self.fixed, *self.bases, *OPTIONS}
        single = [each for each in self._actions if each.dest.partition(".")[0] not in known]
        # jsonargparse keeps a type that argparse does not know of under a name of its own
        types = {each.dest: getattr(each, "_typehint", each.type) for each in single}
        return {name: kind for name, kind in types.items() if kind is not None}

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **settings: Any) -> Any:
        """Add the arguments of a class as the options `--NESTED_KEY.NAME`."""
        if nested_key is not None and "." not in nested_key:
            self.classes[nested_key] = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **settings)

    def add_subclass_arguments(self, baseclass: Any, nested_key: str, *args: Any, **settings: Any) -> Any:
        """Add the option `--NESTED_KEY`, which names a class derived from another, with this class's arguments."""
        self.bases[nested_key] = baseclass
        return super().add_subclass_arguments(baseclass, nested_key, *args, **settings)

    def add_lightning_class_args(self, kind: type, nested_key: str) -> None:
        """Add the arguments of a class as options; an object of it is made, and is one of the callbacks if it is one.

        Args:
            kind: The class, such as EarlyStopping.
            nested_key: What its options begin with.
        """
        self.add_class_arguments(kind, nested_key, fail_untyped=False)
        self.callbacks += [nested_key] if issubclass(kind, Callback) else []

    def add_optimizer_args(
        self, optimizer_class: type | tuple[type, ...] = Optimizer, nested_key: str = "optimizer", link_to: str = ""
    ) -> None:
        """Choose an optimizer, which `--optimizer` may change and `--optimizer.NAME` has the options of.

        Raises:
            ConfigError: It is not the one optimizer of the task.
        """
        self._choose(optimizer_class, "optimizer", nested_key, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: type | tuple[type, ...] = LRScheduler, nested_key: str = "lr_scheduler",
        link_to: str = "",
    ) -> None:  # fmt: skip
        """Choose a scheduler, as `add_optimizer_args` does an optimizer; `--lr_schedule` says when it moves.

        Raises:
            ConfigError: It is not the one of the task's one optimizer.
        """
        self._choose(lr_scheduler_class, "lr_scheduler", nested_key, link_to)

    def _choose(self, kind: Any, key: str, nested_key: str, link_to: str) -> None:
        if nested_key != key or link_to not in ("", "AUTOMATIC"):
            raise ConfigError(f"add_{key}_args({nested_key!r}): Lumen configures one as {key}. {_SEVERAL}")
        if isinstance(kind, type) and kind not in (Optimizer, LRScheduler):
            self.set_defaults({key: f"{kind.__module__}.{kind.__qualname__}"})

    def set_defaults(self, *trees: Mapping[str, Any], **settings: Any) -> None:
        """Set options by their full names, as `{"trainer.max_epochs": 5}`; files and the command line beat them."""
        given = {key: value for each in (*trees, settings) for key, value in each.items()}
        self.script = reduce(merge, (nested(key.split("."), value) for key, value in given.items()), self.script)
        for key, value in self._shown(given):
            with suppress(KeyError, ValueError, TypeError, ArgumentError):  # what is wrong is said with all the rest
                super().set_defaults({key: value})

    def _shown(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the help shows of what a script sets: all but arguments of classes that are not known yet."""
        for key, value in given.items():
            if key in {*self.classes, *self.fixed} and isinstance(value, Mapping):
                yield from self._shown({f"{key}.{name}": item for name, item in value.items()})
            elif key.partition(".")[0] not in self.bases:
                yield short_key(key), value

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Take an argument from others, or from the objects that are made: it is no option any more.

        Args:
            source: Names of arguments, such as `data.batch_size`; with `apply_on="instantiate"` of attributes.
            target: Name of the argument, such as `model.batch_size`.
            compute_fn: Called with the values of `source`. Default: the value as it is.
            apply_on: "parse", of the settings; "instantiate", of the objects.

        Raises:
            ConfigError: There are no such arguments, or they depend on each other.
        """
        sources = (source,) if isinstance(source, str) else tuple(source)
        full = sources if apply_on == "instantiate" else tuple(map(self._full, sources))
        try:
            super().link_arguments(full, self._full(target), compute_fn, apply_on)
        except ValueError as error:
            raise ConfigError(f"link_arguments({source!r}, {target!r}): {error}") from error
        self.linked[short_key(target)] = " and ".join(sources)

    def without_defaults(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings as plain data, without what options and classes have by default.

        Objects that the script sets anything of stay as they are: their classes' defaults are not theirs.
        """
        defaults, left = self.get_defaults().as_dict(), deepcopy(dict(record))
        groups, chosen = {*self.classes, *self.fixed}, self.script.keys() & self.bases.keys()
        for node in _nodes({key: value for key, value in left.items() if key not in chosen}):
            kind, given = find_class(node["class_path"]), node.pop("init_args", None) or {}
            if given := _differing(given, defaults_of(kind)):
                node["init_args"] = given
        for key in groups & left.keys():
            left[key] = _differing(left[key], defaults[key])
        if isinstance(several := left.get("lr_scheduler"), list):
            usual = defaults["lr_scheduler"].values()
            left["lr_scheduler"] = [_differing(*each) for each in zip(several, usual, strict=True)]
        return {key: value for key, value in _differing(left, defaults).items() if value != {}}

    def _full(self, key: str) -> str:
        """An argument's name as jsonargparse has it: of a class that the settings name, it is in init_args."""
        head, _, name = key.partition(".")
        inside = head in self.bases and name and name.partition(".")[0] not in NODE
        return f"{head}.init_args.{name}" if inside else key


def _differing(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in given.items() if name not in known or value != known[name]}


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every class in plain data, from the outside in."""
    if is_class(value):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(item)


def short_key(key: str) -> str:
    """A key as the command line has it, of one that also says where arguments of classes are."""
    return ".".join(name for name in key.split(".") if name not in NODE)


@final
@dataclass(frozen=True)
class Offer:
    """What a command line lets its user choose.

    Args:
        model: What the model is derived from; with `fixed_model`, its class.
        data: What the data is derived from; with `fixed_data`, its class.
        fixed_model: The settings have the model's arguments alone.
        fixed_data: The settings have the data's arguments alone.
        optimizers: The settings may have an optimizer, and schedulers of it.
        trainer: The class of the trainer.
    """

    model: type = TaskModule
    data: type = DataModule
    fixed_model: bool = False
    fixed_data: bool = False
    optimizers: bool = True
    trainer: type = Trainer

    def add_to(self, parser: OptionParser, command: str | None, schedulers: int | None) -> None:
        """Add the options; what only fit needs is known to each command, so that each reads a run's config.

        Args:
            parser: What they are added to.
            command: The name of the command: fit, validate, test or predict; None: objects are made, and that is all.
            schedulers: How many there are in a list; None: one, or none, stands alone.
        """
        parser.add_argument("--config", action=ActionConfigFile, help="A YAML file of settings; the last one wins.")
        unused = {"ckpt_path", "average", "output"} if command in ("fit", None) else set()
        parser.add_class_arguments(Options, as_group=False, skip=unused)
        for key, kind, fixed in ("data", self.data, self.fixed_data), ("model", self.model, self.fixed_model):
            if fixed:
                parser.add_class_arguments(kind, key, fail_untyped=False)
                parser.fixed[key] = parser.classes.pop(key)
            else:
                parser.add_subclass_arguments(kind, key, fail_untyped=False)
        if self.optimizers:
            _add_optimization(parser, schedulers)
        parser.add_class_arguments(self.trainer, "trainer", skip=SUPPLIED["trainer"], instantiate=False)


def _add_optimization(parser: OptionParser, schedulers: int | None) -> None:
    later: dict[str, Any] = {"instantiate": False, "fail_untyped": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", skip=SUPPLIED["optimizer"], **later)
    if schedulers is None:
        parser.add_subclass_arguments(LRScheduler, "lr_scheduler", skip=SUPPLIED["lr_scheduler"], **later)
    for key in (f"lr_scheduler.{number}" for number in range(schedulers or 0)):
        # what there is for each of several is looked at by itself
        ArgumentParser.add_subclass_arguments(
            parser, LRScheduler, f"{key}.scheduler", skip=SUPPLIED["lr_scheduler"], **later
        )
        ArgumentParser.add_class_arguments(parser, Schedule, key, instantiate=False)
    parser.bases["lr_scheduler"] = LRScheduler
    parser.add_class_arguments(ParameterGroups, "parameter_groups")
    parser.add_class_arguments(LookaheadOptions, "lookahead")
    parser.add_class_arguments(Schedule, "lr_schedule")
