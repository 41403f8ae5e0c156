"""Batches in words: their structure, and what their tensors hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from lumen.console import size

_MOST_PARTS = 16
_PLAIN = (str, bytes, int, float, type(None))


@final
@dataclasses.dataclass(frozen=True)
class Part:
    """A leaf of a nested batch.

    Attributes:
        path: Where it is: `[0]`, `image`, `[0].image`.
        kind: The dtype of a tensor, else the class.
        shape: The tensor's shape; None: it is no tensor.
        size_bytes: The memory that the tensor takes, in bytes.
        least: The smallest element that is finite; None: there is none, or it is no tensor of numbers.
        most: The largest one.
        mean: Of the elements that are finite; None but for floating-point numbers.
        std: Their standard deviation; None likewise.
        nan: How many elements are NaN.
        infinite: How many are infinite.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None = None
    size_bytes: int = 0
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    std: float | None = None
    nan: int = 0
    infinite: int = 0

    @property
    def cells(self) -> list[str]:
        """As a row of a table."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        holds = "" if self.least is None or self.most is None else f"{_short(self.least)} .. {_short(self.most)}"
        spread = "" if self.mean is None or self.std is None else f"mean {_short(self.mean)} std {_short(self.std)}"
        odd = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        memory = size(self.size_bytes) if self.size_bytes else ""
        return [self.path, self.kind, shape, holds, ", ".join([*filter(None, [spread]), *odd]), memory]


def parts_of(batch: Any) -> list[Part]:
    """The leaves of a nested batch, depth first."""
    return [_part(path, leaf) for path, leaf in leaves(batch)]


def rows_of(parts: list[Part]) -> list[list[str]]:
    """Parts as rows of a table, not too many."""
    more = len(parts) - _MOST_PARTS
    return [each.cells for each in parts[:_MOST_PARTS]] + ([[f"and {more} more"]] if more > 0 else [])


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested batch, depth first, each with where it is; a list of words or numbers is one."""
    inside: Iterator[tuple[str, Any]] | None = None
    if isinstance(batch, Mapping):
        inside = ((_within(path, key), value) for key, value in batch.items())
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        inside = ((f"{path}.{name}", value) for name, value in zip(batch._fields, batch, strict=True))
    elif isinstance(batch, (list, tuple)) and not all(isinstance(each, _PLAIN) for each in batch):
        inside = ((f"{path}[{number}]", value) for number, value in enumerate(batch))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        inside = ((f"{path}.{each.name}", getattr(batch, each.name)) for each in dataclasses.fields(batch))
    if inside is None:
        yield path or "batch", batch
        return
    for where, value in inside:
        yield from leaves(value, where)


def _within(path: str, key: Any) -> str:
    return f"{path}.{key}".lstrip(".") if isinstance(key, str) else f"{path}[{key!r}]"


def largest(batch: Any) -> tuple[str, torch.Tensor] | None:
    """The tensor of at least two dimensions that has the most elements, the first of those; None: there is none."""
    found = [(path, leaf) for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    return max(found, key=lambda each: each[1].numel(), default=None)


def _part(path: str, leaf: Any) -> Part:
    if isinstance(leaf, (list, tuple)):
        kinds = {type(each).__name__: None for each in leaf}
        return Part(path, f"{len(leaf)} {', '.join(kinds)}".rstrip())
    if not isinstance(leaf, torch.Tensor):
        return Part(path, type(leaf).__name__)
    kind, shape = str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    size_bytes = leaf.numel() * leaf.element_size()
    if leaf.is_sparse or leaf.is_nested or leaf.is_complex() or leaf.is_quantized or not leaf.numel():
        return Part(path, kind, shape, size_bytes)
    if not leaf.is_floating_point():
        numbers = leaf.detach().long()
        return Part(path, kind, shape, size_bytes, float(numbers.min()), float(numbers.max()))
    numbers = leaf.detach().float()
    nan, infinite = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    finite = numbers[numbers.isfinite()]
    if not finite.numel():
        return Part(path, kind, shape, size_bytes, nan=nan, infinite=infinite)
    least, most, mean, std = map(float, (finite.min(), finite.max(), finite.mean(), finite.std(correction=0)))
    return Part(path, kind, shape, size_bytes, least, most, mean, std, nan, infinite)


def duration(seconds: float) -> str:
    """A time as people say it: `40 ms`, `12 s`, `3 min`, `5.2 h`, `2.1 days`."""
    for most, unit, name in ((1, 0.001, "ms"), (100, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < most:
            return f"{seconds / unit:.2g} {name}" if seconds < 100 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.3g} days"


def _short(value: float) -> str:
    return f"{value:.3g}"


def every(count: int, what: str) -> str:
    """`every step`, `every 2 steps`."""
    return f"every {what}" if count == 1 else f"every {count:,} {what}s"


def counted(count: float, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
