"""Layers of settings, and the rules by which a later layer overrides an earlier one.

The order, weakest first, is environment variables, config files as listed, the command line. jsonargparse merges such
layers too, but it has two gaps. If another layer switches to another class, arguments with the same names survive.
jsonargparse also does not record which layer set a value.
"""

from __future__ import annotations

import os
import reprlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import reduce
from itertools import chain, count
from typing import Any, final

import yaml

from lumen.cli.yaml_text import YamlRefused, describe_yaml_error, load_yaml, read_yaml
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path, suggest_names
from lumen.strategies.factory import CLASSES_BY_NAME

Tree = dict[str, Any]
Keys = tuple[str, ...]
_CLASSES = {("model",), ("data",), ("optimizer",), ("lr_scheduler",)}
_GROUPS = {"parameter_groups", "lookahead", "lr_schedule", "trainer"}
_CALLBACKS = ("trainer", "callbacks")
_SCHEDULERS = ("lr_scheduler",)
_STRATEGY = ("trainer", "strategy")
NODE = ("class_path", "init_args", "dict_kwargs")
_LIGHTNING_CLI_KEYS = "PL_"  # prefix of LightningCLI's environment variables


@final
class ListAddition(list[Any]):
    """List of entries that `--KEY+` adds to a list of the layers below, or to the default if the layers have no list.

    Attributes:
        names: The names of the entries in the merged value, after the merge: their numbers in a list.
    """

    names: tuple[str, ...] = ()


@final
class BareKey(str):
    """Value of an option that has no value on the command line: a switch that is on."""


@final
class Settings:
    """Merged layers in `tree`, where every class has the form `{class_path: ..., init_args: ...}`.

    Args:
        command: The command of the settings; None for a script that runs its own loops.
        known: The names of all keys.
        groups: The keys whose value is a mapping of names to values.
        commands: The names of all commands, under which a config file may have the settings of each command.
        script: The settings of the script, which all other layers override.
        files: The paths of the config files.
        words: The command line, as `parse_words` returns it.
        arguments: The settings that the script passes instead of a command line.

    Attributes:
        files: Paths of the config files.
        unread: Environment variables that Lumen does not read, by the name that Lumen would read.
    """

    def __init__(
        self,
        command: str | None,
        known: Collection[str],
        groups: Collection[str],
        *,
        commands: Collection[str] = (),
        files: list[str],
        words: list[tuple[str, str]],
        script: Tree | None = None,
        arguments: Tree | None = None,
    ) -> None:
        self.files = files
        command_prefix = "" if command is None else f"{command.upper()}__"  # LUMEN_FIT__TRAINER__MAX_STEPS
        variables = _read_variables(f"LUMEN_{command_prefix}", known if command is None else None)
        unread = _read_variables(f"{_LIGHTNING_CLI_KEYS}{command_prefix}", known)
        self.unread = {f"LUMEN_{name.removeprefix(_LIGHTNING_CLI_KEYS)}": name for name in unread}
        if command_prefix:  # The variables of a command are separate from the variables of a script's `Trainer`.
            of_scripts = [name for name in sorted(os.environ) if name.startswith("LUMEN_TRAINER__")]
            self.unread |= {f"LUMEN_{command_prefix}{name.removeprefix('LUMEN_')}": name for name in of_scripts}
        self._layers = [("the script", merge({}, script or {}))]
        self._layers += [
            (f"the environment variable {name}", merge({}, nest_value(keys, os.environ[name])))
            for name, keys in variables.items()
        ]
        self._layers += [(file, merge({}, _get_command_part(read_config(file), command, commands))) for file in files]
        self._layers.append(("the arguments", merge({}, arguments or {})))
        # All command-line arguments form one layer, so `--optimizer SGD` may come before or after `--optimizer.lr 1`.
        typed: Tree = reduce(merge, _make_word_trees((key, str(text)) for key, text in words), {})
        self._bare = {tuple(key.split(".")) for key, text in dict(words).items() if isinstance(text, BareKey)}
        self._layers.append(("the command line", typed))
        self.tree: Tree = reduce(merge, (tree for _, tree in self._layers), {key: {} for key in groups})
        for key in groups:
            if self.tree[key] is None:
                self.tree[key] = {}
            if not isinstance(self.tree[key], dict):
                raise ConfigError(
                    f"{self.describe_source((key,))}: expected `name: value` lines, found {self.tree[key]!r}."
                )

    def describe_source(self, path: Keys) -> str:
        """Return a key in the form of the command line, with the last layer that set the key."""
        key = ".".join(str(name) for name in path if name not in NODE)
        return next((f"{key} ({source})" for source, tree in reversed(self._layers) if _has_path(tree, path)), key)

    def is_on_command_line(self, path: Keys) -> bool:
        """Return True if the command line, the highest layer, has set a key."""
        return _has_path(self._layers[-1][1], path)

    def is_bare(self, path: Keys) -> bool:
        """Return True if a key has no value on the command line, which means `true`."""
        return tuple(name for name in path if name not in NODE) in self._bare

    def get_class_name(self, key: str) -> str | None:
        """Return the class that a key names by `class_path` or as a strategy, or None."""
        node: Any = self.tree
        for name in key.split("."):
            arguments = node.get("init_args") or node if isinstance(node, dict) else {}
            node = arguments.get(name)
        if isinstance(node, str):
            return CLASSES_BY_NAME.get(node)
        return str(node["class_path"]) if isinstance(node, dict) and "class_path" in node else None


