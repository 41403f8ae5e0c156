"""A class or function, and the arguments that a configuration gives it: checked, built, recorded.

jsonargparse reads signatures and types, converts values and builds what is nested; the messages are Lumen's.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import re
import types
import typing
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from inspect import Parameter, isclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

import yaml
from jsonargparse import ArgumentParser
from jsonargparse._parameter_resolvers import ParamData, get_signature_parameters

from lumen.cli.classes import find_class
from lumen.cli.layers import Node, as_node
from lumen.errors import ConfigError


@final
class Component:
    """What one place of a configuration builds.

    Args:
        key: The place, as in `--model.dropout`, without `init_args`.
        target: What is called with the arguments.
        name: How the target is spelt in messages and records.
        given: The arguments that the configuration sets.
        supplied: Parameters that the configuration does not set, and what to do instead.

    Attributes:
        parameters: By name, in the signature's order; those behind `**kwargs` included.
    """

    def __init__(
        self,
        key: str,
        target: Callable[..., Any],
        name: str,
        given: dict[str, Node],
        supplied: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.key = key
        self.target = target
        self.name = name
        self.given = given
        self.supplied = supplied
        signature = get_signature_parameters(target, None, logger=False)
        self.parameters = {parameter.name: parameter for parameter in signature if parameter.name not in supplied}

    def problems(self) -> list[str]:
        """What is wrong with the arguments given: unknown names, wrong classes and types."""
        found = []
        for name, node in self.given.items():
            where = f"{self._path(name)} ({node.origin})"
            if name not in self.parameters:
                hint = self.supplied.get(name) or nearest(str(name), self.parameters)
                found.append(f"{where}: {self.name} has no option {name}. {hint}")
                continue
            annotation = _annotation(self.parameters[name])
            try:
                inner = list(_inner(self._path(name), annotation, node))
                below = [problem for component in inner for problem in component.problems()]
                if not _has_callable(annotation):
                    below += [problem for component in inner for problem in component.missing_problems()]
                if not below:
                    _Value(annotation, node)
                found += below
            except ConfigError as error:
                found.append(str(error))
            except _WrongType:
                found.append(f"{where}: expected {describe(annotation)}, found {_shown(node.plain())}.")
        return found

    def missing(self) -> list[str]:
        """Parameters without a default that are not given."""
        return [name for name, each in self.parameters.items() if is_required(each) and name not in self.given]

    def missing_problems(self) -> list[str]:
        """The same, as messages."""
        return [f"{self._path(name)}: {self.name} needs it, and it is not set." for name in self.missing()]

    def arguments(self) -> dict[str, Any]:
        """The arguments given, converted and built."""
        return {name: self._value(name).build() for name in self.given}

    def build(self, *positional: Any, **more: Any) -> Any:
        """Call the target."""
        return self.target(*positional, **{**self.arguments(), **more})

    def record(self) -> dict[str, Any]:
        """Plain data that gives the same arguments again: what is set, and the defaults that are plain data."""
        recorded = {}
        for name, parameter in self.parameters.items():
            if name in self.given:
                recorded[name] = self._value(name).record()
            elif is_plain(parameter.default):
                with suppress(_WrongType):
                    value = _Value(_annotation(parameter), as_node(parameter.default, "default"))
                    if value.build() == parameter.default:
                        recorded[name] = value.record()
        return recorded

    def _path(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else str(name)

    def _value(self, name: str) -> _Value:
        return _Value(_annotation(self.parameters[name]), self.given[name])


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the names that look like this one, else all of them."""
    known = [str(each) for each in known]
    close = difflib.get_close_matches(name, known, n=2) or [each for each in known if each.endswith(f".{name}")]
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"There are: {', '.join(known)}." if known else "There are none."


