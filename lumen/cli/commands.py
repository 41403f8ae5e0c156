"""`lumen fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import logging
import os
import reprlib
import secrets
import sys
import traceback
from argparse import Action
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, final

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace, set_loader  # type: ignore[attr-defined]

from lumen.callbacks.checkpoint_names import decides
from lumen.checkpoint import PARTS, Weights, as_place, find_checkpoint, is_weights
from lumen.checkpoint.manifest import STATE
from lumen.cli import COMMANDS
from lumen.cli.config_checks import BASES, SUPPLIED, Check, without_defaults
from lumen.cli.config_layers import Settings, parse_words
from lumen.cli.interpolation import escaped, resolve
from lumen.cli.optimization import LookaheadOptions, ParameterGroups, Schedule, configure_optimizers
from lumen.cli.outputs import SaveConfig, check_output, show_metrics, show_predictions, write_results
from lumen.cli.yaml_text import dump_yaml, load_yaml
from lumen.console import stdout
from lumen.distributed.launch import launch
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError
from lumen.errors.arguments import local_path
from lumen.random import checked_seed, seed_for_building
from lumen.strategies.factory import device_of, processes_of
from lumen.trainer.logs import LogSettings, console_log
from lumen.trainer.trainer import Trainer

_log = logging.getLogger("lumen")


@final
@dataclass
class Options:
    """Options of the command itself.

    Args:
        seed_everything: The run's seed. Default: drawn and recorded.
        ckpt_path: best, last, the path of a checkpoint or run, or weights as trainer.init_from has them.
        output: Where results are written: .json, .jsonl, .safetensors.
    """

    seed_everything: int | None = None
    ckpt_path: Weights | str | None = None
    output: str | None = None


_GROUPS = {
    "parameter_groups": ParameterGroups,
    "lookahead": LookaheadOptions,
    "lr_schedule": Schedule,
    "trainer": Trainer,
}
_LEFT_OUT = {"skip_default": "default", "skip_unset": "unset", "skip_null": "unset"}
_PRINT_CONFIG = (
    "Print the settings as a config file, and do nothing else. =skip_default leaves out what has its default, "
    "=skip_unset what is null; both with a comma."
)
set_loader("yaml", load_yaml, (yaml.YAMLError,))


@final
class _Help(DefaultHelpFormatter):
    """Says what Lumen takes where jsonargparse says what it would: config files are `--config` alone."""

    def add_argument(self, action: Action) -> None:
        """Describe an option."""
        if "--print_config" in action.option_strings:
            action.help = _PRINT_CONFIG
        elif action.dest in _GROUPS:
            action.metavar, action.help = "{NAME: VALUE, ...}", "Several of these at once."
        elif isinstance(action.metavar, str):
            action.metavar = action.metavar.removeprefix("CONFIG | ")
        super().add_argument(action)


def run(command: str, words: list[str]) -> int:
    """Run one of the four loops and return 0."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    pairs = parse_words(["--help" if word == "-h" else word for word in words])
    left_out = _flags([text for key, text in pairs if key == "print_config"])
    asked = [(key, text) for key, text in pairs if key == "help" or key.endswith(".help")]
    files = [text for key, text in pairs if key == "config"] or _config_of_run(dict(pairs).get("ckpt_path"))
    aside = {"config", "print_config", *(key for key, _ in asked)}
    settings = Settings(command, files, [(key, text) for key, text in pairs if key not in aside])
    if asked:
        return _show_help(_make_parser(command), settings, asked)
    if files and not settings.tree["trainer"].get("name"):
        settings.tree["trainer"]["name"] = Path(files[0]).stem
    resolve(settings)
    several = settings.tree.get("lr_scheduler")
    parser = _make_parser(command, schedulers=len(several) if isinstance(several, list) else None)
    check = Check(settings, parser, {"": Options, **_GROUPS})
    for name in check.links:
        parser.link_arguments("data", f"model.init_args.{name}", partial(_take, name), apply_on="instantiate")
    config = check.parse(parser)
    record = _recorded(parser, config)
    if not config.optimizer and any(
        value is not None for value in (config.lookahead.k, *vars(config.parameter_groups).values())
    ):
        raise ConfigError(
            "lookahead and parameter_groups: they need the optimizer that they are for. Set optimizer too."
        )
    if left_out is not None:
        if "unset" in left_out:
            record = _recorded(parser, config, skip_unset=True)
        if "default" in left_out:
            record = without_defaults(record, parser, _GROUPS)
        print(dump_yaml(escaped(record)), end="", file=stdout)
        return 0
    if (output := config.get("output")) is not None:
        check_output(command, local_path(output))
    processes = _processes(config.trainer)
    if processes.are_missing:
        return launch(processes.world_size, ["-m", "lumen", command, *words])
    first = processes.rank == 0
    said = LogSettings(config.trainer.log_level, config.trainer.log_format)
    with console_log(said, shown=first), processes.explained():
        where = config.trainer.resume if command == "fit" else config.ckpt_path
        if processes.world_size > 1:
            processes.connect(device_of(config.trainer.accelerator, processes))
        seed = record["seed_everything"] = processes.on_rank_zero(partial(_seed, config, where))
        seed_for_building(seed)
        built = _instantiate(parser, config)
        built.trainer.seed = seed
        for name in check.links:
            with suppress(yaml.YAMLError):  # what is no plain data is taken from the data again
                yaml.safe_dump(value := getattr(built.data, name))
                record["model"].setdefault("init_args", {})[name] = value
        if command == "fit":
            built.trainer.callbacks.insert(0, SaveConfig(record))
            configure = partial(configure_optimizers, config, built.model) if config.optimizer else None
            built.trainer.fit(built.model, built.data, configure_optimizers=configure)
            return 0
        results = getattr(built.trainer, command)(built.model, built.data, ckpt_path=built.ckpt_path)
    if not first:
        return 0
    if command == "predict":
        results = [batch for loader in built.trainer.run.values.predictions for batch in loader]
        show_predictions(results, kept=output is not None)
    else:
        title = f"{command}, {getattr(where, 'path', where) or 'no checkpoint'}"
        show_metrics(results, built.trainer.run.loaders, title)
    if output is not None:
        write_results(results, local_path(output))
    return 0


