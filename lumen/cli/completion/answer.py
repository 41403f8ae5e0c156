"""What a shell gets at a TAB: argcomplete's answer, for a parser made of `words.json` and of what is on the line."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from lumen.cli.completion.paths import PATHS
from lumen.cli.completion.source import arguments_of, class_in

WORDS = Path(__file__).with_name("words.json")
_OF_USERS = ("--model", "--data")
_COMMAND = re.compile(r"(?:.*[;&|]\s*)?(?:\w+=\S*\s+)*(\S*lumen\s.*)", re.DOTALL)


def answer() -> NoReturn:
    """Write what may stand at the cursor to where the shell reads it, and end the process.

    The environment says what is asked, as argcomplete's scripts set it. Without argcomplete there is no answer.
    """
    try:
        from lumen.cli.completion.finder import Finder, split
    except ImportError:
        os._exit(1)
    line = _of_lumen(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line, str(len(line))
    words, current = split(line)
    parser, shows_options = _parser(words[1:], current)
    Finder()(parser, always_complete_options=shows_options)
    os._exit(1)


def _of_lumen(line: str, point: int) -> str:
    """The command that is typed, up to the cursor: of `cd runs && lumen fit` it begins with lumen.

    Args:
        line: The whole line; zsh gives it all.
        point: Where the cursor is: bash counts bytes, the others characters.
    """
    in_bash = os.environ.get("_ARGCOMPLETE_SHELL") == "bash"
    typed = os.fsencode(line)[:point].decode(errors="ignore") if in_bash else line[:point]
    found = _COMMAND.match(typed)
    typed = found[1] if found else typed
    job = re.match(r"\S+ submit .*? -- (.*)", typed, re.DOTALL)
    return f"lumen {job[1]}" if job else typed


def _parser(words: list[str], current: str) -> tuple[argparse.ArgumentParser, bool]:
    """A parser for a line, and whether its options are shown to somebody who has typed nothing of them.

    Args:
        words: Those of the line before the cursor, without the program.
        current: What is there of the word at the cursor.
    """
    known = json.loads(WORDS.read_text(encoding="utf-8"))
    root = argparse.ArgumentParser("lumen", add_help=False, allow_abbrev=False)
    if not words:
        root.add_argument("--help", "-h", "--version", action="store_true")
    commands = root.add_subparsers()
    entries: list[dict[str, Any]] = []
    for name, summary in known["summaries"].items():
        parser = commands.add_parser(name, help=summary, add_help=False, allow_abbrev=False)
        if words[:1] != [name]:
            continue
        parser.add_argument("--verbose", action="store_true", help="Show every frame of an error.")
        entries = known["commands"][name]
        if name in ("validate", "test", "predict", "check", "verify"):
            entries = [*known["commands"]["fit"], *entries]
        given = {option for entry in entries for option in entry["names"]}
        for entry in entries:
            _add(parser, entry, [*known["classes"].get(entry["names"][0].removesuffix(".help"), ())])
        if "--model" in given:
            for option in _of_classes(words[1:], current, known["classes"]):
                if option not in given:
                    _completing(parser.add_argument(option), [], "")
    positional = any(not entry["names"][0].startswith("-") for entry in known["commands"].get("".join(words[:1]), ()))
    takes_one = any(words[-1:] == [option] and entry["nargs"] != 0 for entry in entries for option in entry["names"])
    return root, bool(words) and not positional and not takes_one


def _add(parser: argparse.ArgumentParser, entry: dict[str, Any], classes: list[str]) -> None:
    names, nargs = entry["names"], entry["nargs"]
    named: dict[str, Any] = {"help": entry.get("help")}
    known = {option for action in parser._actions for option in action.option_strings}
    if names[0].startswith("-"):
        names = [name for name in names if name not in known]
        named["dest"] = names[0].lstrip("-") if names else ""
    if not names:
        return
    if nargs == 0:
        parser.add_argument(*names, action="store_true", **named)
    else:
        _completing(
            parser.add_argument(*names, nargs=nargs, **named),
            [*entry.get("values", []), *classes],
            entry.get("path", ""),
        )


def _completing(action: argparse.Action, values: list[str], path: str) -> None:
    """Set what completes an option's value."""

    def complete(prefix: str, **_: Any) -> Iterable[str]:
        return [*values, *(PATHS[path](prefix) if path else ())]

    action.completer = complete  # type: ignore[attr-defined]


def _of_classes(words: list[str], current: str, known: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """The options that are arguments of a class which the line or its config files name.

    Args:
        words: Those of the line after the command, before the cursor.
        current: What is there of the word at the cursor.
        known: For each option that names a class the built-in ones, with their arguments.
    """
    for option in (*_OF_USERS, *known):
        if current.startswith(f"{option}."):
            name = class_in(words, option)
            built_in = known.get(option, {})
            for argument in built_in.get(name.removeprefix("lumen."), ()) or arguments_of(name):
                yield f"{option}.{argument}"
