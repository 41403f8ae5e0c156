"""Where settings come from, and how a later layer covers an earlier one.

The layers, weakest first: environment variables, config files in their order, the command line. Each value carries
where it came from, so that an error can name the line to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import yaml

from lumen.errors import ConfigError

CLASSES = ("model", "data", "optimizer", "lr_scheduler")
SCHEDULE = ("interval", "frequency", "monitor", "strict")  # stand next to lr_scheduler's class_path
COMMAND_LINE = "command line"
_NODE_KEYS = ("class_path", "init_args")
_CLASS_NAME = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*")

SameClass = Callable[[tuple[str, ...], str, str], bool]


@final
@dataclass(frozen=True, slots=True)
class Node:
    """One setting: a scalar, a list of nodes or a dictionary of nodes, and where it was written."""

    value: Any
    origin: str

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value

    @property
    def is_class(self) -> bool:
        """Whether it names a class: `{class_path: ..., init_args: ...}`."""
        return isinstance(self.value, dict) and "class_path" in self.value


def as_node(value: Any, origin: str) -> Node:
    """Plain data with one origin."""
    if isinstance(value, dict):
        return Node({key: as_node(item, origin) for key, item in value.items()}, origin)
    return Node([as_node(item, origin) for item in value] if isinstance(value, (list, tuple)) else value, origin)


# ---------------------------------------------------------------------- files


@final
class _Loader(yaml.SafeLoader):
    """Reads the scalars of YAML 1.2: `no` is a word, `1e-4` a number, and `12:30` not a count of minutes."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"({_pattern})$"), _first)


