"""The values that arguments of classes have by default."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from lumen.cli.config_layers import is_class
from lumen.cli.find_class import find_class
from lumen.cli.options import OptionParser


def defaults_of(kind: Any) -> dict[str, Any]:
    """Return what the arguments of a class have by default; nothing for a function."""
    parser = ArgumentParser(exit_on_error=False)
    if inspect.isclass(kind):
        parser.add_class_arguments(kind, fail_untyped=False)
    return dict(parser.get_defaults().as_dict())


def settable_defaults(kind: type, names: Collection[str]) -> dict[str, Any]:
    """Return what arguments of a class have by default, of those that have one that a config may set."""
    found, known = dict[str, Any](), defaults_of(kind)
    for name in names & known.keys():
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, skip={*known} - {name}, fail_untyped=False)
        if takes(parser, {name: known[name]}):
            found[name] = known[name]
    return found


def takes(parser: ArgumentParser, values: Any) -> bool:
    """Return True if the values fit the options of a parser."""
    try:
        parser.parse_object(values)
    except ArgumentError:
        return False
    return True


def without_defaults(record: Mapping[str, Any], top: OptionParser) -> dict[str, Any]:
    """Settings as plain data, of which what options and classes have by default is left out.

    Objects that the script sets anything of stay as they are: their classes' defaults are not theirs.
    """
    defaults, left = top.get_defaults().as_dict(), deepcopy(dict(record))
    groups, chosen = {*top.classes, *top.fixed}, top.script.keys() & top.bases.keys()
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


def _differing(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    return {name: value for name, value in given.items() if name not in known or value != known[name]}


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every class in plain data, from the outside in."""
    if is_class(value):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(item)
