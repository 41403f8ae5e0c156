"""`${key.path}`, a reference to another setting, and `???`, a required setting; OmegaConf resolves them.

A run uses the value of a reference to the environment, but records the reference itself: the value may be secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple, final

import yaml

from lumen.cli.config_layers import Settings, is_class, merge
from lumen.cli.yaml_text import load_yaml
from lumen.errors import ConfigError
from lumen.errors.arguments import suggest_names
from lumen.internals.masking import Reference, describe_missing_reference, is_masked

_MISSING = "???"
_ERROR_PATTERNS = {"Recursive interpolation detected": "this reference leads back to itself"}
_ENVIRONMENT = "${oc.env:"
_BRACE = re.compile(r"\$\{|[{}]")
# Private-use characters, which no text of a config contains.
_HELD_PATTERN, _HELD_FORMAT = re.compile("\ue000([0-9]+)\ue001"), "\ue000{}\ue001"
_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")


@final
class _Text(NamedTuple):
    """Text in the settings: its path, the container that holds it, and the text."""

    path: tuple[Any, ...]
    owner: Any
    text: str


def resolve_references(settings: Settings) -> dict[tuple[Any, ...], Reference]:
    """Replace references between settings by their values.

    Returns:
        By path, the text to record instead of each value from the environment; other references in the text are
        resolved.

    Raises:
        ConfigError: A required setting is missing, or a reference leads to nothing or to itself; the message lists all
            errors.
    """
    texts = list(_iterate_texts(settings.tree))
    missing = [(place, "this setting is required. Set a value.") for place in texts if place.text == _MISSING]
    missing += [
        (place, _format_how_to_set(settings.describe_source(place.path))) for place in texts if is_masked(place.text)
    ]
    references = [place for place in texts if "${" in place.text]
    unreadable = [(place, problem) for place in references if (problem := _find_syntax_error(place.text))]
    problems, kept = [*missing, *unreadable], dict[tuple[Any, ...], Reference]()
    if references and not problems:
        env_references: list[str] = []
        before = (
            _shorten_paths(settings.tree, env_references)
            if any(_ENVIRONMENT in place.text for place in references)
            else {}
        )
        problems = list(_put_values(settings.tree, references))
        if env_references and not problems:
            kept = _list_recorded_references(settings.tree, before, references, env_references)
    if problems:
        lines = [f"{settings.describe_source(place.path)}: {place.text}: {problem}" for place, problem in problems]
        raise ConfigError("\n".join(lines))
    return kept


def put_references(record: dict[str, Any], references: Mapping[tuple[Any, ...], Reference]) -> None:
    """Replace values from the environment by their references, in a record of the settings."""
    inner = {path[:end] for path in references for end in range(len(path))}
    for path, reference in references.items():
        owner, key = record, path[-1]
        for name in path[:-1]:
            owner = _follow_name(owner, name)
        if isinstance(owner, list) and isinstance(key, str):
            owner = owner[0]
        exists = isinstance(owner, list) or (isinstance(owner, dict) and key in owner)
        if exists and not (path in inner and isinstance(owner[key], dict | list)):
            owner[key] = str(reference)


def _follow_name(owner: Any, name: Any) -> Any:
    """Return the value of a name; arguments of a fixed class, or of a single callback, are one level higher."""
    if isinstance(owner, list):
        return _follow_name(owner[0], name) if isinstance(name, str) else owner[name]
    return (owner.get(name, owner if name == "init_args" else None)) if isinstance(owner, dict) else None


def _format_how_to_set(where: str) -> str:
    option = where.partition(" ")[0]
    return (
        f"the recorded config masks this value. Write --{option} '${{oc.env:NAME}}', and set NAME in the environment."
    )


def escape_references(value: Any) -> Any:
    """Return plain data whose texts are escaped, so that reading them as settings resolves no reference."""
    if isinstance(value, dict):
        return {key: escape_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_references(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _iterate_texts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[_Text]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, str):
            yield _Text((*path, key), node, value)
        elif isinstance(value, dict | list):
            yield from _iterate_texts(value, (*path, key))


def _find_syntax_error(text: str) -> str | None:
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    try:
        OmegaConf.create([text])
    except GrammarParseError:
        return (
            "this reference cannot be read. Write ${key.path} for another setting, and \\${ for a text that begins "
            "with ${."
        )
    return None


def _put_values(tree: dict[str, Any], places: list[_Text]) -> Iterator[tuple[_Text, str]]:
    """Insert the values of references; yield each reference without a value, and the reason."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    written = OmegaConf.create(_shorten_paths(tree))
    for place in places:
        try:
            found = _get_plain_value(written, place.path)
            if place.path[-1] == "class_path" and is_class(found):  # a class may be written as a name alone
                place.owner.update(found)
            else:
                place.owner[place.path[-1]] = found
        except InterpolationKeyError as error:
            yield place, _describe_missing_key(str(error).partition("'")[2].partition("'")[0], tree)
        except OmegaConfBaseException as error:
            reason = describe_missing_reference(error)
            yield place, f"{_ERROR_PATTERNS.get(reason, reason)}."


