"""What evaluation and prediction leave: tables and text on stdout, files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lumen.checkpoint.safetensors_files import write_safetensors
from lumen.errors import ConfigError, DataError

_SUFFIXES = {"validate": (".json",), "test": (".json",), "predict": (".jsonl", ".safetensors")}


def check_output(command: str, path: Path | None) -> None:
    """Find out before the work whether its result can be written.

    Raises:
        ConfigError: The command writes no such file, or there is no such directory.
    """
    if path is None:
        return
    if command not in _SUFFIXES:
        raise ConfigError(f"--output {path}: {command} writes into its run directory; set trainer.default_root_dir.")
    if path.suffix not in _SUFFIXES[command]:
        raise ConfigError(f"--output {path}: {command} writes {' or '.join(_SUFFIXES[command])} files.")
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: there is no directory {path.parent}.")


def show_values(values: Sequence[Mapping[str, float]], title: str) -> None:
    """Print a table of values, one column per loader."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    for number in range(len(values)):
        table.add_column("value" if len(values) == 1 else f"loader {number}", justify="right")
    for name in dict.fromkeys(name for column in values for name in column):
        table.add_row(name, *(format(column[name], ".6g") if name in column else "" for column in values))
    console = Console()
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def write_values(values: Sequence[Mapping[str, float]], path: Path) -> None:
    """Write values as JSON: a list with one object per loader."""
    _write(path, json.dumps(list(values), indent=2) + "\n")


def texts(predictions: Any) -> Iterator[str]:
    """The strings in predictions, in their order."""
    if isinstance(predictions, str):
        yield predictions
    elif isinstance(predictions, (list, tuple)):
        for item in predictions:
            yield from texts(item)


def write_predictions(batches: Sequence[Any], path: Path) -> None:
    """Write predictions.

    Args:
        batches: What `predict_step` returned for each batch.
        path: `.jsonl`: one line per sample where a batch is a list, a tensor, or a dictionary of these, else one line
            per batch; `.safetensors`: the tensors of all batches joined along dimension 0, under `predictions` or the
            keys of the dictionaries.

    Raises:
        DataError: They cannot be written in this form; the message names the other one.
    """
    if path.suffix == ".jsonl":
        lines = [json.dumps(_plain(sample)) + "\n" for batch in batches for sample in _samples(batch)]
        _write(path, "".join(lines))
    else:
        tensors, temporary = _joined(batches), path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)  # of a killed process
        write_safetensors(temporary, tensors)
        os.replace(temporary, path)


def _samples(batch: Any) -> Iterator[Any]:
    """A batch's predictions one by one, if they can be told apart."""
    if isinstance(batch, list) or (isinstance(batch, torch.Tensor) and batch.ndim > 0):
        yield from batch
    elif isinstance(batch, dict) and batch and _rows(batch) is not None:
        for number in range(_rows(batch) or 0):
            yield {name: column[number] for name, column in batch.items()}
    else:
        yield batch


def _rows(batch: Mapping[Any, Any]) -> int | None:
    """The common length of a dictionary's columns."""
    lengths = {
        len(column) if isinstance(column, list) or (isinstance(column, torch.Tensor) and column.ndim > 0) else None
        for column in batch.values()
    }
    return lengths.pop() if len(lengths) == 1 else None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):  # numpy
        return value.tolist()
    raise DataError(
        f"predictions hold a {type(value).__name__}, which is no plain data and no tensor. "
        "Return numbers, text, lists, dictionaries or tensors from predict_step."
    )


def _joined(batches: Sequence[Any]) -> dict[str, torch.Tensor]:
    columns: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        for name, tensor in (batch if isinstance(batch, dict) else {"predictions": batch}).items():
            if not isinstance(tensor, torch.Tensor):
                raise DataError(
                    f".safetensors files hold tensors only; {name} is a {type(tensor).__name__}. Write a .jsonl file."
                )
            columns.setdefault(str(name), []).append(tensor.detach().cpu())
    try:
        return {
            name: torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
            for name, parts in columns.items()
        }
    except RuntimeError as error:
        raise DataError(
            f"the batches' tensors cannot be joined along dimension 0: {error}. Write a .jsonl file."
        ) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
