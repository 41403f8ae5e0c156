"""Reader of the files of Weights & Biases; imported only if its library is used."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _HEADER, _BEGINNING = 32768, struct.Struct("<IHB"), 7  # sizes in bytes
_PATIENCE_S = 60.0  # The machine may be busy.
_FIRST, _LAST = (1, 2), (1, 4)  # kinds of pieces: 1 is a whole record, 2 its beginning, 3 its middle, 4 its end


def read_history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a file `run-ID.wandb`: the library's number of each row, and its values by name.

    Values other than numbers, such as images, are dictionaries.

    The file is a LevelDB log of protobuf records. If its process was killed, the end of the file may be missing.
    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    for content in _iterate_records(path.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            values: dict[str, Any] = {}
            for item in record.history.item:
                *above, name = item.nested_key or (item.key,)
                place = values
                for each in above:
                    place = place.setdefault(each, {})
                place[name] = json.loads(item.value_json)
            yield record.history.step.num, values


def wait_for_end(path: Path) -> None:
    """Wait until the library's service has written the last record, which says how the run ended."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _has_ended(path) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _has_ended(path: Path) -> bool:
    with path.open("rb") as file:
        begin = file.seek(max(path.stat().st_size // _BLOCK - 1, 0) * _BLOCK)
        last = deque(_iterate_records(file.read(), 0 if begin else _BEGINNING), maxlen=1)
    return bool(last) and Record.FromString(last[0]).WhichOneof("record_type") == "exit"


def _iterate_records(content: bytes, place: int = _BEGINNING) -> Iterator[bytes]:
    """Yield the records in whole blocks of a file; the first block may begin in the middle of a record."""
    record: bytes | None = None
    while place + _HEADER.size <= len(content):
        rest = _BLOCK - place % _BLOCK
        if rest < _HEADER.size:  # The rest of a block may be too small for a header.
            place += rest
            continue
        checksum, size, kind = _HEADER.unpack_from(content, place)
        begin = place + _HEADER.size
        piece = content[begin : begin + size]
        if len(piece) < size or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        if kind in _FIRST:
            record = piece
        elif record is not None:
            record += piece
        if kind in _LAST and record is not None:
            yield record
        place = begin + size
