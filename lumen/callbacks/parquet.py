"""A Parquet file of tensors, a row for each sample, that is there once it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from lumen.errors import DataError
from lumen.errors.arguments import optional

_ROWS, _BYTES = 1 << 14, 1 << 23  # of a group of rows, which readers take at once


@final
class ParquetFile:
    """Collects rows, and writes them in groups of 16,384, or 8 MiB where that is less.

    A column of a tensor with more dimensions than that of the samples has lists, nested as the dimensions are, so that
    their lengths may differ from batch to batch. Numbers keep their dtypes; bfloat16, which Parquet lacks, is float32.

    Args:
        path: The file to write. Until it is whole it lies beside it under a name that begins with a dot.
    """

    def __init__(self, path: Path) -> None:
        self._arrow = optional("pyarrow", "PredictionWriter(format='parquet')", "parquet")
        self._path, self._beside = path, path.with_name(f".{path.name}.tmp")
        self._writer: Any = None
        self._waiting: list[Any] = []

    def append(self, columns: Mapping[str, torch.Tensor], indices: list[int] | None) -> None:
        """Add rows.

        Args:
            columns: Tensors on the CPU, of which dimension 0 are the rows.
            indices: Of each row, for the column `index`; None: nobody knows them.

        Raises:
            DataError: The columns are not those that the file has.
        """
        arrow, rows = self._arrow, len(next(iter(columns.values())))
        named = {"index": arrow.array([None] * rows if indices is None else indices, arrow.int64())}
        table = arrow.table(named | {name: self._column(tensor) for name, tensor in columns.items()})
        if self._waiting and table.schema != self._waiting[0].schema:
            raise DataError(
                f"PredictionWriter: {self._path.name} has the columns {_in_words(self._waiting[0].schema)}, but a "
                f"batch has {_in_words(table.schema)}. Let predict_step return the same names, dtypes and numbers of "
                "dimensions for each batch, or use format: safetensors."
            )
        self._waiting.append(table)
        held = self._waiting[1:]
        if sum(len(each) for each in held) >= _ROWS or sum(each.nbytes for each in held) >= _BYTES:
            self._write()

    def _column(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        column = self._arrow.array(tensor.reshape(-1).numpy())
        for axis in range(tensor.dim() - 1, 0, -1):
            places = np.arange(tensor.shape[:axis].numel() + 1, dtype=np.int32) * tensor.shape[axis]
            column = self._arrow.ListArray.from_arrays(places, column)
        return column

    def _write(self) -> None:
        """Write what waits; an empty table that tells the columns stays."""
        if self._writer is None:
            parquet = optional("pyarrow.parquet", "PredictionWriter(format='parquet')", "parquet")
            self._writer = parquet.ParquetWriter(self._beside, self._waiting[0].schema)
        self._writer.write_table(self._arrow.concat_tables(self._waiting))
        self._waiting = [self._waiting[0].slice(0, 0)]

    def close(self) -> None:
        """Write the rest. The file is there then."""
        self._write()
        self._writer.close()
        self._beside.rename(self._path)


def _in_words(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
