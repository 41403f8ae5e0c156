"""Results of the commands: a run's config.yaml, tables and text on stdout, and files."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from rich.console import Console
from rich.table import Table

from lumen.callbacks import Callback
from lumen.checkpoint.format.safetensors_file import write_safetensors
from lumen.cli.interpolation import escape_references
from lumen.cli.options import OptionParser
from lumen.cli.yaml_text import dump_yaml, load_yaml
from lumen.console import stderr, stdout
from lumen.errors import ConfigError, DataError
from lumen.internals.atomic_files import replace_file, write_private
from lumen.internals.masking import mask_secrets
from lumen.run.loaders import Loaders
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

_MAX_LINES, _MAX_VALUES = 10, 16  # in the output of predictions
_BRIEF_CHARACTERS = reprlib.Repr()
_BRIEF_CHARACTERS.maxstring = 80
_SUFFIXES = {"validate": (".json",), "test": (".json",), "predict": (".jsonl", ".safetensors")}


class SaveConfigCallback(Callback):
    """Callback that writes the settings to `config.yaml` in the run directory, and keeps a different older file.

    A subclass may define `save_config`, for example to pass the settings to a logger.

    Args:
        parser: The parser; `self.parser.dump(self.config)` is the settings as YAML.
        config: The settings of the command.
        config_filename: Only `config.yaml`, the file that other commands read.
        overwrite: Without effect: Lumen keeps an older file with other settings as `config-N.yaml`.
        multifile: Without effect: the settings are one file.
        save_to_log_dir: False: Lumen writes no file, and calls only `save_config`.

    Raises:
        ConfigError: `config_filename` is another name.
    """

    def __init__(
        self,
        parser: OptionParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if config_filename != "config.yaml":
            raise ConfigError(
                f"config_filename={config_filename!r}: Lumen reads the settings of a run from config.yaml. Leave "
                "config_filename out; for a second file call self.parser.save(self.config, PATH) in save_config."
            )
        self.parser, self.config, self.config_filename = parser, config, config_filename
        self.overwrite, self.multifile, self.save_to_log_dir = overwrite, multifile, save_to_log_dir
        self.already_saved = False

    def save_config(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Save the settings in another place; called once, in the first process, before the first stage.

        Args:
            trainer: The trainer of the run.
            pl_module: The task of the run.
            stage: The stage: fit, validate, test or predict.
        """

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Call `save_config`."""
        if trainer.is_global_zero and not self.already_saved:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Write the file after everything is loaded, so that a resume that fails keeps the old file."""
        if not self.save_to_log_dir or trainer.run_directory is None or not trainer.is_global_zero:
            return
        record = self.parser.make_record(self.config)
        record.pop("config", None)
        of_run = {"name": escape_references(trainer.run_directory.name), "resume": None, "resume_parts": None}
        record["trainer"] |= of_run
        path, written = trainer.run_directory / "config.yaml", mask_secrets(record)
        if path.exists() and not _holds_record(before := path.read_text(encoding="utf-8"), written):
            kept = (path.with_name(f"config-{number}.yaml") for number in count(1))
            write_private(next(other for other in kept if not other.exists()), before)
        write_private(path, dump_yaml(written))


def _holds_record(text: str, record: dict[str, Any]) -> bool:
    """Return True if a file holds this config; False if the file cannot be read as YAML."""
    try:
        return bool(load_yaml(text) == record)
    except yaml.YAMLError:
        return False


def check_output(command: str, path: Path) -> None:
    """Refuse an output file that cannot be written, before the command runs."""
    if path.suffix not in _SUFFIXES[command]:
        raise ConfigError(f"--output {path}: {command} writes {' or '.join(_SUFFIXES[command])} files.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}. Create the directory.")