def _read_variables(prefix: str, known: Collection[str] | None) -> dict[str, list[str]]:
    """Return the environment variables that begin with a prefix, each with its keys.

    Args:
        prefix: The first characters of the variables' names.
        known: The first keys to include; None includes all variables.
    """
    found = {name: name.removeprefix(prefix).lower().split("__") for name in sorted(os.environ) if name != prefix}
    ours = {name: keys for name, keys in found.items() if name.startswith(prefix)}
    return {name: keys for name, keys in ours.items() if known is None or keys[0] in known}


def parse_words(words: list[str]) -> list[tuple[str, str]]:
    """Split `--key value` and `--key=value` into pairs; a key without a value means `true`."""
    pairs, rest = [], deque(words)
    while rest:
        word = rest.popleft()
        if word == "-c":
            word = "--config"
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} has no key. Write a setting as --key value, a config file as --config FILE.")
        key, equals, text = word[2:].partition("=")
        if not equals and key == "config" and (not rest or rest[0].startswith("--")):
            raise ConfigError("--config: no file is named. Write --config FILE.")
        if not equals:
            text = rest.popleft() if rest and not rest[0].startswith("--") else BareKey("true")
        if ((key,) in _CLASSES or key in _GROUPS) and text.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"--{key} {text}: expected a value, found a file. Write --config {text}, with the settings below "
                f"`{key}:` in this file."
            )
        pairs.append((key, text))
    return pairs


def as_jsonargparse_tree(tree: Any, path: Keys = ()) -> Any:
    """Return a tree in jsonargparse's form: a single callback is in a list; several schedulers are named by number."""
    if isinstance(tree, dict):
        found = {key: as_jsonargparse_tree(value, (*path, key)) for key, value in tree.items()}
        return [found] if path == _CALLBACKS and is_class(tree) else found
    if isinstance(tree, list) and path == _SCHEDULERS:
        return {str(number): as_jsonargparse_tree(value) for number, value in enumerate(tree)}
    return [as_jsonargparse_tree(value) for value in tree] if isinstance(tree, list) else tree


