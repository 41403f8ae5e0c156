"""Where settings come from, and how a later layer covers an earlier one.

Weakest first: environment variables, config files in their order, the command line. jsonargparse merges such layers
too, but lets arguments of a class outlive a switch to another class that has arguments of the same names.
"""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, final

import yaml

from lumen.errors import ConfigError

Tree = dict[str, Any]
Keys = tuple[str, ...]
_CLASSES = {("model",), ("data",), ("optimizer",), ("lr_scheduler",)}
_GROUPS = ("parameter_groups", "lookahead", "lr_schedule", "trainer")
_NODE = ("class_path", "init_args", "dict_kwargs")


@final
class _Yaml(yaml.SafeLoader):
    """Numbers as in YAML 1.2: `1e-4` is one, and `00:15:00` is text, not 900."""


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$")
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
_Yaml.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))


def load_yaml(text: str) -> Any:
    """Read YAML; nothing but plain data comes out."""
    return yaml.load(text, _Yaml)


@final
class Settings:
    """The merged layers: `tree`, in which every class is `{class_path: ..., init_args: ...}` however it was written."""

    def __init__(self, command: str, files: list[str], words: list[tuple[str, str]]) -> None:
        prefix = f"LUMEN_{command.upper()}__"  # LUMEN_FIT__TRAINER__MAX_STEPS
        self._layers = [
            (f"the environment variable {name}", _nested(name.removeprefix(prefix).lower().split("__"), text))
            for name, text in sorted(os.environ.items())
            if name.startswith(prefix)
        ]
        self._layers += [(file, merge({}, _read(file))) for file in files]
        # One layer for all words: whether `--optimizer SGD` stands before or after `--optimizer.lr 1` is the same.
        typed: Tree = reduce(merge, (_nested(key.split("."), text) for key, text in words), {})
        self._layers.append(("the command line", typed))
        self.tree: Tree = reduce(merge, (tree for _, tree in self._layers), {key: {} for key in _GROUPS})
        for key in _GROUPS:
            if not isinstance(self.tree[key] or {}, dict):
                raise ConfigError(f"{self.where((key,))}: expected `name: value` lines, found {self.tree[key]!r}.")

    def where(self, path: Keys) -> str:
        """A key as the command line has it, and the last layer that set it."""
        key = ".".join(name for name in path if name not in _NODE)
        return next((f"{key} ({source})" for source, tree in reversed(self._layers) if _has(tree, path)), key)


def parse_words(words: list[str]) -> list[tuple[str, str]]:
    """Take `--key value` and `--key=value` apart; a key alone means `true`."""
    pairs, rest = [], deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} stands alone. Settings are written --key value, config files --config FILE.")
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = rest.popleft() if rest and not rest[0].startswith("--") else "true"
        pairs.append((key, text))
    return pairs


def merge(old: Any, new: Any, path: Keys = ()) -> Any:
    """One value over another: mappings are merged, all else is replaced, a class by another class too."""
    callbacks = path[:2] == ("trainer", "callbacks") and path[-1] not in _NODE
    named = path in _CLASSES or (callbacks and (len(path) == 3 or (len(path) == 2 and isinstance(new, str))))
    begun = isinstance(old, str) and isinstance(new, dict) and old.rpartition(".")[2].isidentifier()
    if isinstance(new, str) and not named and _is_class(old) and not _same(old.get("class_path"), new):
        return new  # a word that stands for an object: `--trainer.profiler simple`
    if named or begun or _is_class(old) or _is_class(new):
        old, new = _as_class(old), _as_class(new)
        if _is_class(old) and _is_class(new) and not _same(old.get("class_path"), new.get("class_path")):
            old = {}
    if isinstance(new, list):
        return [merge(None, item, (*path, str(number))) for number, item in enumerate(new)]
    if not isinstance(new, dict):
        return new
    if isinstance(old, list) and not _is_class(new):
        raise ConfigError(f"{'.'.join(path)} is a list: write all of it anew, or give its entries names in the config.")
    old = old if isinstance(old, dict) else {}
    return {**old, **{key: merge(old.get(key), value, (*path, str(key))) for key, value in new.items()}}


def _is_class(value: Any) -> bool:
    return isinstance(value, dict) and ("class_path" in value or "init_args" in value)


def _as_class(value: Any) -> Any:
    if not isinstance(value, dict):
        return None if value == "null" else {"class_path": value} if isinstance(value, str) else value
    node = {key: value[key] for key in _NODE if key in value}
    if not isinstance(node.get("init_args") or {}, dict):
        raise ConfigError(f"init_args of {node.get('class_path')}: expected `name: value` lines, found {value}.")
    beside = {key: item for key, item in value.items() if key not in _NODE}
    return {**node, "init_args": {**beside, **(node.get("init_args") or {})}}


def _same(old: str | None, new: str | None) -> bool:
    """Whether no other class is named: `AdamW` is `torch.optim.AdamW`."""
    return old is None or new is None or f".{old}".endswith(f".{new}") or f".{new}".endswith(f".{old}")


def _has(node: Any, path: Keys) -> bool:
    if isinstance(node, list):
        node = {str(number): item for number, item in enumerate(node)}
    return not path or (isinstance(node, dict) and path[0] in node and _has(node[path[0]], path[1:]))


def _nested(keys: list[str], text: str) -> Tree:
    value: Any = text
    with suppress(yaml.YAMLError):
        listed = keys == ["trainer", "callbacks"] and text.startswith("[")
        value = load_yaml(text) if text.startswith("{") or listed else text
    return dict(merge({}, reduce(lambda inner, key: {key: inner}, reversed(keys), value)))


def _read(file: str) -> Tree:
    try:
        tree = load_yaml(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the config file {file}: {error}.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the config file {file}: expected `key: value` lines, found {tree!r}.")
    return tree