def is_plain(value: Any) -> bool:
    """Whether a value is made of null, booleans, numbers, text, lists and dictionaries with text as keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


# ---------------------------------------------------------------------- one value


@final
class _WrongType(Exception):
    pass


@final
class _Value:
    """A value read by its parameter's type."""

    def __init__(self, annotation: Any, node: Node) -> None:
        self._plain = _canonical(node, _classes(annotation))
        self._parser = ArgumentParser(exit_on_error=False)
        try:
            self._parser.add_argument("--value", type=annotation)
        except ValueError:  # a type that cannot be checked, such as one that is imported for type checkers only
            self._parser.add_argument("--value", type=Any)
        try:
            self._config = self._parser.parse_object({"value": deepcopy(self._plain)})
            self._parser.validate(self._config, skip_unset=False)
        except (ArgumentError, TypeError) as error:
            raise _WrongType from error

    def build(self) -> Any:
        return self._parser.instantiate(self._config).value

    def record(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                return yaml.safe_load(self._parser.dump(self._config, skip_unset=False))["value"]
            except Warning:  # a default further down is no plain data
                return self._plain


def _canonical(node: Node, bases: tuple[type, ...]) -> Any:
    """Plain data in which every class has its full name."""
    if isinstance(node.value, list):
        return [_canonical(child, bases) for child in node.value]
    if not isinstance(node.value, dict):
        return node.value
    plain = {key: _canonical(child, bases) for key, child in node.value.items()}
    if node.is_class and bases:
        target, name = find_class(str(plain["class_path"]), bases, "class")
        parameters = Component("", target, name, {}).parameters
        given = node.value["init_args"].value if "init_args" in node.value else {}
        arguments = {
            key: _canonical(child, _classes(_annotation(parameters[key])) if key in parameters else ())
            for key, child in given.items()
        }
        return {**plain, "class_path": name, "init_args": arguments}
    return plain


def _inner(key: str, annotation: Any, node: Node) -> Iterator[Component]:
    """The classes and dataclasses inside a value, as far as its type has some."""
    bases = _classes(annotation)
    if node.is_class and bases:
        target, name = find_class(str(node.value["class_path"].value), bases, f"{key} ({node.origin})")
        given = node.value["init_args"].value if "init_args" in node.value else {}
        yield Component(key, target, name, given)
    elif isinstance(node.value, dict):
        records = [base for base in bases if dataclasses.is_dataclass(base)]
        if records:
            yield Component(key, records[0], records[0].__name__, node.value)
        else:
            for name, child in node.value.items():
                yield from _inner(f"{key}.{name}", annotation, child)
    elif isinstance(node.value, list):
        for child in node.value:
            yield from _inner(key, annotation, child)


# ---------------------------------------------------------------------- types


def _annotation(parameter: ParamData) -> Any:
    return Any if parameter.annotation is Parameter.empty else parameter.annotation


def is_required(parameter: ParamData) -> bool:
    """Whether a parameter has no default."""
    return parameter.default is Parameter.empty


def _leaves(annotation: Any) -> Iterator[Any]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal or not arguments:
        yield annotation
    for argument in arguments:
        for each in argument if isinstance(argument, list) else [argument]:
            yield from _leaves(each)


def _classes(annotation: Any) -> tuple[type, ...]:
    """The classes of which a configuration can build instances; anything may be a function."""
    plain = (Path, timedelta, enum.Enum)
    if _has_callable(annotation):
        return (object,)
    return tuple(
        leaf
        for leaf in _leaves(annotation)
        if isclass(leaf) and leaf.__module__ not in ("builtins", "typing") and not issubclass(leaf, plain)
    )


def _has_callable(annotation: Any) -> bool:
    """Whether a class given here may be called later with the arguments that are missing."""
    return "Callable" in str(annotation)


def describe(annotation: Any) -> str:
    """A type as a reader of YAML says it: `int or null`."""
    if annotation in (Any, None, types.NoneType):
        return "anything" if annotation is Any else "null"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        return " or ".join(_shown(choice) for choice in typing.get_args(annotation))
    if isclass(annotation) and issubclass(annotation, enum.Enum):
        return " or ".join(annotation.__members__)
    if isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__
    return re.sub(r"\w+\.", "", str(annotation)).replace("NoneType", "null").replace(" | ", " or ")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
