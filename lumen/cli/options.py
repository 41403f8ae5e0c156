"""Options of each command, and the options that a user's script adds."""

from __future__ import annotations

from argparse import Action
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import reduce
from os import PathLike
from pathlib import Path
from typing import Any, final

from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lumen.callbacks import Callback
from lumen.checkpoint import Weights
from lumen.cli.classes import find_class, get_defaults
from lumen.cli.commands import LOOPS
from lumen.cli.config_layers import NODE, Tree, is_class, merge, nest_value
from lumen.cli.interpolation import escape_references, put_references
from lumen.cli.optimization import LookaheadOptions, ParameterGroups, Schedule
from lumen.cli.yaml_text import dump_yaml, load_yaml
from lumen.errors import ConfigError
from lumen.internals.atomic_files import write_private
from lumen.internals.masking import References, mask_secrets
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

SUPPLIED = {"optimizer": {"params"}, "lr_scheduler": {"optimizer"}, "trainer": {"seed"}}
"""Arguments of classes that Lumen gives them."""
_PRINT_CONFIG = (
    "Print the settings as a config file, and exit. =skip_default omits default values, =skip_unset null values; a "
    "comma joins both."
)
_SEVERAL = "Return several from configure_optimizers of the task."


@final
@dataclass
class Options:
    """Options of the command itself.

    Args:
        seed_everything: The run's seed. Default, true and false: a random seed, which is recorded.
        ckpt_path: The checkpoint: best, last, the path of a checkpoint or run, or weights in the form of
            trainer.init_from.
        average: The weights: parameters, EMA, SWA, last:5 or best:3 for the mean of checkpoints, or a list of paths.
            Default: the weights that validations evaluated, which are the average in a run with EMA or SWA.
        output: The file for the results: .json, .jsonl, .safetensors.
    """

    seed_everything: int | bool | None = None
    ckpt_path: Weights | str | None = None
    average: str | list[str] | None = None
    output: str | None = None


OPTIONS = {field.name for field in fields(Options)}


@final
class _Help(DefaultHelpFormatter):
    """Help formatter that describes Lumen's syntax instead of jsonargparse's: only `--config` takes config files."""

    def add_argument(self, action: Action) -> None:
        """Describe an option."""
        if "--print_config" in action.option_strings:
            action.help = _PRINT_CONFIG
        elif action.metavar == "CONFIG":
            action.metavar, action.help = "{NAME: VALUE, ...}", "Several arguments at once."
        elif isinstance(action.metavar, str):
            action.metavar = action.metavar.removeprefix("CONFIG | ")
        super().add_argument(action)


