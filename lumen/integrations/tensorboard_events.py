"""TensorBoard writer whose file has a known name and length; imported only if TensorBoard is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import FileWriter, RecordWriter, SummaryWriter
from torch.utils.tensorboard.summary import hparams


@final
class _EventFile:
    """Event file that writes every event at once, in the thread that logs it.

    TensorBoard's own class names files by the clock, and TensorBoard reads files in order of their names. That class
    writes from a thread, which ends silently when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._directory = path.parent
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        if not self._file.tell():
            self.add_event(Event(file_version="brain.Event:2"))

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def get_logdir(self) -> str:
        return str(self._directory)


@final
class _FileWriter(FileWriter):
    def __init__(self, path: Path) -> None:
        self.event_writer = _EventFile(path)


@final
class EventWriter(SummaryWriter):
    """`SummaryWriter` that writes into one file.

    Args:
        path: The event file; TensorBoard finds it by "tfevents" in its name.
    """

    file_writer: Any
    all_writers: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path.parent))

    def add_hyperparameters(self, values: Mapping[str, int | float | str]) -> None:
        """Write hyperparameters of this run; `add_hparams` would create a second run instead."""
        experiment, start, _ = hparams(dict(values), {})  # type: ignore[no-untyped-call]
        for summary in (experiment, start):  # The third summary would mark the end of the run.
            self._get_file_writer().add_summary(summary)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:  # `close` sets it to None.
            self.file_writer = _FileWriter(self._path)
            self.all_writers = {str(self._path.parent): self.file_writer}
        return self.file_writer
