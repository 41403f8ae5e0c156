"""The arguments of a user's class, as its source has them: importing it would take seconds, and may do anything."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def class_in(words: Sequence[str], option: str) -> str:
    """The name of the class that an option has, on a line or else in its config files; empty if none is named.

    Args:
        words: Those of the line.
        option: Such as `--model` or `--trainer.logger`.
    """
    pairs = [*zip(words, [*words[1:], ""], strict=True)]
    for word, following in reversed(pairs):
        name, equals, value = word.partition("=")
        if name in (option, f"{option}+", f"{option}.class_path"):
            return value if equals else following
    found = ""
    for word, following in pairs:
        name, equals, value = word.partition("=")
        if name == "--config":
            found = _class_in_file(value if equals else following, option) or found
    return found


def _class_in_file(file: str, option: str) -> str:
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        node: Any = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
        for name in option.lstrip("-").split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        node = node.get("class_path") if isinstance(node, Mapping) else node
        return node if isinstance(node, str) else ""
    return ""


def arguments_of(name: str) -> list[str]:
    """The arguments of a class by its full name, and of those in the same file that it is derived from."""
    module, _, short = name.rpartition(".")
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        tree = ast.parse(_file_of(module).read_bytes()) if module else None
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} if tree else {}
        return [*dict.fromkeys(_arguments(short, classes, set()))]
    return []


def _file_of(module: str) -> Path:
    """Where the source of a module is.

    Raises:
        FileNotFoundError: It is in no directory that Python looks in.
    """
    for place in (Path(folder, *module.split(".")) for folder in (os.getcwd(), *sys.path)):
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    raise FileNotFoundError(module)


def _arguments(name: str, classes: Mapping[str, ast.ClassDef], seen: set[str]) -> Iterator[str]:
    if name not in classes or name in seen:
        return
    seen.add(name)
    kind = classes[name]
    init = next((each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if init is not None:
        given = [*init.args.posonlyargs, *init.args.args][1:]
        yield from (each.arg for each in (*given, *init.args.kwonlyargs))
    elif any("dataclass" in ast.unparse(each) for each in kind.decorator_list):
        fields = (each.target for each in kind.body if isinstance(each, ast.AnnAssign))
        yield from (each.id for each in fields if isinstance(each, ast.Name))
    if init is None or init.args.kwarg is not None:
        for base in kind.bases:
            yield from _arguments(ast.unparse(base).rpartition(".")[2], classes, seen)
