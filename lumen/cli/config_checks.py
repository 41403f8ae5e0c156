"""Checks of the settings; an error names the key, the layer that set it, the value, and the replacement.

Names are checked first: every class, and the key of every argument. jsonargparse then parses all values in one pass. If
jsonargparse refuses the settings, the values are tried one by one, so that one error lists all problems.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, final, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import get_import_path  # type: ignore[attr-defined]

import lumen.trainer.tuner  # noqa: F401 (its callbacks have short names too)
from lumen.callbacks import Callback
from lumen.cli import classes
from lumen.cli.config_layers import Keys, ListAddition, Settings, as_jsonargparse_tree, is_class
from lumen.cli.optimization import Schedule
from lumen.cli.options import OPTIONS, SUPPLIED, OptionParser, Options, shorten_key
from lumen.cli.yaml_text import format_inline
from lumen.errors import ConfigError
from lumen.errors.arguments import is_neutral_argument, suggest_names
from lumen.errors.lightning_names import INSTEAD, INSTEAD_OF_CLASSES, RENAMED
from lumen.strategies.factory import CLASSES_BY_NAME, STRATEGIES, choose_processes
from lumen.trainer.trainer import Trainer

_TRAINER_KEYS = inspect.signature(Trainer).parameters.keys()
_TRAINER_OPTION = re.compile(rf"\b({'|'.join(_TRAINER_KEYS)})\b")
_SYNONYMS = {"lr": "learning_rate", "learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}
_REPLACEMENTS = {
    ("trainer", "seed"): "Use seed_everything.",
    ("seed",): "Use seed_everything.",
    ("ckpt_path",): "For fit use trainer.resume.",
    ("config",): "Name config files by --config FILE only.",
    ("lr_scheduler", "init_args", "monitor"): "Use lr_schedule.monitor.",
    ("weights_only",): "Leave it out: Lumen never unpickles.",
}
_LIGHTNING_KEYS = {"ckpt_path", "weights_only"}  # present in every config that LightningCLI saves
_MINUTES = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")  # a number in YAML 1.1, and for jsonargparse
_NUMBERED_SCHEDULER = re.compile(r"^lr_scheduler\.\d+\.scheduler$")
_UNKNOWN = inspect.Parameter("unknown", inspect.Parameter.KEYWORD_ONLY, default=None)


@final
class NamedClass(NamedTuple):
    """Class that the settings name.

    Attributes:
        path: The place of the class's arguments in the settings.
        kind: The class itself.
        arguments: The arguments in the settings.
        parameters: All parameters of the class.
    """

    path: Keys
    kind: type
    arguments: Mapping[str, Any]
    parameters: Mapping[str, inspect.Parameter]

    def accepts(self, name: str) -> bool:
        """Return True if a parameter accepts its value in the settings."""
        value, parameter = self.arguments[name], self.parameters[name]
        if value is None:
            return parameter.default is None or self._accepts_null(name)
        is_read = isinstance(value, dict | str) or not is_dataclass(parameter.annotation)
        return is_read and classes.accepts(self._make_parser(name), as_jsonargparse_tree({name: value}, self.path))

    def list_unchecked(self) -> list[str]:
        """Return the names of parameters whose type jsonargparse does not enforce for the given values."""
        items = self.arguments.items()
        return [name for name, value in items if value is None or is_dataclass(self.parameters[name].annotation)]

    def get_value(self, name: str) -> Any:
        """Return the value of a parameter, converted to its type; the value must fit."""
        return self._make_parser(name).parse_object(as_jsonargparse_tree({name: self.arguments[name]}, self.path))[name]

    def _accepts_null(self, name: str) -> bool:
        """Return True if the word null on the command line means None."""
        word, parser = {name: "null"}, self._make_parser(name)
        return classes.accepts(parser, word) and parser.parse_object(word)[name] is None

    def _make_parser(self, name: str) -> ArgumentParser:
        return classes.make_class_parser(self.kind, {*self.parameters, *_get_supplied_arguments(self.path)} - {name})


@final
class SettingsChecker:
    """Check of all names in the settings: wrong names are recorded as problems, the others take values.

    Args:
        settings: The nested settings, in the form of the config.
        top: The parser of all options.
        elsewhere: True if the run is for another machine: the devices of this machine are not checked.

    Attributes:
        links: The required arguments of the model that are not set, if there is data to take them from.
    """

    def __init__(self, settings: Settings, top: OptionParser, *, elsewhere: bool = False) -> None:
        self._runs_elsewhere = elsewhere
        self.links: list[str] = []
        self._settings, self._named, self._problems = settings, list[NamedClass](), dict[Keys, str]()
        self._top, tree = top, settings.tree
        known = top.list_sections()
        for ours, name in settings.unread.items():
            self._problems[name,] = (
                f"Lumen does not read the environment variable {name}. Set {ours} instead, or unset {name}."
            )
        for key in _LIGHTNING_KEYS - known:
            if tree.get(key, 0) is None:
                del tree[key]
        self._check_class((), Options, {key: tree[key] for key in tree if key in known & OPTIONS})
        for key, kind in top.classes.items():
            self._check_class((key,), kind, tree[key])
        for key, base in top.bases.items():
            if is_class(tree.get(key)) or (tree.get(key) and isinstance(tree[key], str)):
                self._check_node((key,), tree[key], base)
            elif key == "lr_scheduler" and isinstance(tree.get(key), list):
                for number, entry in enumerate(tree[key]):
                    self._check_schedule((key, str(number)), entry)
            elif tree.get(key):
                self._add_problem((key,), f"expected a class, found {tree[key]!r}.")
        for key, kind in top.fixed.items():
            self._check_fixed_class(key, tree.get(key) or {}, kind)
        if tree.get("lr_scheduler") and not tree.get("optimizer"):
            self._problems["optimizer",] = "lr_scheduler needs an optimizer. Set optimizer too."
        if not tree.get("model") and "model" not in top.fixed:
            self._problems["model",] = (
                f"no model is configured. Give --config {_find_config() or 'FILE'}, or --model module.Class. For a "
                "first project that trains, run: lumen init mine"
            )
        for key in tree:
            if key not in known:  # Now all arguments of the sections are known.
                self._report_unknown_section(key, ["config", *sorted(known)])

    def parse(self) -> Namespace:
        """Return all settings, converted to their types.

        Raises:
            ConfigError: A setting is wrong; the message lists all errors.
        """
        refused: ArgumentError | None = None
        if not self._problems and all(named.accepts(name) for named in self._named for name in named.list_unchecked()):
            tree = as_jsonargparse_tree(self._settings.tree)
            tree |= {key: (tree.get(key) or {}).get("init_args", {}) for key in self._top.fixed}
            try:
                config = self._top.parse_object(tree)
            except ArgumentError as error:
                refused = error
            else:
                self._try_trainer({name: config.trainer[name] for name in self._settings.tree["trainer"]})
                if not self._problems:
                    return config  # type: ignore[no-any-return]
        self._try_values()
        raise ConfigError("\n".join(self._problems.values()) or str(refused)) from refused

    def _add_problem(self, path: Keys, text: str) -> None:
        """Record an error of a key."""
        self._problems[path] = f"{self._settings.describe_source(path)}: {text}"

    def _check_class(
        self, path: Keys, kind: type, arguments: dict[str, Any], *, requires_all: bool = True, default: Any = None
    ) -> None:
        """Check the names of a class's arguments and the values inside; with `requires_all`, missing arguments too."""
        parser = ArgumentParser(exit_on_error=False)
        options = parser.add_class_arguments(kind, skip=_get_supplied_arguments(path), fail_untyped=False)
        parameters, defaults = _get_parameters(kind, options), parser.get_defaults().as_dict() | (default or {})
        self._named.append(NamedClass(path, kind, arguments, parameters))
        linked = {
            name: source
            for name in parameters
            if (source := self._top.linked.get(shorten_key(".".join((*path, name)))))
        }
        if getattr(kind, "NONE_IS_DEFAULT", False):
            # Configs of LightningCLI have every argument, and null for many arguments that are not set.
            for name in [name for name, value in arguments.items() if value in (None, "null") and name in parameters]:
                if NoneType not in classes.iterate_hints(parameters[name].annotation):
                    del arguments[name]
        for name in [name for name, value in arguments.items() if is_neutral_argument(kind, str(name), value)]:
            del arguments[name]
        for name, value in arguments.items():
            if name not in parameters:
                self._report_unknown_option((*path, name), kind.__name__, options, getattr(kind, "INSTEAD", {}))
                continue
            if name in linked:
                self._add_problem((*path, name), f"Lumen takes {name} from {linked[name]}. Leave {name} out.")
                continue
            if self._settings.is_bare((*path, name)) and not classes.accepts_true(parameters[name].annotation):
                self._report_missing_value((*path, name), classes.describe_type(parameters[name].annotation))
                continue
            default_value, hint = defaults.get(name), parameters[name].annotation
            if is_class(default_value) and isinstance(value, str) and classes.is_class_name(value, hint):
                value = arguments[name] = {"class_path": value}
            if isinstance(value, ListAddition) and isinstance(default_value, list | tuple):
                value[:0] = default_value
            self._check_value(value, (*path, name), hint, default_value)
        empty = inspect.Parameter.empty
        filled = {*arguments, *linked, *(default or {})}
        missing = [name for name, each in parameters.items() if each.default is empty and name not in filled]
        has_data = self._settings.tree.get("data") or "data" in self._top.fixed
        if path == ("model", "init_args") and has_data:
            self.links = missing
        elif requires_all:
            where = self._settings.describe_source((*path[:-1], "class_path") if path[-1:] == ("init_args",) else path)
            for name in missing:
                self._problems[*path, name] = f"{where}: {kind.__name__} needs {name}. Set {name}."

    def _check_value(self, value: Any, path: Keys, hint: Any, default: Any = None) -> None:
        """Find and check the classes in a value."""
        records: list[Any] = [
            each for each in classes.iterate_alternatives(hint) if is_dataclass(each) or classes.is_mapping(each)
        ]
        if is_class(value) or (isinstance(value, str) and classes.is_class_name(value, hint)):
            self._check_node(path, value, hint, default)
        elif isinstance(value, dict) and len(records) == 1 and not classes.is_mapping(records[0]):
            self._check_class(path, records[0], value)
        elif isinstance(value, str) and _MINUTES.fullmatch(value) and {int, float} & {*classes.list_classes(hint)}:
            self._add_problem(path, f"YAML reads {value} as {yaml.safe_load(value)}. For a duration write 0{value}.")
        elif (
            isinstance(value, dict)
            and (found := [key for key in value if type(key) is float])
            and classes.is_mapping_by_int(hint)
        ):  # the fraction would be cut off
            self._add_problem(path, f"a key must be a whole number, found {found[0]}. Write a whole number.")
        elif isinstance(value, dict | list):
            inner = classes.get_item_type(hint, value)
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._check_value(item, (*path, str(key)), inner)

    def _check_node(self, path: Keys, node: Mapping[str, Any] | str, hint: Any, default: Any = None) -> None:
        """Find a class, and check its arguments."""
        if self._settings.is_bare(path):
            self._report_missing_value(path, "a class")
            return
        place = path if isinstance(node, str) else (*path, "class_path")
        node = {"class_path": node} if isinstance(node, str) else node
        settings, name = self._settings, str(node.get("class_path") or "")
        if (found := classes.find_counterpart(name)) is not None:
            self._problems[*path, "class_path"] = (
                f"{settings.describe_source(place)}: {name} is a class of Lightning. {found.advice}"
            )
            if found.name is None:
                return
            name = found.name  # check its arguments too
        try:
            kind = classes.find_class(name, classes.list_bases(hint), settings.describe_source(place), settings.files)
        except ConfigError as error:
            self._problems[path] = f"{error}{_suggest_callback_option(path, name)}"
            if path == ("trainer", "strategy") and name in STRATEGIES:
                self._add_problem(path, f"{name} has no options. Set options of {', '.join(CLASSES_BY_NAME)} only.")
            return
        if inspect.isclass(kind) and name == kind.__name__ and isinstance(node, dict):
            # Given a short name, jsonargparse would also find Lightning's class.
            node["class_path"] = get_import_path(kind)
        if inspect.isclass(kind) and "dict_kwargs" not in node:
            # The class that receives this class builds it, and supplies the missing arguments.
            built_later = any(get_origin(part) is Callable for part in classes.iterate_hints(hint))
            arguments, defaults = node.get("init_args") or {}, None
            if is_class(default) and default["class_path"] == get_import_path(kind):
                defaults = default.get("init_args")
            elif is_class(default) and isinstance(node, dict):  # jsonargparse would keep arguments of the other class
                node["init_args"] = arguments = {
                    **classes.get_settable_defaults(kind, default.get("init_args") or {}),
                    **arguments,
                }
            self._check_class((*path, "init_args"), kind, arguments, requires_all=not built_later, default=defaults)

    def _check_fixed_class(self, key: str, node: Any, kind: type) -> None:
        """Check the arguments of the model or the data, if the script determines the class."""
        if not is_class(node) and node:
            self._add_problem((key,), f"expected `name: value` lines, found {node!r}.")
            return
        named = node.get("class_path")
        if named not in (None, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
            text = f"the script sets the class {kind.__name__}, found {named}. Leave class_path out."
            self._add_problem((key, "class_path"), text)
        self._check_class((key, "init_args"), kind, node.get("init_args") or {})

    def _check_schedule(self, path: Keys, entry: Any) -> None:
        """Check one of several schedulers, and its interval."""
        if not (isinstance(entry, dict) and is_class(entry.get("scheduler"))):
            self._add_problem(path, f"expected a class, or {{scheduler: CLASS, interval: step}}, found {entry!r}.")
            return
        self._check_node((*path, "scheduler"), entry["scheduler"], self._top.bases["lr_scheduler"])
        self._check_class(path, Schedule, {name: value for name, value in entry.items() if name != "scheduler"})

    def _try_trainer(self, arguments: Mapping[str, Any]) -> None:
        """Build a trainer with each value alone, to find all wrong values: a trainer reports only the first one."""
        for name, value in arguments.items():
            path = ("trainer", name)
            if path in self._problems or name not in _TRAINER_KEYS or not isinstance(value, str | int | float):
                continue
            if self._runs_elsewhere and name in ("accelerator", "devices", "num_nodes"):
                continue
            alone: dict[str, Any] = {name: value}
            try:
                # Only a strategy's name is tried, because a strategy is built once.
                choose_processes(None, None, **alone) if name == "strategy" else Trainer(**alone)
            except ConfigError as error:
                self._add_problem(path, str(error).removeprefix(f"{name}: "))

    def _try_values(self) -> None:
        """Find the values that do not fit, innermost first; a value that contains a wrong value is not tried."""
        for named in reversed(self._named):
            for name in filter(named.parameters.__contains__, named.arguments):
                path = (*named.path, name)
                if any(problem[: len(path)] == path for problem in self._problems):
                    continue
                if named.accepts(name):
                    self._try_trainer({name: named.get_value(name)} if named.path == ("trainer",) else {})
                else:
                    value, hint = named.arguments[name], named.parameters[name].annotation
                    kinds = classes.group_by_name(classes.list_bases(hint))
                    closest = suggest_names(value, kinds) if isinstance(value, str) else ""
                    if isinstance(value, dict) and kinds:
                        closest = f" Set the class of these options by --{shorten_key('.'.join(path))} CLASS."
                    self._add_problem(
                        path, f"expected {classes.describe_type(hint)}, found {format_inline(value)}.{closest}"
                    )
        for name, hint in self._top.get_plain_option_types().items():
            parser = ArgumentParser(exit_on_error=False)
            parser.add_argument("--value", type=hint)
            keys, node = tuple(name.split(".")), self._settings.tree
            for key in keys[:-1]:
                node = node[key] if isinstance(node.get(key), dict) else {}
            if (given := node.get(keys[-1])) is not None and not classes.accepts(parser, {"value": given}):
                self._add_problem(keys, f"expected {classes.describe_type(hint)}, found {format_inline(given)}.")

    def _report_missing_value(self, path: Keys, expected: str) -> None:
        """Record that an option on the command line has no value, but needs one."""
        option = f"--{shorten_key('.'.join(path))}"
        self._add_problem(path, f"no value is given, expected {expected}. Write {option} VALUE.")

    def _report_unknown_option(self, path: Keys, owner: str, known: Iterable[str], instead: Mapping[str, str]) -> None:
        """Record that a class has no such option."""
        name = str(path[-1])  # a key in YAML may be no text
        hint = _REPLACEMENTS.get(path) or instead.get(name)  # `instead`: arguments of Lightning's class
        self._add_problem(path, f"{owner} has no option {name}.{f' {hint}' if hint else suggest_names(name, known)}")

    def _report_unknown_section(self, key: str, known: list[str]) -> None:
        """Record that no section and no option has this name."""
        hint = _REPLACEMENTS.get((key,))
        paths = ((*each.path, name) for each in self._named if each.path for name in each.parameters)
        options = [shorten_key(".".join(path)) for path in paths if not any(map(str.isdigit, path))]
        closest = (
            f" {hint}"
            if hint
            else _suggest_options(str(key), known, options, typed=self._settings.is_on_command_line((key,)))
        )
        self._add_problem((key,), f"{self._top.prog} has no option {key}.{closest}")


def _get_supplied_arguments(path: Keys) -> set[str]:
    """Return the arguments of a class that Lumen supplies."""
    key = _NUMBERED_SCHEDULER.sub("lr_scheduler", ".".join(path).removesuffix(".init_args"))
    return set(SUPPLIED.get(key, ()))


def _get_parameters(kind: type, names: Iterable[str]) -> Mapping[str, inspect.Parameter]:
    """Return some parameters of a class and its bases, by name; types imported only for type checkers stay text."""

    def signature(constructor: Any) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(constructor, eval_str=True).parameters
        except Exception:
            return inspect.signature(constructor).parameters

    found = ChainMap(*({**signature(vars(owner)["__init__"])} for owner in kind.__mro__ if "__init__" in vars(owner)))
    return {name: found.get(name, _UNKNOWN) for name in names}


def _suggest_options(key: str, heads: Collection[str], options: Iterable[str], *, typed: bool) -> str:
    """Return a sentence, after a space, that suggests other options for a wrong one; "" if no option is similar.

    Args:
        key: The wrong key, at the top level of the config.
        heads: The sections, and the options outside of the sections.
        options: The arguments of the sections, each as `SECTION.NAME`.
        typed: True if the key is on the command line, where options begin with dashes.
    """
    dashes = "--" if typed else ""
    by_name: dict[str, list[str]] = {}
    for option in options:
        by_name.setdefault(option.rpartition(".")[2], []).append(f"{dashes}{option}")
    found = by_name.get(key) or by_name.get(_SYNONYMS.get(key, ""))
    if found:
        return f" Did you mean {' or '.join(found)}?"
    if key in INSTEAD:
        return " " + _TRAINER_OPTION.sub(rf"{dashes}trainer.\1", INSTEAD[key])
    if closest := suggest_names(key, heads, form=f"{dashes}{{}}".format):
        return closest
    return suggest_names(key, by_name, cutoff=0.7, form=lambda name: " or ".join(by_name[name]))


def _find_config() -> str | None:
    """Return the first config file in the working directory that configures a model, or None."""
    for path in sorted(Path().glob("*.yaml")):
        with suppress(OSError):
            if re.search("^model:", path.read_text(errors="replace"), re.M):
                return shlex.quote(str(path))
    return None


def _suggest_callback_option(path: Keys, value: str) -> str:
    """Return a sentence that suggests other options for `--trainer.callbacks.patience 3`; "" if none applies."""
    name = path[-1]
    if (
        path[:-1] != ("trainer", "callbacks")
        or name.isdigit()
        or "." in value
        or suggest_names(value, {*classes.group_by_name([Callback]), *RENAMED, *INSTEAD_OF_CLASSES}, cutoff=0.75)
    ):
        return ""
    option = f"{name}={value}"
    return (
        f" To set an option of a callback, name the callback, --trainer.callbacks.NAME.{option}, or add the callback "
        f"first: --trainer.callbacks+=CLASS --trainer.callbacks.{option}."
    )