@final
class OptionParser(ArgumentParser):
    """Parser of all options of a command and a script; a parser of jsonargparse that records classes.

    Attributes:
        classes: The class of each group of options, which are the arguments of the class.
        fixed: The classes of the model and the data, where the script names the class.
        bases: The base class required by each option that names a class.
        linked: The source arguments of each argument that is computed from others.
        callback_keys: The groups whose objects are callbacks of the trainer.
        script: The defaults that the script sets, which all other settings override.
        references: The references to the environment in the settings, by their place.
        taken: The arguments of the model that Lumen took from the data, with their values.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(*args, **settings)
        self.classes: dict[str, type] = {}
        self.fixed: dict[str, type] = {}
        self.bases: dict[str, type] = {}
        self.linked: dict[str, str] = {}
        self.callback_keys: list[str] = []
        self.script: Tree = {}
        self.references: References = {}
        self.taken: dict[str, Any] = {}

    def add_argument(self, *args: Any, **settings: Any) -> Any:
        """Add an option; `action="store_true"` is a bool that config files may set too.

        Raises:
            ConfigError: The action is `store_false`: an option without a value means true.
        """
        if settings.get("action") == "store_false":
            raise ConfigError(f"add_argument{args}: store_false is not supported. Write type=bool, default=True.")
        if settings.get("action") == "store_true":
            del settings["action"]
            settings = {"type": bool, "default": False, **settings}
        return super().add_argument(*args, **settings)

    def list_sections(self) -> set[str]:
        """Return the first names of all options."""
        return {key.partition(".")[0] for key in self.get_defaults().as_flat().__dict__} - {"config"} | {*self.fixed}

    def get_plain_option_types(self) -> dict[str, Any]:
        """Return the types of options that are not arguments of a class; an option without a type takes any text."""
        known = {*self.classes, *self.fixed, *self.bases, *OPTIONS}
        single = [each for each in self._actions if each.dest.partition(".")[0] not in known]
        # For a type that argparse does not know, jsonargparse sets `_typehint`.
        types = {each.dest: getattr(each, "_typehint", each.type) for each in single}
        return {name: kind for name, kind in types.items() if kind is not None}

    def add_class_arguments(self, theclass: type, nested_key: str | None = None, *args: Any, **settings: Any) -> Any:
        """Add the arguments of a class as the options `--NESTED_KEY.NAME`."""
        if nested_key is not None and "." not in nested_key:
            self.classes[nested_key] = theclass
        return super().add_class_arguments(theclass, nested_key, *args, **settings)

    def add_subclass_arguments(self, baseclass: Any, nested_key: str, *args: Any, **settings: Any) -> Any:
        """Add the option `--NESTED_KEY`, which names a subclass of a base class, with the subclass's arguments."""
        self.bases[nested_key] = baseclass
        return super().add_subclass_arguments(baseclass, nested_key, *args, **settings)

    def add_lightning_class_args(
        self, lightning_class: type, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> Any:
        """Add the arguments of a class as options; Lumen builds an object, and adds it to the callbacks if it is one.

        Args:
            lightning_class: The class, such as EarlyStopping.
            nested_key: The prefix of the options.
            subclass_mode: True if the settings name a class derived from `lightning_class`.
            required: With `subclass_mode`: True if the settings must name a class.

        Raises:
            ConfigError: `lightning_class` is not a class.
        """
        if not isinstance(lightning_class, type):
            raise ConfigError(f"add_lightning_class_args: expected a class, found {lightning_class!r}.")
        self.callback_keys += [nested_key] if issubclass(lightning_class, Callback) else []
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, fail_untyped=False, required=required)
        return self.add_class_arguments(lightning_class, nested_key, fail_untyped=False)

    def add_optimizer_args(
        self, optimizer_class: type | tuple[type, ...] = Optimizer, nested_key: str = "optimizer", link_to: str = ""
    ) -> None:
        """Set a default optimizer, which `--optimizer` replaces; `--optimizer.NAME` sets its arguments.

        Raises:
            ConfigError: The nested key is not `optimizer`, or `link_to` is set: the settings have one optimizer.
        """
        self._add_choice(optimizer_class, "optimizer", nested_key, link_to)

    def add_lr_scheduler_args(
        self, lr_scheduler_class: type | tuple[type, ...] = LRScheduler, nested_key: str = "lr_scheduler",
        link_to: str = "",
    ) -> None:  # fmt: skip
        """Set a default scheduler, like `add_optimizer_args`; `--lr_schedule` sets its interval.

        Raises:
            ConfigError: The nested key is not `lr_scheduler`, or `link_to` is set.
        """
        self._add_choice(lr_scheduler_class, "lr_scheduler", nested_key, link_to)

    def _add_choice(self, kind: Any, key: str, nested_key: str, link_to: str) -> None:
        if nested_key != key or link_to not in ("", "AUTOMATIC"):
            raise ConfigError(
                f"add_{key}_args({nested_key!r}): Lumen configures a single {key}, named {key}. {_SEVERAL}"
            )
        if isinstance(kind, type) and kind not in (Optimizer, LRScheduler):
            self.set_defaults({key: f"{kind.__module__}.{kind.__qualname__}"})

    def set_defaults(self, *trees: Mapping[str, Any], **settings: Any) -> None:
        """Set options by their full names, as `{"trainer.max_epochs": 5}`; files and the command line override them."""
        defaults = {key: value for each in (*trees, settings) for key, value in each.items()}
        self.script = reduce(merge, (nest_value(key.split("."), value) for key, value in defaults.items()), self.script)
        for key, value in self._iterate_help_defaults(defaults):
            # The check of all settings reports wrong values.
            with suppress(KeyError, ValueError, TypeError, ArgumentError):
                super().set_defaults({key: value})

    def _iterate_help_defaults(self, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the script's defaults for the help: all except arguments of classes that are not known yet."""
        for key, value in defaults.items():
            if key in {*self.classes, *self.fixed} and isinstance(value, Mapping):
                yield from self._iterate_help_defaults({f"{key}.{name}": item for name, item in value.items()})
            elif key.partition(".")[0] not in self.bases:
                yield shorten_key(key), value

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Compute an argument from other arguments or from built objects; the argument is no longer an option.

        Args:
            source: The names of arguments, such as `data.batch_size`; with `apply_on="instantiate"`, names of
                attributes.
            target: The name of the argument, such as `model.batch_size`.
            compute_fn: The function that receives the values of `source`. Default: the value is copied.
            apply_on: The values of `source`: "parse" for the settings, "instantiate" for the objects.

        Raises:
            ConfigError: An argument does not exist, or the arguments depend on each other.
        """
        sources = (source,) if isinstance(source, str) else tuple(source)
        full = sources if apply_on == "instantiate" else tuple(map(self._get_full_key, sources))
        try:
            super().link_arguments(full, self._get_full_key(target), compute_fn, apply_on)
        except ValueError as error:
            raise ConfigError(f"link_arguments({source!r}, {target!r}): {error}") from error
        self.linked[shorten_key(target)] = " and ".join(sources)

    def make_record(self, config: Namespace, *, skip_unset: bool = False) -> dict[str, Any]:
        """Return the settings of a command as plain data, from which `--config` repeats the run.

        Args:
            config: The settings of the command.
            skip_unset: True to omit settings whose value is None.
        """
        record: dict[str, Any] = load_yaml(super().dump(config, skip_unset=skip_unset))
        if (several := record.get("lr_scheduler")) and "class_path" not in several:
            record["lr_scheduler"] = list(several.values())
        record = escape_references(record)
        put_references(record, self.references)
        if self.taken:
            node = record["model"]
            (node.setdefault("init_args", {}) if is_class(node) else node).update(self.taken)
        return record

    def dump(
        self,
        namespace: Namespace,
        format: str = "yaml",
        skip_unset: bool = True,
        skip_default: bool = False,
        *,
        skip_none: bool | None = None,
        **options: Any,
    ) -> str:
        """Return settings as YAML, with secrets masked.

        Args:
            namespace: The settings: `cli.config`, or those of a command.
            format: Only YAML is supported.
            skip_unset: True to omit settings whose value is None.
            skip_default: True to omit default values.
            skip_none: Other name of `skip_unset`.
            options: Further options of jsonargparse, without effect.

        Raises:
            ConfigError: The format is not YAML.
        """
        if not self.classes:  # jsonargparse dumps the arguments of each class with a parser of its own
            return str(
                super().dump(namespace, format=format, skip_unset=skip_unset, skip_default=skip_default, **options)
            )
        if format not in ("yaml", "parser_mode"):
            raise ConfigError(f"parser.dump: {format=} is not supported. Use yaml.safe_load(parser.dump(config)).")
        command = namespace.get("subcommand")
        record = self.make_record(
            namespace[command] if command else namespace, skip_unset=skip_unset if skip_none is None else skip_none
        )
        record.pop("config", None)
        record = self.drop_defaults(record) if skip_default else record
        return dump_yaml(mask_secrets({command: record} if command else record))

    def save(self, namespace: Namespace, path: str | PathLike[str], *, overwrite: bool = False, **options: Any) -> None:
        """Write the text of `dump` to a file.

        Args:
            namespace: The settings: `cli.config`, or those of a command.
            path: The path of the file.
            overwrite: True to replace an existing file.
            options: The options of `dump`; `multifile` has no effect, because the settings are one file.

        Raises:
            FileExistsError: The file exists, and `overwrite` is False.
        """
        if not overwrite and Path(path).exists():
            raise FileExistsError(f"{path} exists. Choose another path, or pass overwrite=True.")
        write_private(Path(path), self.dump(namespace, **options))

    def drop_defaults(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings as plain data, without values that equal the defaults of options and classes.

        If the script sets part of an object, the record keeps all values of this object, also the defaults of its
        class.
        """
        defaults, left = self.get_defaults().as_dict(), deepcopy(dict(record))
        groups, chosen = {*self.classes, *self.fixed}, self.script.keys() & self.bases.keys()
        for node in _iterate_class_nodes({key: value for key, value in left.items() if key not in chosen}):
            kind, arguments = find_class(node["class_path"]), node.pop("init_args", None) or {}
            if arguments := _find_non_defaults(arguments, get_defaults(kind)):
                node["init_args"] = arguments
        for key in groups & left.keys():
            left[key] = _find_non_defaults(left[key], defaults[key])
        if isinstance(several := left.get("lr_scheduler"), list):
            default_entries = defaults["lr_scheduler"].values()
            left["lr_scheduler"] = [_find_non_defaults(*each) for each in zip(several, default_entries, strict=True)]
        return {key: value for key, value in _find_non_defaults(left, defaults).items() if value != {}}

    def _get_full_key(self, key: str) -> str:
        """Return an argument's name in jsonargparse's form: with init_args, if the settings name the class."""
        head, _, name = key.partition(".")
        inside = head in self.bases and name and name.partition(".")[0] not in NODE
        return f"{head}.init_args.{name}" if inside else key


def _find_non_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    plain_defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {
        name: value for name, value in values.items() if name not in plain_defaults or value != plain_defaults[name]
    }


def _iterate_class_nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every class in plain data, outermost first."""
    if is_class(value):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iterate_class_nodes(item)


def shorten_key(key: str) -> str:
    """Return a key in the form of the command line, without names such as init_args."""
    return ".".join(name for name in key.split(".") if name not in NODE)


@final
@dataclass(frozen=True)
class CommandOptions:
    """Choices that a command line offers.

    Args:
        model: The base class of the model; with `fixed_model`, its class.
        data: The base class of the data; with `fixed_data`, its class.
        fixed_model: True if the settings have only the model's arguments.
        fixed_data: True if the settings have only the data's arguments.
        optimizers: True if the settings may have an optimizer and its schedulers.
        trainer: The class of the trainer.
    """

    model: type = TaskModule
    data: type = DataModule
    fixed_model: bool = False
    fixed_data: bool = False
    optimizers: bool = True
    trainer: type = Trainer

    def add_to(
        self, parser: OptionParser, command: str | None, schedulers: int | None, skip: Iterable[str] = ()
    ) -> list[str]:
        """Add the options; every command accepts the options of fit, so that each command reads a run's config.

        Args:
            parser: The parser to which the options are added.
            command: The name of the command: fit, validate, test or predict; None if objects are built and no loop
                runs.
            schedulers: The number of learning-rate schedulers in a list; None if the settings have at most one, not in
                a list.
            skip: The arguments of the trainer's method that are no options, if the script defines the command.

        Returns:
            The options that are arguments of the trainer's method.
        """
        parser.add_argument(
            "--config", action=ActionConfigFile, help="A YAML file of settings; a later file overrides an earlier one."
        )
        unused = set() if command in ("validate", "test", "predict") else {"ckpt_path", "average", "output"}
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
        if command is None or command in LOOPS or not hasattr(self.trainer, command):
            return []
        return list(parser.add_method_arguments(self.trainer, command, skip={*skip}, fail_untyped=False))


def _add_optimization(parser: OptionParser, schedulers: int | None) -> None:
    settings: dict[str, Any] = {"instantiate": False, "fail_untyped": False}
    parser.add_subclass_arguments(Optimizer, "optimizer", skip=SUPPLIED["optimizer"], **settings)
    if schedulers is None:
        parser.add_subclass_arguments(LRScheduler, "lr_scheduler", skip=SUPPLIED["lr_scheduler"], **settings)
    for key in (f"lr_scheduler.{number}" for number in range(schedulers or 0)):
        # Each of several schedulers is checked separately, so these bypass the methods of this class.
        ArgumentParser.add_subclass_arguments(
            parser, LRScheduler, f"{key}.scheduler", skip=SUPPLIED["lr_scheduler"], **settings
        )
        ArgumentParser.add_class_arguments(parser, Schedule, key, instantiate=False)
    parser.bases["lr_scheduler"] = LRScheduler
    parser.add_class_arguments(ParameterGroups, "parameter_groups")
    parser.add_class_arguments(LookaheadOptions, "lookahead")
    parser.add_class_arguments(Schedule, "lr_schedule")
