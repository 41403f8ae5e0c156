"""YAML as plain data: errors for text that would lose a value or that is unreasonably large."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, final

import yaml

from lumen.errors import ConfigError

MAX_LEVELS = 100  # nested lists and mappings
MAX_REPEATED_VALUES = 100_000  # values that all aliases of a text may expand to
_YAML = "tag:yaml.org,2002:"
_INT, _FLOAT, _TIMESTAMP = f"{_YAML}int", f"{_YAML}float", f"{_YAML}timestamp"
_RESERVED_WORDS = (f"{_YAML}merge", f"{_YAML}value")  # the keys `<<` and `=`
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$")


@final
class YamlRefused(yaml.MarkedYAMLError):
    """Error for valid YAML that would lose a value, or that is unreasonably large."""


@final
class _NodeSize(NamedTuple):
    """Size of a node, including all values that its aliases repeat."""

    values: int
    levels: int


@final
class _Loader(yaml.SafeLoader):
    """YAML loader that reads numbers as YAML 1.2 does, and refuses duplicate keys.

    `1e-4` is a number, and so is `010`, which is ten; `00:15:00` and `2026-01-31` are text.

    Sizes are checked before objects are built: nine lines of aliases can expand to more than memory holds.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._path: list[str] = []
        self._repeated = 0
        self._extents: dict[yaml.Node, _NodeSize] = {}
        self._lines: dict[tuple[yaml.Node, Any], int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the node of the next part of the text."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self._path.append("" if index is None else str(getattr(index, "value", index)))
        if len(self._path) > MAX_LEVELS:
            raise YamlRefused(None, None, f"the text is nested more than {MAX_LEVELS} levels deep", event.start_mark)
        if isinstance(index, yaml.ScalarNode) and index.tag not in _RESERVED_WORDS:
            self._check_duplicate(parent, index)
        node: Any = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            self._count_alias(node, event)
        else:
            self._extents[node] = self._measure_node(node)
        self._path.pop()
        return node

    def _check_duplicate(self, mapping: Any, key: Any) -> None:
        """Refuse a key that its mapping already has."""
        place, line = (mapping, self.construct_object(key)), key.start_mark.line + 1
        if place in self._lines:
            lines = f"lines {self._lines[place]} and {line}" if self._lines[place] != line else f"line {line}"
            path = ".".join(filter(None, self._path))
            raise YamlRefused(None, None, f"{path} is set twice, in {lines}. Delete one of the two")
        self._lines[place] = line

    def _count_alias(self, node: Any, alias: Any) -> None:
        """Count the values of an alias, and refuse too many."""
        if node not in self._extents:
            raise YamlRefused(
                None, None, f"the alias *{alias.anchor} refers to a value that contains the alias", alias.start_mark
            )
        values, levels = self._extents[node]
        self._repeated += values
        if self._repeated > MAX_REPEATED_VALUES:
            raise YamlRefused(
                None, None, f"the aliases expand to more than {MAX_REPEATED_VALUES:,} values", alias.start_mark
            )
        if len(self._path) + levels > MAX_LEVELS:
            problem = f"the aliases are nested more than {MAX_LEVELS} levels deep"
            raise YamlRefused(None, None, problem, alias.start_mark)

    def _measure_node(self, node: Any) -> _NodeSize:
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [self._extents[each] for item in inner for each in (item if isinstance(item, tuple) else (item,))]
        return _NodeSize(1 + sum(part.values for part in parts), 1 + max((part.levels for part in parts), default=0))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))  # type: ignore[arg-type]


@final
class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text that some reader would parse as a number, and writes repeated values twice."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: no value is written as an alias."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Represent a text; only double quotes keep line breaks such as U+0085."""
        style = None if data.replace("\n", "").isprintable() else '"'
        return self.represent_scalar(f"{_YAML}str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
for each in (_Loader, _Dumper):
    each.add_implicit_resolver(_INT, re.compile(r"[-+]?[0-9][0-9_]*$"), list("-+0123456789"))
    each.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))


def dump_yaml(value: Any) -> str:
    """Return plain data as YAML that reads back as equal data."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def format_inline(value: Any) -> str:
    """Return a value in the form of a config file or the command line, as one line for an error."""
    try:
        parsed = load_yaml(value) if isinstance(value, str) else value
        if isinstance(parsed, str) or value == "":
            return repr(value)
        return value if isinstance(value, str) else json.dumps(parsed)
    except (yaml.YAMLError, TypeError):
        return repr(value)


def load_yaml(text: str) -> Any:
    """Read YAML and return plain data only.

    Raises:
        yaml.YAMLError: The text is not valid YAML.
        YamlRefused: The text repeats a key, is nested too deep, or expands to too many values.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # such as `!!int x`, or a number too long
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()


def read_yaml(text: str, source: str) -> Any:
    """Read YAML, as `load_yaml` does, and raise a ConfigError for invalid YAML.

    Args:
        text: The YAML text.
        source: The name of the source, for errors.

    Raises:
        ConfigError: The text is not valid YAML, or is refused; the message names the line.
    """
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read {source}: {describe_yaml_error(error)}.") from error


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """Return the error of a YAML text as one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    problem = ": ".join(filter(None, (error.context, error.problem)))
    mark = error.problem_mark or error.context_mark
    hint = ". YAML is indented by spaces, not by tabs" if "'\\t'" in problem else ""
    line = "".join((mark.buffer or "").splitlines()[mark.line : mark.line + 1]) if mark else ""
    if "${" in line or "???" in line:
        hint = ". Between braces and brackets write '${...}' and '???' in quotes"
    return problem + (f" (line {mark.line + 1}, column {mark.column + 1})" if mark else "") + hint
