"""Help of a command on one screen: the most used settings, a script's own options, and where to find all others."""

from __future__ import annotations

import shutil
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Iterator

from jsonargparse import ArgumentError

import lumen
from lumen.cli.config_layers import Settings
from lumen.cli.options import OPTIONS, OptionParser
from lumen.console import stdout
from lumen.errors import ConfigError
from lumen.strategies.factory import CLASSES_BY_NAME

COMMON_OPTIONS = {
    "config FILE": "YAML; a later file overrides an earlier one.",
    "print_config[=skip_default]": "Print all settings, or only changed ones.",
    "seed_everything N": "Seed of the run; a random seed if unset.",
    "ckpt_path WHICH": "best, last, or the path of a checkpoint.",
    "average WHICH": "Averaged weights: EMA, SWA, last:5 or best:3.",
    "output FILE": "Write results: .json, .jsonl, .safetensors.",
    "model CLASS": "Task class; --model.NAME sets its argument.",
    "data CLASS": "Data module class; likewise.",
    "optimizer CLASS": "Class, such as AdamW; likewise.",
    "lr_scheduler CLASS": "Class, such as OneCycleLR; likewise.",
    "trainer.max_epochs N": "Train for N epochs; or ...",
    "trainer.max_steps N": "... for N updates; or ...",
    "trainer.max_time DD:HH:MM:SS": "... for this time.",
    "trainer.devices N|auto": "Processes on this machine, one per device.",
    "trainer.strategy NAME": "auto, single, ddp, fsdp or mesh; likewise.",
    "trainer.precision NAME": "fp32, bf16, fp16, bf16-true or fp64.",
    "trainer.global_batch_size N": "Samples per update, on any hardware.",
    "trainer.gradient_clip_val X": "Largest norm of the gradient.",
    "trainer.val_check_interval N": "Steps, a fraction of an epoch, or a time.",
    "trainer.limit_train_batches N": "Number or fraction of batches.",
    "trainer.callbacks+=CLASS": "Add CLASS; set it by --trainer.callbacks.NAME.",
    "trainer.logger NAME": "csv, tensorboard, wandb, mlflow or aim.",
    "trainer.name NAME": "Name of the run, which writes to runs/NAME.",
    "trainer.resume auto": "Resume the run of this name.",
    "trainer.compile true": "Compile the task.",
    "trainer.fast_dev_run true": "Run one batch of each stage, write nothing.",
}
_FIT_OPTIONS = {"optimizer", "lr_scheduler", *(f"trainer.{name}" for name in (
    "max_epochs", "max_steps", "max_time", "global_batch_size", "gradient_clip_val", "val_check_interval",
    "limit_train_batches", "resume",
))}  # fmt: skip
_CALLBACK_OPTIONS = ("lumen.callbacks", "lumen.integrations.ray", "lumen.tools.report", "lumen.trainer.tuner")
_INDENT = 34


def show_help(parser: OptionParser, settings: Settings, topics: list[tuple[str, str]]) -> None:
    """Print the requested help; `--model.help` prints the arguments of the class that it, or the settings, name.

    Args:
        parser: The parser of all options of the command.
        settings: The settings of the command line and its other layers.
        topics: The keys that end in help, each with its value; "true" if it has no value.

    Raises:
        ConfigError: The requested help does not exist.
        SystemExit: The help was printed.
    """
    if topics == [("help", "true")]:
        print(*_format_short_help(parser, min(shutil.get_terminal_size().columns, 100)), sep="\n", file=stdout)
        raise SystemExit(0)
    if topics == [("trainer.help", "true")]:
        print(_format_trainer_help(parser), file=stdout)
        raise SystemExit(0)
    words = []
    for key, text in topics:
        if key == "help" and text not in ("true", "all"):
            raise ConfigError(f"--help {text}: expected nothing or all. For the options of a class write --model.help.")
        if key.removesuffix(".help") in parser.fixed:
            key = "help"
        name = settings.get_class_name(key.removesuffix(".help")) if text == "true" else text
        name = CLASSES_BY_NAME.get(name or "", name) if key == "trainer.strategy.help" else name
        words += [f"--{key}", *([name] if name and key != "help" else [])]
    try:
        parser.parse_args(words)
    except ArgumentError as error:
        raise ConfigError(f"{error}. For the options of a class write --model.help module.Class.") from error


def _format_short_help(parser: OptionParser, width: int) -> Iterator[str]:
    known = {action.dest for action in parser._actions} | {"print_config"}
    known -= _FIT_OPTIONS if "ckpt_path" in known else set()
    yield f"usage: {parser.usage}"
    yield ""
    yield from textwrap.wrap(str(parser.description), width)
    yield ""
    for option, text in COMMON_OPTIONS.items():
        name = option.split(" ")[0].split("+")[0].split("[")[0]
        if name in known and name not in parser.fixed:
            yield from _format_option(option, text, width)
    if added := [*_iterate_script_options(parser)]:
        yield from ("", "of this script:")
        for action in added:
            yield from _format_option(action.dest, _describe_option(action), width)
    yield from ("", "by name:")
    callbacks = [name for name, home in lumen._HOME.items() if home.startswith(_CALLBACK_OPTIONS) and name[0].isupper()]
    named = sorted(name for name in callbacks if name not in ("Callback", "Tuner") and not name.startswith("Base"))
    yield from _format_option("trainer.callbacks", ", ".join(named), width)
    yield from ("", "all others:")
    classes = [f"--{name}.help" for name in ("model", "data", "optimizer", "lr_scheduler") if name in parser.bases]
    yield from _format_option("trainer.help", "All options of the trainer.", width)
    yield from _format_option(" ".join(classes)[2:], "[CLASS]: arguments of CLASS, or of the set class.", width)
    yield from _format_option("help all", "All options.", width)
    if parser.epilog:
        yield from ("", parser.epilog)


def _format_trainer_help(parser: OptionParser) -> str:
    """Return the part of the full help that describes the trainer."""
    text = parser.format_help()
    begin = text.index("\n  --trainer ")
    end = text.find("\n\n", begin)
    return text[text.rindex("\n\n", 0, begin) + 2 : end if end >= 0 else None].rstrip()


def _iterate_script_options(parser: OptionParser) -> Iterator[Action]:
    """Yield the options that a script adds, and the arguments of the classes that the script names."""
    lumens = {*parser.classes, *parser.bases, *OPTIONS, "config", "print_config", "help"} - {*parser.callback_keys}
    for action in parser._actions:
        head, _, inside = action.dest.partition(".")
        is_group = not inside and head in {*parser.fixed, *parser.callback_keys}
        if head not in lumens and not is_group and inside != "help" and action.help != SUPPRESS:
            yield action


def _format_option(option: str, text: str, width: int) -> Iterator[str]:
    """Yield the lines of an option and its description, which is wrapped below itself."""
    head, lines = f"  --{option}", textwrap.wrap(text, width - _INDENT)
    if len(head) >= _INDENT:
        yield head
    else:
        yield head.ljust(_INDENT) + lines.pop(0)
    yield from (" " * _INDENT + line for line in lines)


def _describe_option(action: Action) -> str:
    """Return the description of a script's option, with its default."""
    text = " ".join(str(action.help or "").replace("%(default)s", str(action.default)).split())
    default = "" if action.default in (None, SUPPRESS) or "default:" in text else f"(default: {action.default})"
    return f"{text} {default}".strip() or "-"
