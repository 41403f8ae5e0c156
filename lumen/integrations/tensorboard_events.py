"""A TensorBoard writer whose file has a known name and length; imported only where TensorBoard is used."""

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
    """An event file to which every event is written at once, by the thread that logs it.

    TensorBoard's own class names its file after the clock, and TensorBoard reads files in the order of their names; it
    writes from a thread that a full disk ends without a word.
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
    """A `SummaryWriter` that writes into one file.

    Args:
        path: The event file; TensorBoard finds it by "tfevents" in its name.
    """

    file_writer: Any
    all_writers: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path.parent))

    def add_hyperparameters(self, values: Mapping[str, int | float | str]) -> None:
        """Record them for this run; `add_hparams` would make a second run beside it."""
        experiment, start, _ = hparams(dict(values), {})  # type: ignore[no-untyped-call]
        for summary in (experiment, start):  # without the third, the end of the session: it only begins
            self._get_file_writer().add_summary(summary)

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:  # also after `close`
            self.file_writer = _FileWriter(self._path)
            self.all_writers = {str(self._path.parent): self.file_writer}
        return self.file_writer