def merge(old: Any, new: Any, path: Keys = ()) -> Any:
    """Return a new value merged over an old one.

    Mappings are merged. Any other value is replaced, also a class by a different class.
    """
    if isinstance(new, ListAddition):
        return _add_to_list(old, new, path)
    callback = path[:2] == _CALLBACKS and len(path) == 3 and path[-1] not in NODE
    named = path in _CLASSES or callback or (path == _CALLBACKS and isinstance(new, str)) or _is_scheduler(new, path)
    begun = isinstance(old, str) and isinstance(new, dict) and old.rpartition(".")[2].isidentifier()
    if path == _STRATEGY and isinstance(new, str):
        name, has_options = CLASSES_BY_NAME.get(new, new), isinstance(old, dict)
        if "." in new or (has_options and (not is_class(old) or _is_same_class(old.get("class_path"), name))):
            new, named = name, True  # The options, which may come before the name, are kept.
    if isinstance(new, str) and not named and is_class(old) and not _is_same_class(old.get("class_path"), new):
        return new  # The word names an object, as in `--trainer.profiler simple`.
    if path == _CALLBACKS and (isinstance(new, str) or is_class(new)) and not is_class(old):
        old = None  # A single callback replaces all named callbacks.
    if path == _CALLBACKS and is_class(old) and isinstance(new, dict) and not is_class(new):
        # The keys were not names.
        new = {name: item["class_path"] if is_class(item) else item for name, item in new.items()}
    if path == _SCHEDULERS and isinstance(old, list) and isinstance(new, dict) and "class_path" not in new:
        raise ConfigError("lr_scheduler is a list. Write the whole list, or add an entry by --lr_scheduler+.")
    if named or begun or is_class(old) or is_class(new):
        old, new = _as_class(old), _as_class(new)
        if is_class(old) and is_class(new) and not _is_same_class(old.get("class_path"), new.get("class_path")):
            old = {}
    if isinstance(new, list):
        return [_as_list_item(item, (*path, str(number))) for number, item in enumerate(new)]
    if not isinstance(new, dict):
        return new
    if isinstance(old, list) and not is_class(new):
        key = ".".join(path)
        raise ConfigError(
            f"{key} is a list. Write the whole list, add an entry by --{key}+, or give the entries names."
        )
    merged = {**old} if isinstance(old, dict) else {}
    for key, value in new.items():
        if isinstance(key, str) and key.endswith("+"):
            key, value = key.removesuffix("+"), ListAddition(value if isinstance(value, list) else [value])
        merged[key] = merge(merged.get(key), value, (*path, str(key)))
    if path == _STRATEGY and (short := str(merged.get("class_path"))) in CLASSES_BY_NAME:
        merged["class_path"] = CLASSES_BY_NAME[short]
    return merged


def _is_scheduler(value: Any, path: Keys) -> bool:
    """Return True if a value is one of several schedulers, alone or with its interval in the same mapping."""
    numbered = path[:1] == _SCHEDULERS and path[1:2] != () and path[1].isdigit()
    return numbered and (path[2:] == ("scheduler",) or (len(path) == 2 and isinstance(value, str)))


def _as_list_item(value: Any, path: Keys) -> Any:
    """Return an item of a list; one of several schedulers has the form `{scheduler: CLASS, interval: ...}`."""
    item = merge(None, value, path)
    return {"scheduler": item} if path[:-1] == _SCHEDULERS and is_class(item) else item


def _add_to_list(old: Any, new: ListAddition, path: Keys) -> Any:
    """Return a list, or a dictionary of named callbacks, with the new entries added."""
    items = [_as_list_item(item, (*path, "0")) for item in new]
    if isinstance(old, str) and old.startswith("["):
        old = _parse_value(path, old)
    if isinstance(old, dict) and old and not is_class(old):
        named = dict(old)
        for item in items:
            name = str(item.get("class_path") if isinstance(item, dict) else item).rpartition(".")[2].lower()
            named[next(each for each in chain([name], (f"{name}{k}" for k in count(2))) if each not in named)] = item
        new.names = tuple(named)[len(old) :]
        return named
    before = old if isinstance(old, list) else [] if old is None else [_as_list_item(old, (*path, "0"))]
    new.names = tuple(str(len(before) + number) for number in range(len(items)))
    return (ListAddition if old is None or isinstance(old, ListAddition) else list)([*before, *items])


def as_list(callbacks: Any) -> list[Any]:
    """Return callbacks as a list, from any form that the settings allow: one, several, named, or None."""
    if isinstance(callbacks, dict) and not is_class(callbacks):
        callbacks = list(callbacks.values())
    return [each for each in (callbacks if isinstance(callbacks, list) else [callbacks]) if each is not None]


def is_class(value: Any) -> bool:
    """Return True if a value is a class with its arguments."""
    return isinstance(value, dict) and ("class_path" in value or "init_args" in value)