def _get_plain_value(written: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path, as plain settings."""
    from omegaconf import OmegaConf

    for key in path:
        if key != "init_args":
            written = written[key if OmegaConf.is_list(written) else str(key)]
    plain = OmegaConf.to_container(written, resolve=True) if OmegaConf.is_config(written) else written
    return merge(None, plain, tuple(map(str, path)))


def _list_recorded_references(
    tree: dict[str, Any], before: dict[str, Any], places: list[_Text], env_references: list[str]
) -> dict[tuple[Any, ...], Reference]:
    """Return the texts to record instead of values from the environment.

    Args:
        tree: The settings with their values.
        before: The settings as written, with the references in `env_references` replaced by placeholders.
        places: The texts that have references.
        env_references: The references to the environment.
    """
    from omegaconf import OmegaConf

    written, kept = OmegaConf.create(before), dict[tuple[Any, ...], Reference]()
    for place in places:
        found, path = _get_plain_value(written, place.path), place.path
        if path[-1] == "class_path" and is_class(found):
            path = path[:-1]
        for inner in _iterate_texts({path[-1]: found}, path[:-1]):
            if _HELD_PATTERN.search(inner.text):
                text = _HELD_PATTERN.sub(lambda each: env_references[int(each[1])], escape_references(inner.text))
                value = reduce(lambda node, key: node[key], inner.path, tree)
                kept |= _find_references(text, value, inner.path)
    return kept


def _find_references(text: Any, value: Any, path: tuple[Any, ...]) -> dict[tuple[Any, ...], Reference]:
    """Return a reference, and the references inside it if the text may be parsed as a list or a mapping."""
    if not isinstance(text, str):
        both = zip(
            _iterate_texts({path[-1]: text}, path[:-1]), _iterate_texts({path[-1]: value}, path[:-1]), strict=False
        )
        return {old.path: Reference(old.text, new.text) for old, new in both if _ENVIRONMENT in old.text}
    found = {path: Reference(text, value if isinstance(value, str) else None)}
    if text[:1] in "[{" and isinstance(value, str):
        with suppress(yaml.YAMLError):
            found |= _find_references(load_yaml(text), load_yaml(value), path)
    return found


def _mask_environment(text: str, env_references: list[str]) -> str:
    """Replace references to the environment in a text by numbered placeholders, which OmegaConf ignores."""
    begin = 0
    while (begin := text.find("${", begin)) >= 0:
        depth, end = 0, len(text)
        for brace in _BRACE.finditer(text, begin):
            depth += -1 if brace[0] == "}" else 1
            if not depth:
                end = brace.end()
                break
        is_text = (begin - len(text[:begin].rstrip("\\"))) % 2
        if is_text or _ENVIRONMENT not in text[begin:end]:
            begin += 2
            continue
        env_references.append(text[begin:end])
        text = f"{text[:begin]}{_HELD_FORMAT.format(len(env_references) - 1)}{text[end:]}"
    return text


def _shorten_paths(node: Any, env_references: list[str] | None = None) -> Any:
    """Return settings by the keys of the command line: the arguments of a class are at the level of its name.

    Args:
        node: The settings, or a part of them.
        env_references: The list that receives references to the environment, which placeholders replace; None keeps the
            references.
    """
    if isinstance(node, list):
        return [_shorten_paths(item, env_references) for item in node]
    if isinstance(node, str):
        node = node if env_references is None else _mask_environment(node, env_references)
        return _REFERENCE.sub(lambda found: found[0].replace(".init_args.", "."), node)
    if not isinstance(node, dict):
        return node
    if is_class(node):
        node = {**(node.get("init_args") or {}), **{key: node[key] for key in node if key != "init_args"}}
    return {str(key): _shorten_paths(value, env_references) for key, value in node.items()}


def _describe_missing_key(key: str, tree: dict[str, Any]) -> str:
    """Return an error text for a reference to a missing key, with similar keys."""
    hint = (
        suggest_names(key, _list_keys(_shorten_paths(tree)))
        or " Set this key: references do not see the defaults of classes."
    )
    return f"{key} is not set.{hint}"


def _list_keys(node: Any, prefix: str = "") -> list[str]:
    """Return the full keys of all values in a tree."""
    if not isinstance(node, dict):
        return [prefix]
    return [each for key, value in node.items() for each in _list_keys(value, f"{prefix}.{key}" if prefix else key)]
