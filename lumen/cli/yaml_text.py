"""YAML as Lumen reads it: plain data, of which nothing is lost, and no more of it than somebody can have meant."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, final

import yaml

from lumen.errors import ConfigError

MOST_LEVELS = 100  # of lists and mappings in each other
MOST_REPEATED = 100_000  # values that all aliases of a text may stand for
_YAML = "tag:yaml.org,2002:"
_INT, _FLOAT, _TIMESTAMP = f"{_YAML}int", f"{_YAML}float", f"{_YAML}timestamp"
_NO_NAMES = (f"{_YAML}merge", f"{_YAML}value")  # the keys `<<` and `=`
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$")


@final
class Refused(yaml.MarkedYAMLError):
    """What is YAML, but would lose a value, or is more than can be meant."""


@final
class _Extent(NamedTuple):
    """How much a node stands for, with all that aliases in it repeat."""

    values: int
    levels: int


@final
class _Loader(yaml.SafeLoader):
    """Numbers as in YAML 1.2: `1e-4` and `010`, which is ten; `00:15:00` and `2026-01-31` are text. A key stands once.

    Everything is looked at before anything is made of it: nine lines of aliases can stand for more than memory holds.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._path: list[str] = []
        self._repeated = 0
        self._extents: dict[yaml.Node, _Extent] = {}
        self._lines: dict[tuple[yaml.Node, Any], int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The tree of what comes next in the text."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._path.append("" if index is None else str(getattr(index, "value", index)))
        if len(self._path) > MOST_LEVELS:
            raise Refused(None, None, f"it is nested more than {MOST_LEVELS} levels deep", event.start_mark)
        if isinstance(index, yaml.ScalarNode) and index.tag not in _NO_NAMES:
            self._note(parent, index)
        node: Any = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            self._repeat(node, event)
        else:
            self._extents[node] = self._measure(node)
        self._path.pop()
        return node

    def _note(self, mapping: Any, key: Any) -> None:
        """Refuse a key that its mapping has already."""
        at, line = (mapping, self.construct_object(key)), key.start_mark.line + 1
        if at in self._lines:
            both = f"lines {self._lines[at]} and {line}" if self._lines[at] != line else f"line {line}"
            path = ".".join(filter(None, self._path))
            raise Refused(None, None, f"{path} is set twice, in {both}. Leave one of them out")
        self._lines[at] = line

    def _repeat(self, node: Any, alias: Any) -> None:
        """Count what an alias stands for."""
        if node not in self._extents:
            raise Refused(None, None, f"the alias *{alias.anchor} stands for what it is part of", alias.start_mark)
        values, levels = self._extents[node]
        self._repeated += values
        if self._repeated > MOST_REPEATED:
            raise Refused(None, None, f"its aliases stand for more than {MOST_REPEATED:,} values", alias.start_mark)
        if len(self._path) + levels > MOST_LEVELS:
            what = f"its aliases are nested more than {MOST_LEVELS} levels deep"
            raise Refused(None, None, what, alias.start_mark)

    def _measure(self, node: Any) -> _Extent:
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [self._extents[each] for item in inner for each in (item if isinstance(item, tuple) else (item,))]
        return _Extent(1 + sum(part.values for part in parts), 1 + max((part.levels for part in parts), default=0))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))  # type: ignore[arg-type]


@final
class _Dumper(yaml.SafeDumper):
    """Quotes text that would be a number to this reader or to others, and writes what is there twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """There are no aliases."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Represent a text; other quotes than these lose line breaks such as U+0085."""
        style = None if data.replace("\n", "").isprintable() else '"'
        return self.represent_scalar(f"{_YAML}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
for each in (_Loader, _Dumper):
    each.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
    each.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))


def dump_yaml(value: Any) -> str:
    """Plain data as YAML that reads back as the same."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def as_written(value: Any) -> str:
    """Return a value as a config file or the command line has it, in one line, for an error."""
    try:
        given = load_yaml(value) if isinstance(value, str) else value
        if isinstance(given, str) or value == "":
            return repr(value)
        return value if isinstance(value, str) else json.dumps(given)
    except (yaml.YAMLError, TypeError):
        return repr(value)


def load_yaml(text: str) -> Any:
    """Read YAML; nothing but plain data comes out.

    Raises:
        yaml.YAMLError: It is none.
        Refused: It has a key twice, or is nested too deep or repeats too much.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # such as `!!int x`, or a number too long
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def read_yaml(text: str, source: str) -> Any:
    """The same for a text that must be YAML.

    Args:
        text: The YAML text.
        source: What it is called in an error.

    Raises:
        ConfigError: It is none, or cannot be meant; says where.
    """
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read {source}: {what_is_wrong(error)}.") from error


def what_is_wrong(error: yaml.YAMLError) -> str:
    """What is wrong with a text, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    what = ": ".join(filter(None, (error.context, error.problem)))
    mark = error.problem_mark or error.context_mark
    hint = ". YAML is indented by spaces, not by tabs" if "'\\t'" in what else ""
    line = "".join((mark.buffer or "").splitlines()[mark.line : mark.line + 1]) if mark else ""
    if "${" in line or "???" in line:
        hint = ". Between braces and brackets write '${...}' and '???' in quotes"
    return what + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark else "") + hint
