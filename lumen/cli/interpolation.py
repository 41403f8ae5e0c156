"""`${key.path}`, which stands for another setting, and `???`, which must be given; OmegaConf reads them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, final

from lumen.cli.config_layers import Settings, is_class, merge
from lumen.errors import ConfigError

_MISSING = "???"
_SAID = {"Recursive interpolation detected": "it leads back to itself"}
_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")


@final
class _Place(NamedTuple):
    """Where a text stands, and what it is part of."""

    path: tuple[Any, ...]
    owner: Any
    text: str


def resolve(settings: Settings) -> None:
    """Put values into the settings where they refer to each other.

    Raises:
        ConfigError: One that must be given is not, or one refers to nothing or to itself; says all that is wrong.
    """
    places = [place for place in _texts(settings.tree) if place.text == _MISSING or "${" in place.text]
    if not places:
        return
    missing = [(place, "it must be given. Set it.") for place in places if place.text == _MISSING]
    references = [place for place in places if place.text != _MISSING]
    unreadable = [(place, wrong) for place in references if (wrong := _wrong_alone(place.text))]
    problems = [*missing, *unreadable] or list(_put(settings.tree, references))
    if problems:
        lines = [f"{settings.where(place.path)}: {place.text}: {wrong}" for place, wrong in problems]
        raise ConfigError("\n".join(lines))


def escaped(value: Any) -> Any:
    """Plain data whose texts mean themselves when they are read as settings."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _texts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[_Place]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, str):
            yield _Place((*path, key), node, value)
        elif isinstance(value, dict | list):
            yield from _texts(value, (*path, key))


def _wrong_alone(text: str) -> str | None:
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create([text])
    except GrammarParseError:
        return "this cannot be read. Another setting is ${key.path}; a text that only looks so begins with \\${."
    return None


def _put(tree: dict[str, Any], places: list[_Place]) -> Iterator[tuple[_Place, str]]:
    """Put the values in; say what is wrong with those that have none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    written = OmegaConf.create(_as_written(tree))
    for place in places:
        try:
            value = _value(written, place.path)
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            found = merge(None, plain, tuple(map(str, place.path)))
            if place.path[-1] == "class_path" and is_class(found):  # a class may be written as its name alone
                place.owner.update(found)
            else:
                place.owner[place.path[-1]] = found
        except InterpolationKeyError as error:
            yield place, _nothing_there(str(error).partition("'")[2].partition("'")[0], tree)
        except OmegaConfBaseException as error:
            yield place, f"{_SAID.get(said := str(error).partition(chr(10))[0], said)}."


def _value(written: Any, path: tuple[Any, ...]) -> Any:
    from omegaconf import OmegaConf

    for key in path:
        if key != "init_args":
            written = written[key if OmegaConf.is_list(written) else str(key)]
    return written


def _as_written(node: Any) -> Any:
    """Settings by the keys of the command line: the arguments of a class are beside its name."""
    if isinstance(node, list):
        return [_as_written(item) for item in node]
    if isinstance(node, str):
        return _REFERENCE.sub(lambda found: found[0].replace(".init_args.", "."), node)
    if not isinstance(node, dict):
        return node
    if is_class(node):
        node = {**(node.get("init_args") or {}), **{key: node[key] for key in node if key != "init_args"}}
    return {str(key): _as_written(value) for key, value in node.items()}


def _nothing_there(key: str, tree: dict[str, Any]) -> str:
    """Say so, and which key may have been meant."""
    close = difflib.get_close_matches(key, _keys(_as_written(tree)), n=1)
    hint = f"Did you mean {close[0]}?" if close else "Set it: what a class has by default is not seen here."
    return f"{key} is not set. {hint}"


def _keys(node: Any, above: str = "") -> list[str]:
    """The full keys of all values in a tree."""
    if not isinstance(node, dict):
        return [above]
    return [each for key, value in node.items() for each in _keys(value, f"{above}.{key}" if above else key)]
