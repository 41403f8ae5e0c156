"""Digests of the collections that a loader's data set keeps, made without reading a sample: ranks compare them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lumen.console import logger as _log
from lumen.data.combined import CombinedLoader, holds_loaders
from lumen.data.generators import walk
from lumen.data.iterable_style import shards_itself
from lumen.data.rank_checks import pieces
from lumen.data.windows import RankSlice
from lumen.errors import DataError
from lumen.random import GENERATORS

#: A digest reads at most so many items of a collection, spread evenly; fewer of one that may be on a disk.
_ITEMS, _ITEMS_ON_DISK, _COLLECTIONS = 16_384, 64, 1024
#: Collections of so many items are searched for others, and an item counts by so many values of each dimension.
_FEW, _VALUES, _DEPTH = 64, 4, 4
_ARRAYS = (torch.Tensor, np.ndarray)
_SETS = (set, frozenset)
_SEQUENCES = (list, tuple, deque)
_SCALARS = (type(None), str, bytes, int, float, complex, np.generic, os.PathLike)
_ADVICE = (
    "Every process runs the whole script and draws its own random numbers. Call lumen.seed_everything(1) before data "
    "is split, shuffled or drawn. Sort what has no order, as in sorted(os.listdir(path)) and sorted(set(names)), or "
    "set PYTHONHASHSEED=0 for sets. Leave sharding to Lumen: give every rank all samples, without "
    "split_dataset_by_node, shard() or [rank::world_size]."
)
_LEAVES = (*_SCALARS, bytearray, range, type, torch.device, torch.dtype, np.dtype)


class Collection(NamedTuple):
    """The digest of a collection.

    Attributes:
        items: Number of items.
        ordered: Digest of the items in their order; of a dictionary's pairs, and of a set's items, in any order.
        unordered: Digest of the items in any order; of a dictionary's keys and values in any pairs.
    """

    items: int
    ordered: int
    unordered: int


def check_same_data(rank_slice: RankSlice, sources: Mapping[str, Any]) -> None:
    """Refuse data sets that differ between the ranks of a run. Collective: every rank must call this.

    Args:
        rank_slice: The rank of this process, the number of processes, and how they communicate.
        sources: The loaders that were given for a purpose, such as "training"; None: there are none.

    Raises:
        DataError: A rank holds other samples than rank 0, or the same in another order. It is raised on every rank.
    """
    here, lengths = dict[str, Collection](), set[int]()
    for purpose, source in sources.items():
        for number, loader in enumerate(_loaders_of(source)):
            if not shards_itself(loader, rank_slice.world):
                found, met = collections_of(loader)
                lengths |= met
                loader_name = f"{purpose} {number}" if number else purpose
                here |= {f"{name} of the {loader_name}": each for name, each in found.items()}
    told = rank_slice.gather((here, lengths))
    first, lengths = told[0][0], set().union(*(met for _, met in told))
    for rank, (other, _) in enumerate(told):
        for place in [name for name in other if first.get(name, other[name]) != other[name]]:
            one, two = first[place], other[place]
            is_reordered = (one.items, one.unordered) == (two.items, two.unordered)
            what = f"rank {rank} and rank 0 hold different data: {place} has "
            what += f"the same {one.items} items in a different order" if is_reordered else (
                f"{two.items} items on rank {rank}, {one.items} on rank 0, with different values"
            )  # fmt: skip
            if is_reordered or {one.items, two.items} & lengths:
                raise DataError(f"{what}. {_ADVICE}")
            _log.warning("%s. Samples that depend on it differ from those of a run on one process.", what)


def _loaders_of(source: Any) -> Iterator[Any]:
    """Yield the loaders of a nested collection of loaders."""
    if isinstance(source, CombinedLoader):
        source = source.flattened
    if holds_loaders(source):
        for part in source.values() if isinstance(source, Mapping) else source:
            yield from _loaders_of(part)
    elif source is not None:
        yield source


def collections_of(loader: Any) -> tuple[dict[str, Collection], set[int]]:
    """Return a digest of each collection that a loader's data set, samplers and collate function keep.

    Lists, tuples, dictionaries, sets, arrays, tensors, tables of pandas and Hugging Face's data sets are read, of large
    ones 16,384 items. A path counts by its last two components, since hosts may keep data in different folders.

    Args:
        loader: A `DataLoader`, or any iterable of batches.

    Returns:
        The digests by the place of the collection, such as `dataset.indices`; and the lengths of all data sets met.
    """
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    roots = {name: part for name in names if (part := getattr(loader, name, None)) is not None} or {"loader": loader}
    found, lengths = dict[str, Collection](), set[int]()
    for place, part in walk(roots, _is_end, _LEAVES):
        if place in ("dataset", "loader") or isinstance(part, Dataset):
            with suppress(Exception):
                lengths.add(len(part))
        with suppress(Exception):  # What its own code refuses to read is not compared.
            if (digest := _digest(part)) is not None:
                found[place] = digest
        if len(found) == _COLLECTIONS:
            break
    return found, lengths


def _is_end(part: Any) -> bool:
    """Return True for what is digested as a whole, and for what holds no data."""
    if isinstance(part, (dict, *_SEQUENCES)):
        first = _first(part)
        return _is_data(first) and not (isinstance(first, _ARRAYS) and len(part) <= _FEW)  # such as a set's tensors
    return isinstance(part, (*_ARRAYS, *_SETS, nn.Module, *GENERATORS)) or _is_table(part)


def _first(part: Any) -> Any:
    return next(iter(part.values() if isinstance(part, dict) else part), None)


def _is_data(item: Any, depth: int = _DEPTH) -> bool:
    """Return True for scalars, arrays, and nested collections of them, as far as their first items show."""
    if depth and isinstance(item, (dict, *_SEQUENCES)):
        return _is_data(_first(item), depth - 1)
    return isinstance(item, (*_SCALARS, *_ARRAYS))


def _is_table(part: Any) -> bool:
    library = type(part).__module__.partition(".")[0]
    marks = {"pandas": "iloc", "datasets": "with_format"}
    return library in marks and hasattr(part, marks[library]) and hasattr(type(part), "__len__")


def _digest(part: Any) -> Collection | None:
    """Return the digest of a collection; None if the object is none, or has fewer than two items."""
    is_collection = isinstance(part, (dict, *_SEQUENCES, *_SETS, *_ARRAYS)) or _is_table(part)
    if not is_collection or not _is_end(part) or not (items := _items(part)) or len(part) < 2:
        return None
    codes = [_code(item) for item in items]
    if isinstance(part, dict):  # A label map that was made from a set has the same keys and values in other pairs.
        return Collection(len(part), sum(codes), sum(_code(each) for item in items for each in item))
    return Collection(len(part), sum(codes) if isinstance(part, _SETS) else crc32(repr(codes).encode()), sum(codes))


def _items(part: Any) -> list[Any]:
    """Return items of a collection, spread evenly; none where they cannot be read cheaply."""
    if isinstance(part, _ARRAYS):
        return _rows(part, _ITEMS_ON_DISK if isinstance(part, np.memmap) else _ITEMS)
    if isinstance(part, (dict, *_SETS, deque)):
        items = part.items() if isinstance(part, dict) else part
        return list(islice(items, _ITEMS)) if len(part) <= _ITEMS or isinstance(part, (dict, deque)) else []
    on_disk = _is_table(part) and not hasattr(part, "iloc")
    positions = range(0, len(part), _stride(len(part), _ITEMS_ON_DISK if on_disk else _ITEMS))
    if on_disk:
        return list(part.with_format("arrow")[list(positions)].to_pylist()) if positions else []
    if hasattr(part, "iloc"):
        rows = part.iloc[positions]
        return list(zip(rows.index.tolist(), np.asarray(rows, object).tolist(), strict=True))
    return [part[position] for position in positions]


def _stride(length: int, most: int) -> int:
    return max(1, -(-length // most))


def _rows(part: torch.Tensor | np.ndarray[Any, Any], most: int) -> list[Any]:
    """Return rows of an array or a tensor, with some values of each; none of what has no plain storage."""
    if isinstance(part, torch.Tensor):
        has_values = part.layout is torch.strided and not (part.is_meta or part.is_nested or part.is_quantized)
        if not has_values or hasattr(part, "placements"):  # A DTensor differs between ranks on purpose.
            return []
        part = part.detach()
    if part.ndim == 0 or 0 in part.shape:
        return []
    strides = [_stride(part.shape[0], most), *(_stride(size, _VALUES) for size in part.shape[1:])]
    rows: Any = part[tuple(slice(None, None, stride) for stride in strides)]
    if isinstance(rows, torch.Tensor):
        rows = rows.cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    elif rows.dtype.hasobject:
        return rows.tolist()  # type: ignore[no-any-return]
    return [np.ascontiguousarray(row).tobytes() for row in rows]


def _code(item: Any) -> int:
    code = 0
    for piece in _bytes_of(item, _DEPTH):
        code = crc32(piece, code)
    return code


def _bytes_of(item: Any, depth: int) -> Iterator[bytes]:
    """Yield the bytes of an item of a collection; an object counts by its class and its attributes."""
    if isinstance(item, (str, os.PathLike)):
        yield "/".join(str(item).replace(os.sep, "/").rsplit("/", 2)[-2:]).encode(errors="surrogatepass")
    elif isinstance(item, _ARRAYS) and item.ndim:
        yield from pieces([str(item.dtype), *item.shape, *_rows(item, _FEW)])
    elif isinstance(item, (*_SCALARS, *_ARRAYS)):
        yield from pieces(item)
    elif depth:
        yield type(item).__name__.encode()
        held: Iterable[Any] = item if isinstance(item, (*_SEQUENCES, *_SETS)) else ()
        attributes = item if isinstance(item, dict) else getattr(item, "__dict__", {})
        for part in [*islice(held, _FEW), *islice(attributes.items(), _FEW)]:
            yield from _bytes_of(part, depth - 1)
