"""Images and texts that a run has logged, from the record that TensorBoard's logger keeps beside its values."""

from __future__ import annotations

import base64
import importlib.util
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, final

_HEAD = struct.Struct("<QI")  # of a record: its length, and a checksum; another one follows the record
_LONGEST_RECORD = 1 << 26
_MOST_RECORDS = 2_000_000
_MOST_NAMES, _OF_EACH = 24, 4
_PNG = b"\x89PNG\r\n\x1a\n"


@final
@dataclass
class Media:
    """The newest images and texts of a run.

    Attributes:
        images: Name, step, and the image as a `data:` URL.
        texts: Name, step and text.
        left_out: How many there are besides.
        note: Why nothing can be shown, or "".
    """

    images: list[tuple[str, int, str]] = field(default_factory=list)
    texts: list[tuple[str, int, str]] = field(default_factory=list)
    left_out: int = 0
    note: str = ""


def read_media(files: list[Path], most_bytes: int) -> Media:
    """The newest images and texts in event files.

    Args:
        files: The event files, in their order.
        most_bytes: Of all images and texts together, as they stand in the page.
    """
    media = Media()
    if files and importlib.util.find_spec("tensorboard") is None:
        media.note = "Images and texts cannot be read without TensorBoard: pip install 'lumen[tensorboard]'."
        return media
    found: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for file in files:
        with suppress(OSError):
            for kind, name, step, content in islice(_entries(file), _MOST_RECORDS):
                found.setdefault((kind, name), []).append((step, content))
                media.left_out += 1
                if len(found[kind, name]) > _OF_EACH:
                    found[kind, name].pop(0)
    for (kind, name), entries in islice(found.items(), _MOST_NAMES):
        for step, content in entries:
            shown = content if kind == "text" else f"data:image/png;base64,{base64.b64encode(content).decode()}"
            if len(shown) <= most_bytes:
                most_bytes -= len(shown)
                media.left_out -= 1
                (media.texts if kind == "text" else media.images).append((name, step, shown))
    return media


def _entries(file: Path) -> Iterator[tuple[str, str, int, Any]]:
    """Kind, name, step and content of each image and text; only records that may hold one are decoded."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    for record in _records(file):
        if _PNG in record or b"text" in record:
            with suppress(DecodeError):
                event = Event.FromString(record)
                for value in event.summary.value:
                    image = value.image.encoded_image_string
                    if image.startswith(_PNG):
                        yield "image", value.tag, event.step, image
                    elif value.metadata.plugin_data.plugin_name == "text" and value.tensor.string_val:
                        text = value.tensor.string_val[0].decode(errors="replace")
                        yield "text", value.tag.removesuffix("/text_summary"), event.step, text


def _records(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while len(head := opened.read(_HEAD.size)) == _HEAD.size:
            length, _ = _HEAD.unpack(head)
            record = opened.read(length + 4) if length <= _LONGEST_RECORD else b""
            if len(record) < length + 4:
                return  # torn, or nothing that a logger wrote
            yield record[:-4]