def _as_class(value: Any) -> Any:
    if not isinstance(value, dict):
        return None if value == "null" else {"class_path": value} if isinstance(value, str) else value
    node = {key: value[key] for key in NODE if key in value}
    if not isinstance(node.get("init_args") or {}, dict):
        raise ConfigError(f"init_args of {node.get('class_path')}: expected `name: value` lines, found {value}.")
    arguments = {key: item for key, item in value.items() if key not in NODE}
    return {**node, "init_args": {**arguments, **(node.get("init_args") or {})}}


def _is_same_class(old: str | None, new: str | None) -> bool:
    """Return True unless two names mean different classes: `AdamW` matches `torch.optim.AdamW`."""
    return old is None or new is None or f".{old}".endswith(f".{new}") or f".{new}".endswith(f".{old}")


def _has_path(node: Any, path: Keys) -> bool:
    if isinstance(node, list):
        names = getattr(node, "names", ()) or map(str, range(len(node)))
        node = dict(zip(names, node, strict=True))
    path = tuple(map(str, path))
    inner = {str(key): value for key, value in node.items()} if isinstance(node, dict) else {}
    if path[:1] == ("init_args",) and "init_args" not in inner:
        path = path[1:] or path  # another layer names the class of these arguments
    return not path or (path[0] in inner and _has_path(inner[path[0]], path[1:]))


def _make_word_trees(words: Iterable[tuple[str, str]]) -> list[Tree]:
    """Return a tree for each pair; `--KEY.NAME` after `--KEY+` belongs to the entry that `--KEY+` added."""
    added: dict[Keys, ListAddition] = {}
    trees: list[Tree] = []
    for key, text in words:
        keys = tuple(key.removesuffix("+").split("."))
        owner = next((list_key for list_key in added if keys[: len(list_key)] == list_key != keys), None)
        if owner is not None:
            inner = nest_value(keys[len(owner) :], text)
            added[owner][-1] = merge(added[owner][-1], inner, (*owner, "0"))
        elif key.endswith("+"):
            value = _parse_value(keys, text)
            added[keys] = ListAddition(value if isinstance(value, list) else [value])
            trees.append(_nest_tree(keys, added[keys]))
        else:
            trees.append(nest_value(keys, text))
    return trees


def nest_value(keys: Sequence[str], text: Any) -> Tree:
    """Return the settings in which a key of several names has a value; text in braces is parsed as YAML."""
    if not isinstance(text, str):
        return _nest_tree(keys, text)
    listed = tuple(keys) in (_CALLBACKS, _SCHEDULERS) and text.startswith("[")
    return _nest_tree(keys, _parse_value(keys, text) if text.startswith("{") or listed else text)


def _nest_tree(keys: Sequence[str], value: Any) -> Tree:
    return dict(reduce(lambda inner, key: {key: inner}, reversed(keys), value))


def _parse_value(keys: Sequence[str], text: str) -> Any:
    """Return a text parsed as YAML, or the text itself if it is not valid YAML."""
    try:
        return load_yaml(text)
    except YamlRefused as error:
        raise ConfigError(f"{'.'.join(keys)}: {describe_yaml_error(error)}.") from error
    except yaml.YAMLError:
        return text


def read_config(file: str) -> Tree:
    """Return the settings in a config file.

    Raises:
        ConfigError: The file cannot be read, or is not a config.
    """
    try:
        text = expand_path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {file}: {error.strerror or error}.{_suggest_file(file)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read the config file {file}: {error}. Save it as UTF-8.") from error
    tree = read_yaml(text, f"the config file {file}")
    if not isinstance(tree, dict | None):
        raise ConfigError(f"the config file {file}: expected `key: value` lines, found {reprlib.repr(tree)}.")
    return tree or {}


def _get_command_part(tree: Tree, command: str | None, commands: Collection[str]) -> Tree:
    """Return the settings of a command in a config file that may have settings of several commands."""
    if command is None or not {*commands} & tree.keys():
        return tree
    shared = {key: value for key, value in tree.items() if key not in {*commands, "subcommand"}}
    return dict(merge(shared, tree.get(command) or {}))


def _suggest_file(file: str) -> str:
    """Return a hint that names existing config files with names similar to a missing one."""
    path = expand_path(file)
    files = [each.name for each in path.parent.glob("*.y*ml")] if not path.exists() else []
    return suggest_names(path.name, files, form=lambda name: str(path.with_name(name)))
