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

COMMON_OPTIONS = {
    "config FILE": "YAML; of several files the last one wins.",
    "print_config[=skip_default]": "Print all settings, or those that differ.",
    "seed_everything N": "The run's seed; else it is drawn and recorded.",
    "ckpt_path WHICH": "best, last, or where a checkpoint is.",
    "average WHICH": "EMA, SWA, last:5, best:3 instead of the weights.",
    "output FILE": "Write results: .json, .jsonl, .safetensors.",
    "model CLASS": "The task; --model.NAME is an argument of it.",
    "data CLASS": "The data module; likewise.",
    "optimizer CLASS": "As AdamW or lumen.optim.Lookahead; likewise.",
    "lr_scheduler CLASS": "As OneCycleLR or lumen.optim.Warmup; likewise.",
    "trainer.max_epochs N": "Where training ends; or ...",
    "trainer.max_steps N": "... after so many updates; or ...",
    "trainer.max_time DD:HH:MM:SS": "... after that time.",
    "trainer.devices N|auto": "Processes on this machine, a device each.",
    "trainer.strategy NAME": "auto, single, ddp or fsdp.",
    "trainer.precision NAME": "fp32, bf16, fp16, bf16-true or fp64.",
    "trainer.global_batch_size N": "Samples of an update, on any hardware.",
    "trainer.gradient_clip_val X": "The largest norm of a gradient.",
    "trainer.val_check_interval N": "Steps, a fraction of an epoch, or a time.",
    "trainer.limit_train_batches N": "How many batches, or which fraction.",
    "trainer.callbacks+=CLASS": "Add one; --trainer.callbacks.NAME sets it.",
    "trainer.logger NAME": "csv, tensorboard, wandb, mlflow or aim.",
    "trainer.name NAME": "Of the run: its directory is runs/NAME.",
    "trainer.resume auto": "Go on where the run of this name was.",
    "trainer.compile true": "Compile the task.",
    "trainer.fast_dev_run true": "Try one batch of everything, write nothing.",
}
_FIT_OPTIONS = {"optimizer", "lr_scheduler", *(f"trainer.{name}" for name in (
    "max_epochs", "max_steps", "max_time", "global_batch_size", "gradient_clip_val", "val_check_interval",
    "limit_train_batches", "resume",
))}  # fmt: skip
_CALLBACK_OPTIONS = ("lumen.callbacks", "lumen.integrations.ray", "lumen.tools.report")
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
    named = sorted(name for name in callbacks if name != "Callback" and not name.startswith("Base"))
    yield from _format_option("trainer.callbacks", ", ".join(named), width)
    yield from ("", "all others:")
    classes = [f"--{name}.help" for name in ("model", "data", "optimizer", "lr_scheduler") if name in parser.bases]
    yield from _format_option("trainer.help", "All that the trainer takes.", width)
    yield from _format_option(
        " ".join(classes)[2:], "[CLASS]: arguments of a class; else of the one that is set.", width
    )
    yield from _format_option("help all", "Everything.", width)


def _format_trainer_help(parser: OptionParser) -> str:
    """Return the part of the full help that describes the trainer."""
    text = parser.format_help()
    begin = text.index("\n  --trainer ")
    end = text.find("\n\n", begin)
    return text[text.rindex("\n\n", 0, begin) + 2 : end if end >= 0 else None].rstrip()


def _iterate_script_options(parser: OptionParser) -> Iterator[Action]:
    """Yield the options that a script adds, and the arguments of the classes that the script names."""
    lumens = {*parser.classes, *parser.bases, *OPTIONS, "config", "print_config", "help"} - {*parser.callbacks}
    for action in parser._actions:
        head, _, inside = action.dest.partition(".")
        is_group = not inside and head in {*parser.fixed, *parser.callbacks}
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