def _recorded(parser: ArgumentParser, config: Namespace, *, skip_unset: bool = False) -> dict[str, Any]:
    """The settings of a run as plain data: what `lumen fit --config` repeats it from."""
    record = yaml.safe_load(parser.dump(config, skip_unset=skip_unset))
    if (several := record.get("lr_scheduler")) and "class_path" not in several:
        record["lr_scheduler"] = list(several.values())
    return {key: value for key, value in record.items() if key not in ("config", "output", "ckpt_path")}


def _flags(given: list[str]) -> set[str] | None:
    """What `--print_config` is to leave out; None if it is not there."""
    words = [word for text in given for word in text.split(",") if word not in ("", "true")]
    for word in words:
        if word not in _LEFT_OUT:
            raise ConfigError(f"--print_config={word}: expected one of {', '.join(_LEFT_OUT)}.")
    return {_LEFT_OUT[word] for word in words} if given else None


def _show_help(parser: ArgumentParser, settings: Settings, asked: list[tuple[str, str]]) -> int:
    """Show the options; for `--model.help` those of the class that is named there, or else in the settings."""
    words = []
    for key, text in asked:
        name = settings.class_of(key.removesuffix(".help")) if text == "true" else text
        words += [f"--{key}", *([name] if name and key != "help" else [])]
    try:
        parser.parse_args(words)
    except ArgumentError as error:
        raise ConfigError(f"{error}. For the options of a class write --model.help module.Class.") from error
    return 0


def _processes(trainer: Namespace) -> Processes:
    """Those of the run, before anything is built."""
    name = trainer.strategy if isinstance(trainer.strategy, str) else "auto"
    return processes_of(trainer.devices, trainer.num_nodes, trainer.accelerator, name)


