"""What the commands leave: a run's config.yaml, tables and text on stdout, files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, final

import torch
import yaml
from rich.console import Console
from rich.table import Table

from lumen.callbacks import Callback
from lumen.checkpoint.safetensors_files import write_safetensors
from lumen.errors import ConfigError, DataError
from lumen.task import TaskModule
from lumen.trainer import Trainer

_SUFFIXES = {"validate": (".json",), "test": (".json",), "predict": (".jsonl", ".safetensors")}


@final
class SaveConfig(Callback):
    """Writes the resolved configuration into the run's directory; an older one that differs is kept beside it."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Write it, now that everything is loaded and fits: a resume that fails leaves the old one alone."""
        if trainer.run_directory is None or not trainer.is_global_zero:
            return
        self._record["trainer"] |= {"name": trainer.run_directory.name, "resume": None, "resume_parts": None}
        path = trainer.run_directory / "config.yaml"
        if path.exists() and yaml.safe_load(before := path.read_text(encoding="utf-8")) != self._record:
            kept = (path.with_name(f"config-{number}.yaml") for number in count(1))
            _write(next(other for other in kept if not other.exists()), before)
        _write(path, dump(self._record))


def dump(record: dict[str, Any]) -> str:
    """A configuration as YAML."""
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120)


def check_output(command: str, path: Path) -> None:
    """Find out before the work whether its result can be written."""
    if path.suffix not in _SUFFIXES[command]:
        raise ConfigError(f"--output {path}: {command} writes {' or '.join(_SUFFIXES[command])} files.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}. Create it.")


def show_metrics(metrics: list[dict[str, float]], title: str) -> None:
    """Print a table of values, one column per loader."""
    table = Table("metric", *(f"loader {number}" for number in range(len(metrics))), title=title)
    for name in dict.fromkeys(name for column in metrics for name in column):
        table.add_row(name, *(format(column[name], ".6g") if name in column else "" for column in metrics))
    Console().print(table)


def texts(predictions: Any) -> Iterator[str]:
    """The strings in predictions, in their order."""
    if isinstance(predictions, str):
        yield predictions
    elif isinstance(predictions, (list, tuple)):
        for item in predictions:
            yield from texts(item)


def write_results(results: list[Any], path: Path) -> None:
    """Write a JSON list, a JSON line per sample where batches are lists or tensors, or all batches' tensors joined."""
    if path.suffix == ".safetensors":
        return _write(path, _joined(results))
    parts = [list(batch) if isinstance(batch, (list, torch.Tensor)) else [batch] for batch in results]
    lines = chain(*parts) if path.suffix == ".jsonl" else [results]
    return _write(path, "".join(json.dumps(line, default=_plain) + "\n" for line in lines))


def _write(path: Path, content: str | dict[str, torch.Tensor]) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process
    if isinstance(content, str):
        temporary.write_text(content, encoding="utf-8")
    else:
        write_safetensors(temporary, content)
    os.replace(temporary, path)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise DataError(f"a {type(value).__name__} cannot be written. Return plain data or tensors from predict_step.")


def _joined(batches: list[Any]) -> dict[str, torch.Tensor]:
    named = [batch if isinstance(batch, dict) else {"predictions": batch} for batch in batches]
    try:
        return {name: torch.cat([batch[name].cpu() for batch in named]) for name in named[0]}
    except (AttributeError, KeyError, RuntimeError) as error:
        raise DataError(f".safetensors files hold tensors that can be joined: {error}. Write a .jsonl file.") from error