def show_metrics(metrics: list[dict[str, float]], loaders: Loaders, title: str) -> None:
    """Print a table of values, one column per loader."""
    columns = [
        {name.removesuffix(suffix): value for name, value in column.items()}
        for column, suffix in zip(metrics, loaders.list_suffixes(), strict=True)
    ]
    adapters = loaders.evaluation
    unnamed = ["value"] if len(adapters) == 1 else [f"loader {number}" for number in range(len(adapters))]
    table = Table(
        "metric", *(adapter.name or head for adapter, head in zip(adapters, unnamed, strict=True)), title=title
    )
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(format(column[name], ".6g") if name in column else "" for column in columns))
    Console(file=stdout, markup=False, emoji=False).print(table)


def show_predictions(batches: list[Any], output: str | None) -> None:
    """Print all strings in predictions; if there are no strings, print the first predictions, one per line.

    Args:
        batches: The values that `predict_step` returned.
        output: The file that holds all predictions, or None.
    """
    found = list(_iterate_texts(batches))
    for text in found:
        print(text, file=stdout)
    if found or all(batch is None for batch in batches):
        return
    samples = chain.from_iterable(map(_split_samples, batches))
    for sample in islice(samples, _MAX_LINES):
        print(_format_brief(sample), file=stdout)
    description = f"the first {_MAX_LINES} predictions" if next(samples, None) is not None else "all predictions"
    advice = "To save all predictions: --output FILE.jsonl, or FILE.safetensors for tensors"
    print(f"printed {description}. {advice if output is None else f'All predictions are in {output}'}", file=stderr)


def _iterate_texts(predictions: Any) -> Iterator[str]:
    """Yield the strings in predictions, in order."""
    if isinstance(predictions, str):
        yield predictions
    elif isinstance(predictions, (list, tuple)):
        for item in predictions:
            yield from _iterate_texts(item)


def _split_samples(batch: Any) -> Iterable[Any]:
    """Return the predictions of each sample in a batch; the batch itself if it cannot be divided into samples."""
    if isinstance(batch, list) or (isinstance(batch, torch.Tensor) and batch.ndim):
        return batch
    columns = list(batch.values()) if isinstance(batch, dict) else []
    if all(isinstance(each, torch.Tensor) and each.ndim for each in columns) and len(set(map(len, columns))) == 1:
        return (dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
    return [batch]


def _format_brief(value: Any) -> str:
    """Return the values of a sample as one line, or the shape or number of many values."""
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _MAX_VALUES
        return (
            _format_brief(value.tolist())
            if small
            else f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        )
    if isinstance(value, float):
        return format(value, ".4g")
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_brief(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_format_brief, value))}]" if len(value) <= _MAX_VALUES else f"{len(value)} values"
    return _BRIEF_CHARACTERS.repr(value)


def write_results(results: list[Any], path: Path) -> None:
    """Write a JSON list, one JSON line per sample, or the joined tensors of all batches."""
    with replace_file(path) as draft:
        if path.suffix == ".safetensors":
            write_safetensors(draft, _join_batches(results))
        else:
            lines = chain.from_iterable(map(_split_samples, results)) if path.suffix == ".jsonl" else [results]
            draft.write_text("".join(json.dumps(line, default=_as_plain) + "\n" for line in lines), encoding="utf-8")


def _as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise DataError(f"cannot write a {type(value).__name__} to a file. Return plain data or tensors from predict_step.")


def _join_batches(batches: list[Any]) -> dict[str, torch.Tensor]:
    if not batches:
        raise DataError("there are no predictions to write to a .safetensors file. Write a .jsonl file.")
    named = [batch if isinstance(batch, dict) else {"predictions": batch} for batch in batches]
    names = dict.fromkeys(chain.from_iterable(named))
    try:
        return {name: torch.cat([batch[name].cpu() for batch in named]) for name in names}
    except (AttributeError, KeyError, RuntimeError) as error:
        raise DataError(
            f"cannot join the predictions of all batches for a .safetensors file: {error}. Write a .jsonl file."
        ) from error