def _make_parser(command: str, schedulers: int | None = None) -> ArgumentParser:
    """All options of a command; what only fit needs is known to each, so that each reads a run's config.

    Args:
        command: The name of the command: fit, validate, test or predict.
        schedulers: How many there are in a list; None: one, or none, stands alone.
    """
    usage = f"lumen {command} --config FILE [--KEY VALUE ...]"
    order = (
        f"The command line beats config files, the last one first, then LUMEN_{command.upper()}__TRAINER__MAX_STEPS=9."
    )
    parser = ArgumentParser(
        usage=usage, description=f"{COMMANDS[command]} {order}", formatter_class=_Help, exit_on_error=False
    )
    parser.add_argument("--config", action=ActionConfigFile, help="A YAML file of settings; the last one wins.")
    unused = {"ckpt_path", "output"} if command == "fit" else set()
    parser.add_class_arguments(Options, as_group=False, skip=unused)
    for key, base in BASES.items():
        if key == "lr_scheduler" and schedulers is not None:
            _add_schedulers(parser, schedulers)
            continue
        later = SUPPLIED.get(key, set())
        parser.add_subclass_arguments(base, key, skip=later, instantiate=not later, fail_untyped=False)
    for key, kind in _GROUPS.items():
        parser.add_class_arguments(kind, key, skip={*SUPPLIED.get(key, ())})
    return parser


def _add_schedulers(parser: ArgumentParser, count: int) -> None:
    for key in (f"lr_scheduler.{number}" for number in range(count)):
        supplied = SUPPLIED["lr_scheduler"]
        parser.add_subclass_arguments(
            BASES["lr_scheduler"], f"{key}.scheduler", skip=supplied, instantiate=False, fail_untyped=False
        )
        parser.add_class_arguments(Schedule, key, instantiate=False)


def _instantiate(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Build everything; errors of constructors are raised without jsonargparse's wrapping."""
    try:
        return parser.instantiate(config)  # type: ignore[no-any-return]
    except Exception as caught:
        error: BaseException = caught
        while error.__cause__ and "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename:
            error = error.__cause__
        raise error from None


def _take(name: str, data: Any) -> Any:
    """An argument of the model, from the data."""
    if not hasattr(data, name) and not hasattr(type(data), name):
        raise ConfigError(
            f"model.{name} is required and not set. Set it in the config or as --model.{name}, or give "
            f"{type(data).__name__} an attribute {name} to take it from."
        )
    value = getattr(data, name)
    _log.info("model.%s is %s, from data.%s", name, reprlib.repr(value), name)
    return value


def _seed(config: Namespace, checkpoint: Any) -> int:
    """The seed that is set, else that of the checkpoint to go on from, else a new one."""
    if config.seed_everything is not None:
        return checked_seed("seed_everything", config.seed_everything)
    name = config.trainer.name or config.model.class_path.rpartition(".")[2].lower()
    own = local_path(config.trainer.default_root_dir) / name / "checkpoints"
    folder, *beside = _dirpaths(config.trainer.callbacks, own) or [own]
    goes_on = isinstance(checkpoint, (str, Path)) and "progress" in (config.trainer.resume_parts or PARTS)
    if not goes_on or is_weights(checkpoint):
        return secrets.randbits(31)
    found = find_checkpoint(str(checkpoint), folder, sections=(STATE,), beside=beside)  # the run verifies the rest
    return int(found.state["seed"]) if found else secrets.randbits(31)


def _dirpaths(callbacks: Any, own: Path) -> list[PurePath]:
    """Where each `ModelCheckpoint` saves, first the one that says which checkpoint is best."""
    each = (
        callbacks.values() if isinstance(callbacks, dict) else callbacks if isinstance(callbacks, list) else [callbacks]
    )
    savers = [node for node in each if node is not None and node.class_path.endswith(".ModelCheckpoint")]
    arguments = sorted((node.init_args.as_dict() for node in savers), key=lambda given: not decides(given))
    return [own if given.get("dirpath") is None else as_place(given["dirpath"]) for given in arguments]


def _config_of_run(checkpoint: str | None) -> list[str]:
    """The saved configuration of the run that a path of a checkpoint or run lies in."""
    path = None if checkpoint is None else local_path(checkpoint)
    places = [] if path is None else [path, *path.absolute().parents[:2]]
    return [str(place / "config.yaml") for place in places if (place / "config.yaml").is_file()][:1]
