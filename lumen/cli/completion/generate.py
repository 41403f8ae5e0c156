"""What the parsers of all commands take, as plain data. `python -m lumen.cli.completion.generate` writes words.json."""

from __future__ import annotations

import inspect
import json
import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator
from importlib import import_module
from textwrap import shorten
from typing import Any, Literal, get_args, get_origin

import torch
from jsonargparse import ArgumentParser

import lumen.optim
from lumen.cli import COMMANDS, LOOKS, WITHOUT_CONFIG, check, place_of
from lumen.cli.completion.answer import WORDS
from lumen.cli.find_class import classes_by_name
from lumen.cli.help import OFTEN
from lumen.cli.options import SUPPLIED, Offer, OptionParser
from lumen.cli.type_hints import bases_in, hints_in
from lumen.precision import PRECISIONS
from lumen.proof.prove import COMPARISONS
from lumen.strategies.factory import ACCELERATORS, STRATEGIES

_NAMED = {
    "trainer.accelerator": ACCELERATORS,
    "trainer.devices": ("auto",),
    "trainer.log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
    "trainer.precision": PRECISIONS,
    "trainer.resume": ("auto",),
    "trainer.strategy": STRATEGIES,
    "ckpt_path": ("best", "last"),
    "print_config": ("skip_default", "skip_unset", "skip_null"),
    "help": ("all",),
    "only": COMPARISONS,
}
_PATHS = {
    **dict.fromkeys(("trainer.resume", "trainer.init_from", "ckpt_path", "average"), "run"),
    **dict.fromkeys(("RUN", "CHECKPOINT_OR_RUN", "DIR"), "run"),
    **dict.fromkeys(("A", "B"), "run or config"),
    **dict.fromkeys(("config",), "config"),
    **dict.fromkeys(("output", "file", "FILE", "OUTPUT", "FILE_OR_DIR", "PATH"), "file"),
    **dict.fromkeys(("trainer.default_root_dir", "NAME of init"), "directory"),
}
_OFTEN = {option.split(" ")[0].split("+")[0]: text for option, text in OFTEN.items() if "..." not in text}
_HELP = {"help": "What there is.", "print_config": OFTEN["print_config[=skip_default]"]}
_TORCHS = "torch.optim."
_OF_OTHERS = ("model", "data")  # whose classes are the user's


def words() -> dict[str, Any]:
    """All that is completed: options and positional arguments of each command, and arguments of built-in classes."""
    fit = _parser("fit")
    of_fit = [*_described(fit)]
    known = {option["names"][0] for option in of_fit}
    commands: dict[str, Any] = {"fit": of_fit}
    for command in COMMANDS:
        if command != "fit":
            commands[command] = [each for each in _described(_parser(command)) if each["names"][0] not in known]
    commands["check"] = [*_of_check()]
    for command in ("verify", *WITHOUT_CONFIG):
        parser = import_module(f"lumen.cli.{place_of(command)}").options()
        commands[command] = [_entry(each) for each in parser._actions if each.help != SUPPRESS]
    return {
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "summaries": COMMANDS | LOOKS | WITHOUT_CONFIG,
        "commands": commands,
        "classes": {f"--{key}": classes for key, classes in _classes(fit)},
    }


def _parser(command: str) -> OptionParser:
    parser = OptionParser(prog="lumen", exit_on_error=False)
    Offer().add_to(parser, command, None)
    return parser


def _described(parser: OptionParser) -> Iterator[dict[str, Any]]:
    """The options of a command with a config; not those that take several others at once."""
    for action in parser._actions:
        if type(action).__name__ != "_ActionConfigLoad":
            yield _entry(action)
    yield {"names": ["--trainer.help"], "help": "All that the trainer takes.", "nargs": 0}


def _entry(action: Action) -> dict[str, Any]:
    """An option or a positional argument: its names, and what may follow it."""
    hint = getattr(action, "_typehint", action.type)
    values = [*map(str, action.choices or ()), *_NAMED.get(action.dest, ()), *_values(hint)]
    if action.dest.endswith(".help"):
        values = []
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    text = _OFTEN.get(action.dest, "").removesuffix("; likewise.") or " ".join(str(action.help or "").split())
    if action.dest in ("help", "print_config") or action.dest.endswith(".help"):
        text = _HELP.get(action.dest, "The arguments of the class.")
    entry = {
        "names": [*action.option_strings] or [metavar or action.dest],
        "help": shorten(re.split(r"\. (?=[A-Z])", text)[0], 100, placeholder=" ...").replace("%", "%%"),
        "nargs": _nargs(action, hint),
        "values": [*dict.fromkeys(values)],
        "path": _PATHS.get(action.dest, _PATHS.get(metavar, "")),
    }
    return {key: value for key, value in entry.items() if value or key == "nargs"}


def _nargs(action: Action, hint: Any) -> Any:
    if action.dest in ("help", "print_config") or action.dest.endswith(".help") or bool in hints_in(hint):
        return 0 if action.nargs == 0 and action.dest == "help" and not action.choices else "?"
    return action.nargs


def _values(hint: Any) -> Iterator[str]:
    for each in hints_in(hint):
        if get_origin(each) is Literal:
            yield from map(str, get_args(each))
        elif each is bool:
            yield from ("true", "false")


def _classes(parser: OptionParser) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """For each option that names a class: the built-in classes by their names, with their arguments."""
    for action in parser._actions:
        hint, key = getattr(action, "_typehint", None), action.dest
        bases = [] if hint is None or key.endswith(".help") else bases_in(hint)
        bases = [each for each in bases if inspect.isabstract(each) or type.__subclasses__(each)]
        if bases and key not in _OF_OTHERS and (kinds := _built_in(bases)):
            yield key, {name: [*_arguments(kind, key)] for name, kind in sorted(kinds.items())}


def _built_in(bases: list[type]) -> dict[str, type]:
    """The classes of Lumen and of torch that are derived from some; not those that others are derived from alone."""
    public = {name: getattr(lumen, name) for name in lumen.__all__}
    torchs = (
        kind for kinds in classes_by_name(bases).values() for kind in kinds if kind.__module__.startswith(_TORCHS)
    )
    found = {kind.__name__: kind for kind in torchs}
    found |= {f"lumen.optim.{name}": getattr(lumen.optim, name) for name in lumen.optim.__all__} | public
    return {
        name: kind
        for name, kind in found.items()
        if inspect.isclass(kind) and issubclass(kind, tuple(bases)) and kind not in bases
        and not inspect.isabstract(kind) and not name.startswith(("_", "Base"))
        and (kind.__module__.startswith(_TORCHS) or name.startswith("lumen.") or public.get(name) is kind)
    }  # fmt: skip


def _arguments(kind: type, key: str) -> Iterator[str]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False, skip=SUPPLIED.get(key, set()), fail_untyped=False)
    for action in parser._actions:
        if action.dest != "help" and not action.dest.endswith(".help"):
            yield action.dest


def _of_check() -> Iterator[dict[str, Any]]:
    """The options that `lumen check` has beside those of fit, as its help lists them."""
    for name, value, text in re.findall(r"^  (--\w+)( [A-Z])? +(.*)$", check.HELP, re.MULTILINE):
        yield {"names": [name], "help": text, "nargs": None if value else 0}


def as_text(found: dict[str, Any]) -> str:
    """The words as their file has them: an option a line, so that changes can be read."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\n {3,}|\n  (?=[\]}])", lambda match: "\n  " if match[0] == "\n   " else " ", text) + "\n"


if __name__ == "__main__":
    WORDS.write_text(as_text(words()), encoding="utf-8")