def read_file(path: Path) -> Node:
    """Read one config file.

    Raises:
        ConfigError: It cannot be read, is not YAML, or is no mapping; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file {path}: {reason}.") from error
    node = _parse(text, lambda line: f"{path}:{line}")
    if node.value is None:
        return Node({}, str(path))
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, found {_shown(node)}.")
    return node


def _parse(text: str, origin: Callable[[int], str]) -> Node:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return Node(None, origin(1)) if root is None else _convert(loader, root, origin, root.start_mark.line + 1)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{origin(line)}: this is not valid YAML: {error.problem or error.context}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{origin(1)}: this is not valid YAML: {error}.") from error
    finally:
        loader.dispose()


def _convert(loader: _Loader, node: yaml.Node, origin: Callable[[int], str], line: int) -> Node:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        loader.construct_undefined(node)  # which refuses it
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                loader.construct_undefined(key_node)
            if key_node.value in seen:
                at = origin(key_node.start_mark.line + 1)
                raise ConfigError(f"{at}: the key {key_node.value} is there for the second time. Remove one of them.")
            seen.add(str(key_node.value))
        loader.flatten_mapping(node)
        children: dict[Any, Node] = {}
        for key_node, value_node in node.value:
            at_line = key_node.start_mark.line + 1
            children[loader.construct_object(key_node)] = _convert(loader, value_node, origin, at_line)
        return Node(children, origin(line))
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(loader, item, origin, item.start_mark.line + 1) for item in node.value], origin(line))
    return Node(loader.construct_object(node), origin(line))


# ---------------------------------------------------------------------- environment and command line


def read_environment(command: str, environment: Mapping[str, str]) -> Node:
    """The layer of `LUMEN_FIT__TRAINER__MAX_STEPS=100` and the like."""
    prefix = f"LUMEN_{command.upper()}__"
    names = sorted(name for name in environment if name.startswith(prefix))
    return assigned(
        (name.removeprefix(prefix).lower().replace("__", "."), environment[name], f"environment variable {name}")
        for name in names
    )


def assigned(assignments: Iterable[tuple[str, Any, str]]) -> Node:
    """One layer of single assignments `(dotted key, value, origin)`, whose order does not matter between keys.

    Naming a class and setting its arguments may come in either order: both end in one node.
    """
    root: dict[str, Node] = {}
    origin = ""
    for key, value, origin in assignments:
        *parents, last = key.split(".")
        tree = root
        for parent in parents:
            below = tree.get(parent)
            if below is None or not isinstance(below.value, dict):
                below = tree[parent] = Node({} if below is None else {"class_path": below}, origin)
            tree = below.value
        present = tree.get(last)
        node = _structured(value, origin)
        if present is not None and isinstance(present.value, dict) and isinstance(node.value, str):
            present.value["class_path"] = node
        else:
            tree[last] = node
    return Node(root, origin)


def _structured(value: Any, origin: str) -> Node:
    """A mapping or a null written as text; other text stays text, for the type of its parameter to be read by."""
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        node = _parse(value, lambda line: origin)
        return node if isinstance(node.value, dict) else Node(value, origin)
    return Node(value, origin)


# ---------------------------------------------------------------------- one form


def normalized(layer: Node) -> Node:
    """A layer in which every class is `{class_path: ..., init_args: ...}`, however short it was written."""
    tree = dict(layer.value)
    for key in CLASSES:
        if key in tree:
            tree[key] = _as_class(tree[key], key, _beside((key,)))
    if "trainer" in tree:
        trainer = tree["trainer"]
        if not isinstance(trainer.value or {}, dict):
            raise ConfigError(f"trainer ({trainer.origin}): expected the Trainer's options, found {_shown(trainer)}.")
        tree["trainer"] = Node({**(trainer.value or {}), **_callbacks(trainer.value or {})}, trainer.origin)
    return Node({key: _inner(node, _beside((key,))) for key, node in tree.items()}, layer.origin)


def _beside(path: tuple[str, ...]) -> tuple[str, ...]:
    """What stands next to `class_path` and is no argument of the class."""
    return SCHEDULE if path == ("lr_scheduler",) else ()


def _callbacks(trainer: dict[str, Node]) -> dict[str, Node]:
    given = trainer.get("callbacks")
    if given is None:
        return {}
    if isinstance(given.value, list):
        items = [_as_class(item, "trainer.callbacks") for item in given.value]
        return {"callbacks": Node(items, given.origin)}
    if isinstance(given.value, dict) and not given.is_class:
        named = {name: _as_class(item, f"trainer.callbacks.{name}") for name, item in given.value.items()}
        return {"callbacks": Node(named, given.origin)}
    return {"callbacks": _as_class(given, "trainer.callbacks")}


def _as_class(node: Node, key: str, beside: tuple[str, ...] = ()) -> Node:
    if node.value in (None, "null"):
        return Node(None, node.origin)
    if isinstance(node.value, str):
        return Node({"class_path": node}, node.origin)
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{key} ({node.origin}): expected a class, as `class_path: module.Class` and `init_args:`, "
            f"found {_shown(node)}."
        )
    kept = {name: child for name, child in node.value.items() if name in (*_NODE_KEYS, *beside)}
    short = {name: child for name, child in node.value.items() if name not in kept}
    inner = kept.get("init_args", Node({}, node.origin))
    if inner.value is None:
        inner = Node({}, inner.origin)
    if not isinstance(inner.value, dict):
        raise ConfigError(f"{key}.init_args ({inner.origin}): expected `name: value` lines, found {_shown(inner)}.")
    if short or "init_args" in kept:
        kept["init_args"] = Node({**inner.value, **short}, inner.origin)
    return Node(kept, node.origin)


def _inner(node: Node, beside: tuple[str, ...] = ()) -> Node:
    """Normalize the classes further down too, such as a network given to a model."""
    if isinstance(node.value, list):
        return Node([_inner(child) for child in node.value], node.origin)
    if not isinstance(node.value, dict):
        return node
    if node.is_class:
        node = _as_class(node, "class", beside)
    return Node({key: _inner(child) for key, child in node.value.items()}, node.origin)


# ---------------------------------------------------------------------- merging


def merged(old: Node, new: Node, same_class: SameClass, path: tuple[str, ...] = ()) -> Node:
    """One layer over another.

    Mappings are merged, everything else is replaced. A class that is named anew starts without the old one's
    arguments, unless it is the same class.

    Args:
        old: The layer below, normalized.
        new: The layer above, normalized.
        same_class: Told a place and two names, says whether they name one class there.
        path: The place of both.
    """
    if path == ("trainer", "callbacks") and isinstance(old.value, list) and isinstance(new.value, dict):
        raise ConfigError(
            f"trainer.callbacks ({new.origin}): callbacks are changed by name, and {old.origin} lists them without "
            "names. Write them there as `name: {class_path: ...}`."
        )
    if not isinstance(new.value, dict):
        return new
    if not new.is_class and (old.is_class or (isinstance(old.value, str) and _CLASS_NAME.fullmatch(old.value))):
        old, new = (_as_class(node, ".".join(path), _beside(path)) for node in (old, new))
    if not isinstance(old.value, dict):
        return new
    if old.is_class and new.is_class:
        names = [node.value["class_path"].value for node in (old, new)]
        if names[0] != names[1] and not same_class(path, str(names[0]), str(names[1])):
            return new
    result = dict(old.value)
    for key, child in new.value.items():
        result[key] = merged(result[key], child, same_class, (*path, str(key))) if key in result else child
    return Node(result, new.origin)


def _shown(node: Node) -> str:
    return "nothing" if node.value is None else repr(node.plain())
