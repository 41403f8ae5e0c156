"""Writers of predictions to files, one or more files per process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch

from lumen.callbacks.base import Callback
from lumen.data.nested import move_batch
from lumen.errors import ConfigError, DataError
from lumen.errors.arguments import check_arguments, expand_path
from lumen.internals.atomic_files import replace_file
from lumen.internals.optional_packages import import_optional

if TYPE_CHECKING:
    from lumen.task.running_trainer import AnyTrainer
    from lumen.task.task_module import TaskModule

_PARQUET_FLOATS = torch.float16, torch.float32, torch.float64
_MAX_GROUP_ROWS, _MAX_GROUP_BYTES = 1 << 14, 1 << 23  # Size of a row group, which Parquet readers load at once.


@final
class ParquetFile:
    """Parquet file that is written in row groups of 16,384 rows, or of 8 MiB if that is less.

    A tensor with dimensions besides the samples becomes a column of lists, nested like the dimensions. The lengths of
    the lists may differ from batch to batch. Numbers keep their dtypes; bfloat16 and float8 become float32, because
    Parquet lacks them.

    Args:
        path: The file to write. Until the file is complete, it has a name that begins with a dot, in the same
            directory.
    """

    def __init__(self, path: Path) -> None:
        self._pyarrow = import_optional("pyarrow", "PredictionWriter(format='parquet')", "parquet")
        self._path, self._temporary_path = path, path.with_name(f".{path.name}.tmp")
        self._writer: Any = None
        self._pending_tables: list[Any] = []

    def append(self, columns: Mapping[str, torch.Tensor], indices: list[int] | None) -> None:
        """Add rows.

        Args:
            columns: Tensors on the CPU, with the rows in dimension 0.
            indices: Values of the column `index`, one per row; None: unknown.

        Raises:
            DataError: The columns differ from those of the file.
        """
        arrow, rows = self._pyarrow, len(next(iter(columns.values())))
        named = {"index": arrow.array([None] * rows if indices is None else indices, arrow.int64())}
        table = arrow.table(named | {name: self._make_column(tensor) for name, tensor in columns.items()})
        if self._pending_tables and table.schema != self._pending_tables[0].schema:
            raise DataError(
                f"PredictionWriter: {self._path.name} has the columns "
                f"{_describe_schema(self._pending_tables[0].schema)}, but a batch has "
                f"{_describe_schema(table.schema)}. Let predict_step return the same names, dtypes and numbers "
                "of dimensions for each batch, or use format: safetensors."
            )
        self._pending_tables.append(table)
        held = self._pending_tables[1:]
        if sum(len(each) for each in held) >= _MAX_GROUP_ROWS or sum(each.nbytes for each in held) >= _MAX_GROUP_BYTES:
            self._write_row_group()

    def _make_column(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.float() if tensor.is_floating_point() and tensor.dtype not in _PARQUET_FLOATS else tensor
        column = self._pyarrow.array(tensor.reshape(-1).numpy())
        for axis in range(tensor.dim() - 1, 0, -1):
            places = np.arange(tensor.shape[:axis].numel() + 1, dtype=np.int32) * tensor.shape[axis]
            column = self._pyarrow.ListArray.from_arrays(places, column)
        return column

    def _write_row_group(self) -> None:
        """Write the waiting rows; an empty table with the schema remains."""
        if self._writer is None:
            parquet = import_optional("pyarrow.parquet", "PredictionWriter(format='parquet')", "parquet")
            self._writer = parquet.ParquetWriter(self._temporary_path, self._pending_tables[0].schema)
        self._writer.write_table(self._pyarrow.concat_tables(self._pending_tables))
        self._pending_tables = [self._pending_tables[0].slice(0, 0)]

    def close(self) -> None:
        """Write the remaining rows and give the file its final name."""
        self._write_row_group()
        self._writer.close()
        self._temporary_path.rename(self._path)


def _describe_schema(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


class BasePredictionWriter(Callback):
    """Base class for writing the results of `predict_step`. Each process writes the results of its batches.

    Args:
        write_interval: "batch": Lumen calls `write_on_batch_end`; "epoch": `write_on_epoch_end`, with all predictions;
            "batch_and_epoch": both.
    """

    @check_arguments
    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        self.interval = write_interval

    def write_on_batch_end(
        self,
        trainer: AnyTrainer,
        task: TaskModule,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the prediction of a batch.

        Args:
            trainer: The trainer that predicts.
            task: The task whose `predict_step` was called.
            prediction: The output of `predict_step` for the batch, on the device.
            batch_indices: Indices in the data set of the batch's samples; None if they are unknown (streams).
            batch: The batch, on the device.
            batch_idx: Number of the batch, counted as in a run with one process.
            dataloader_idx: Number of its loader.

        Raises:
            ConfigError: A subclass with this interval does not define the method.
        """
        raise self._make_missing_error("write_on_batch_end")

    def write_on_epoch_end(
        self, trainer: AnyTrainer, task: TaskModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all predictions of this process.

        Args:
            trainer: The trainer that predicts.
            task: The task whose `predict_step` was called.
            predictions: Predictions of this process's batches, in order, on the CPU; with several loaders a list of
                such lists.
            batch_indices: A list for each loader (even if there is only one) with the `batch_indices` of each batch.

        Raises:
            ConfigError: A subclass with this interval does not define the method.
        """
        raise self._make_missing_error("write_on_epoch_end")

    def _make_missing_error(self, method: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}: write_interval={self.interval!r} needs {method}, which the class does not define."
        )

    def on_predict_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Reset the kept predictions."""
        self._predictions: list[list[Any]] = [[] for _ in trainer.num_predict_batches]
        self._indices: list[list[list[int] | None]] = [[] for _ in trainer.num_predict_batches]

    def on_predict_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write or keep the result of the step."""
        indices = trainer.run.values.batch_indices
        if self.interval != "epoch":
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval != "batch":
            self._predictions[dataloader_idx].append(move_batch(outputs, torch.device("cpu")))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Write the kept predictions."""
        if self.interval != "batch":
            alone = self._predictions[0] if len(self._predictions) == 1 else self._predictions
            self.write_on_epoch_end(trainer, task, alone, self._indices)
            self._predictions, self._indices = [], []


@final
class PredictionWriter(BasePredictionWriter):
    """Callback that writes each batch of predictions at once. No process gathers predictions.

    Each process holds at most one batch of predictions. With `trainer.predict(..., return_predictions=False)`, the
    files are the only copy of the predictions. The files of all processes together contain each sample once; the index
    of a sample in its data set says where it belongs.

    Args:
        directory: Directory of the files; Lumen creates it if necessary. It must not contain predictions yet.
        format: "safetensors": `predictions-LOADER-BATCH.safetensors` for each batch, with `index` and the tensors that
            the step returned. A single tensor is named `prediction`, the tensors of a dictionary by their keys, those
            of a list by their numbers. "jsonl": `predictions-rank-N.jsonl` for each process, a line for each sample,
            with `index`, `dataloader` and the values of its sample. "parquet": `predictions-LOADER-rank-N.parquet`, a
            row for each sample, with `index` and a column for each tensor. Up to 8 MiB of Parquet rows wait in memory,
            and the file appears once the predictions are complete. Parquet needs `pip install 'lumen-train[parquet]'`.

    Raises:
        ConfigError: The format is unknown, or a library that it needs is not installed.
    """

    @check_arguments
    def __init__(
        self, directory: str | Path, format: Literal["safetensors", "jsonl", "parquet"] = "safetensors"
    ) -> None:
        super().__init__("batch")
        self.directory, self.format = expand_path(directory), format
        if format == "parquet":
            import_optional("pyarrow", "PredictionWriter(format='parquet')", "parquet")

    def on_predict_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Raise if the directory contains predictions of an earlier run. Collective: every rank must call this."""
        self._tables: dict[int, ParquetFile] = {}
        self.directory.mkdir(parents=True, exist_ok=True)
        found = sorted(self.directory.glob("predictions-*"))
        data_rank = trainer.strategy.data_rank
        self._writes = trainer.processes.all_gather(data_rank).index(data_rank) == trainer.global_rank
        if found:
            raise ConfigError(
                f"PredictionWriter: {self.directory} already contains predictions, such as {found[0].name}. Move the "
                "old predictions, or set a different directory."
            )

    def write_on_batch_end(
        self,
        trainer: AnyTrainer,
        task: TaskModule,
        prediction: Any,
        batch_indices: list[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write a batch, on the first process of each data rank."""
        if not self._writes:
            return
        named = _name_tensors(move_batch(prediction, torch.device("cpu")))
        if taken := named.keys() & ({"index", "dataloader"} if self.format == "jsonl" else {"index"}):
            raise DataError(
                f"PredictionWriter: predict_step returned a tensor named {min(taken)!r}, but {self.format} files "
                f"already have a {min(taken)}. Rename the tensor."
            )
        _check_tensors(self.format, named)
        if self.format == "safetensors":
            self._write_tensors(named, batch_indices, f"predictions-{dataloader_idx}-{batch_idx:08d}.safetensors")
            return
        rank = trainer.global_rank
        _check_rows(self.format, named, batch_indices)
        if self.format == "parquet":
            if dataloader_idx not in self._tables:
                name = f"predictions-{dataloader_idx}-rank-{rank}.parquet"
                self._tables[dataloader_idx] = ParquetFile(self.directory / name)
            self._tables[dataloader_idx].append(named, batch_indices)
            return
        with (self.directory / f"predictions-rank-{rank}.jsonl").open("a") as file:
            file.writelines(_format_json_lines(named, batch_indices, dataloader_idx))

    def on_predict_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Complete the files."""
        for table in self._tables.values():
            table.close()

    def _write_tensors(self, named: Mapping[str, torch.Tensor], indices: list[int] | None, name: str) -> None:
        from safetensors.torch import save_file

        tensors = {key: tensor.contiguous().clone() for key, tensor in named.items()}
        if indices is not None:
            tensors["index"] = torch.tensor(indices)
        with replace_file(self.directory / name) as draft:
            save_file(tensors, draft)


def _name_tensors(prediction: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a prediction by name."""
    if isinstance(prediction, torch.Tensor):
        return {"prediction": prediction}
    items = dict(enumerate(prediction)) if isinstance(prediction, (list, tuple)) else prediction
    found = {str(key): value for key, value in items.items()} if isinstance(items, Mapping) else {}
    if not found or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise DataError(
            f"PredictionWriter: predict_step returned a {type(prediction).__name__}. Return a tensor, or a "
            "dictionary or list of tensors; for other results write a subclass of BasePredictionWriter."
        )
    return found


def _check_tensors(format: str, named: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that the format cannot hold."""
    for name, tensor in named.items():
        if tensor.layout is not torch.strided:
            found, instead = f"layout {tensor.layout}", f"{name}.to_dense()"
        elif tensor.is_complex() and (format != "safetensors" or tensor.dtype != torch.complex64):
            found, instead = f"dtype {tensor.dtype}", f"torch.view_as_real({name})"
        else:
            continue
        raise DataError(f"PredictionWriter: {format} files cannot hold {name} of {found}. Return {instead}.")


def _check_rows(format: str, named: Mapping[str, torch.Tensor], indices: list[int] | None) -> None:
    samples = {len(tensor) if tensor.dim() else -1 for tensor in named.values()}
    if len(samples) != 1 or -1 in samples or (indices is not None and samples != {len(indices)}):
        raise DataError(
            f"PredictionWriter: {format} has a line for each sample, but the shapes of the tensors are "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in named.values())}. Return tensors with the samples "
            "along dimension 0, or use format: safetensors."
        )


def _format_json_lines(named: Mapping[str, torch.Tensor], indices: list[int] | None, loader: int) -> list[str]:
    """Return a line of JSON for each sample."""
    names = "index", "dataloader", *named
    rows = zip(indices or repeat(None), repeat(loader), *(each.tolist() for each in named.values()), strict=False)
    return [json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows]
