"""Objects that settings describe: the seed, how objects are built, and the record of their arguments."""

from __future__ import annotations

import os
import reprlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any
from zlib import crc32

import yaml
from jsonargparse import ArgumentParser, Namespace

from lumen.callbacks.checkpoint_names import can_rank_checkpoints, locate_folder
from lumen.checkpoint import PARTS, as_path_or_url, find_checkpoint, is_weights
from lumen.checkpoint.format.manifest import STATE
from lumen.cli.config_layers import as_list
from lumen.cli.interpolation import escape_references
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.internals.masking import References, mask_secrets
from lumen.random import check_seed, draw_seed
from lumen.task.data_module import DataModule
from lumen.task.hyperparameters import HyperparametersMixin
from lumen.task.task_module import TaskModule


def choose_seed(config: Namespace, checkpoint: Any, name: str, launcher: str | None) -> int:
    """Return the seed in the settings, else the seed of the checkpoint to resume from, else a new one.

    A restarted program gets the seed of its first attempt, whose checkpoint it resumes.

    Args:
        config: The settings of the command.
        checkpoint: The checkpoint from which the settings resume.
        name: The name of the run.
        launcher: Identifier of the program that may restart this process; None without restarts.
    """
    if config.seed_everything not in (None, True, False) or type(config.seed_everything) is int:
        return check_seed("seed_everything", config.seed_everything)
    home = expand_path(config.trainer.default_root_dir) / name
    folder, *other_folders = [*_list_folders(config.trainer.callbacks, home), locate_folder(home, None)]
    resumes_progress = isinstance(checkpoint, (str, Path)) and "progress" in (config.trainer.resume_parts or PARTS)
    # All attempts have the same launcher, and so the same seed.
    drawn = draw_seed() if launcher is None else crc32(launcher.encode()) % 2**31
    if not resumes_progress or is_weights(checkpoint):
        return drawn
    # The run verifies the other sections.
    found = find_checkpoint(str(checkpoint), folder, sections=(STATE,), other_folders=other_folders)
    return int(found.state["seed"]) if found else drawn


def _list_folders(callbacks: Any, home: Path) -> list[PurePath]:
    """Return the checkpoint folders of a run, given the settings of its callbacks and its directory."""
    savers = [node for node in as_list(callbacks) if node.class_path.endswith(".ModelCheckpoint")]
    arguments = [node.init_args.as_dict() for node in savers]
    dirpaths = [each.get("dirpath") for each in sorted(arguments, key=lambda each: not can_rank_checkpoints(each))]
    return [locate_folder(home, None if each is None else as_path_or_url(each)) for each in dirpaths]


def build_objects(parser: ArgumentParser, config: Namespace) -> Namespace:
    """Build all objects; errors of constructors are raised without jsonargparse's wrapping."""
    try:
        return parser.instantiate(config)  # type: ignore[no-any-return]
    except Exception as caught:
        error: BaseException = caught
        while error.__cause__ and "jsonargparse" in traceback.extract_tb(error.__traceback__)[-1].filename:
            error = error.__cause__
        raise error from None


@contextmanager
def explain_missing_paths(files: Iterable[str]) -> Iterator[None]:
    """Add a note to a FileNotFoundError within the context, if the missing file is near a config file.

    Args:
        files: The paths of the config files, whose directories and parent directories may contain the missing file.
    """
    try:
        yield
    except FileNotFoundError as error:
        working_directory, name = Path.cwd(), error.filename
        name = name if not isinstance(name, str | os.PathLike) else Path(working_directory, os.fsdecode(name))
        folders = [folder for file in files for folder in Path(os.path.abspath(expand_path(file))).parents]
        if isinstance(name, Path) and name.is_relative_to(working_directory):
            name = name.relative_to(working_directory)
            if folder := next((each for each in folders if (each / name).exists()), None):
                error.add_note(
                    f"lumen was started in {working_directory}, but {name} is in {folder}. Start lumen there."
                )
        raise


def take_from_data(name: str, data: Any) -> Any:
    """Return an argument of the model, taken from the data."""
    if not hasattr(data, name) and not hasattr(type(data), name):
        raise ConfigError(
            f"model.{name} is required and not set. Set {name} in the config or as --model.{name}, or give "
            f"{type(data).__name__} an attribute {name}."
        )
    value = getattr(data, name)
    _log.info("model.%s is %s, from data.%s", name, reprlib.repr(mask_secrets(value, name)), name)
    return value


def record_hyperparameters(
    links: list[str], model: TaskModule, data: DataModule | None, references: References
) -> dict[str, Any]:
    """Record the hyperparameters that refer to the environment.

    Args:
        links: The names of the arguments that the model takes from the data.
        model: The task that was built.
        data: The data module that was built.
        references: The references to the environment, by their place in the config.

    Returns:
        The arguments that the model takes from the data, as plain data for the config.
    """
    taken: dict[str, Any] = {}
    for key, owner in (("model", model), ("data", data)):
        if isinstance(owner, HyperparametersMixin):
            found = {path[2:]: each for path, each in references.items() if path[:2] == (key, "init_args")}
            owner._set_references(found)
    for name in links:
        if (reference := references.get(("data", "init_args", name))) is not None:
            model._set_references({(name,): reference})
            continue  # a repeated run takes the value from the data again
        with suppress(yaml.YAMLError):  # the record holds plain data only
            yaml.safe_dump(value := getattr(data, name))
            taken[name] = escape_references(value)
    return taken


def is_plain_data(value: Any) -> bool:
    """Return True if a config file can hold the value."""
    if isinstance(value, Mapping):
        return all(map(is_plain_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain_data, value))
    return value is None or isinstance(value, str | int | float)
