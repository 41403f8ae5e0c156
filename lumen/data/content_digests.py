"""Digests of collections in a loader's data set, computed without reading a sample; ranks compare them."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from types import BuiltinFunctionType, CodeType, ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lumen.console import logger as _log
from lumen.data.combined import list_loaders
from lumen.data.generators import walk_objects
from lumen.data.iterable_style import shards_itself
from lumen.data.rank_checks import iterate_bytes
from lumen.data.windows import RankSlice
from lumen.errors import DataError
from lumen.random import GENERATORS

#: Limits: items of a collection that a digest reads (evenly spaced), nested items, items on a disk, collections.
_MAX_ITEMS, _MAX_NESTED_ITEMS, _MAX_SLOW_ITEMS, _COLLECTIONS = 16_384, 1024, 64, 1024
#: Limits: parts of an item, values per dimension of an array, characters of a text, nesting depth.
_FEW, _MAX_VALUES, _LONG_TEXT, _MAX_DEPTH = 64, 4, 256, 4
_DEVICE = re.compile(r"(cuda|cpu|mps|xpu)(:\d+)?")
_ARRAYS = (torch.Tensor, np.ndarray)
_SETS = (set, frozenset)
_SEQUENCES = (list, tuple, deque)
_SCALARS = (type(None), str, bytes, int, float, complex, np.generic, os.PathLike)
_ADVICE = (
    "Every process runs the whole script and draws its own random numbers. Call lumen.seed_everything(1) before "
    "data is split, shuffled or drawn. Sort unordered collections, as in sorted(os.listdir(path)) and "
    "sorted(set(names)), or set PYTHONHASHSEED=0 for sets. Leave sharding to Lumen: give every rank all samples, "
    "without split_dataset_by_node, shard() or [rank::world_size]."
)
_LEAVES = (
    *_SCALARS, bytearray, range, type, ModuleType, BuiltinFunctionType, CodeType, type(os.environ),
    torch.device, torch.dtype, np.dtype,
)  # fmt: skip


class Collection(NamedTuple):
    """Digest of a collection.

    Attributes:
        items: Number of items.
        ordered: Digest of the items in order; independent of the order for pairs of dictionaries, sets, deques and
            devices.
        unordered: Digest of the items in any order. For a label map: digest of keys and values in any pairing; None for
            other dictionaries.
        is_table: True for a dictionary, which may be a cache or a configuration, so small differences are harmless.
    """

    items: int
    ordered: int
    unordered: int | None
    is_table: bool = False


def check_same_data(rank_slice: RankSlice, sources: Mapping[str, Any]) -> None:
    """Raise if data sets differ between the ranks of a run. Collective: every rank must call this.

    Args:
        rank_slice: The rank of this process, the number of processes, and their communication.
        sources: The loaders by purpose, such as "training"; None: no loaders.

    Raises:
        DataError: A rank has different samples than rank 0, or a different order. The error is raised on every rank.
    """
    digests, lengths = dict[str, Collection](), set[int]()
    for purpose, source in sources.items():
        for number, (_, loader) in enumerate(list_loaders(source)):
            if not shards_itself(loader, rank_slice.world_size):
                found, found_lengths = digest_collections(loader)
                lengths |= found_lengths
                loader_name = f"{purpose} {number}" if number else purpose
                digests |= {f"{name} of the {loader_name}": each for name, each in found.items()}
    reports = rank_slice.gather_all((digests, lengths))
    first, lengths = reports[0][0], set().union(*(found_lengths for _, found_lengths in reports))
    for rank, (other, _) in enumerate(reports):
        for place in [name for name in other if first.get(name, other[name]) != other[name]]:
            one, two = first[place], other[place]
            is_reordered = one.unordered is not None and (one.items, one.unordered) == (two.items, two.unordered)
            difference = f"rank {rank} and rank 0 hold different data: {place} has "
            difference += f"the same {one.items} items in a different order" if is_reordered else (
                f"{two.items} items on rank {rank}, {one.items} on rank 0, with different values"
            )  # fmt: skip
            is_enumerated = {one.items, two.items} & lengths and not (one.is_table and one.items != two.items)
            if is_reordered or is_enumerated:
                raise DataError(f"{difference}. {_ADVICE}")
            if not one.is_table:
                _log.warning("%s. Samples that depend on this collection differ from a run on one process.", difference)


def digest_collections(loader: Any) -> tuple[dict[str, Collection], set[int]]:
    """Return a digest of each collection in a loader's data set, samplers and collate function.

    The digests cover lists, tuples, dictionaries, sets, arrays, tensors, tables of pandas and data sets of Hugging
    Face; of large collections up to 16,384 items. Paths count without their common folder, since ranks may have copies
    of the data in different places.

    Args:
        loader: A `DataLoader`, or any iterable of batches.

    Returns:
        The digests by the place of the collection, such as `dataset.indices`; and the lengths of all data sets found.
    """
    names = ("dataset", "sampler", "batch_sampler", "collate_fn")
    roots = {name: part for name in names if (part := getattr(loader, name, None)) is not None} or {"loader": loader}
    found, lengths = dict[str, Collection](), set[int]()
    for place, part in walk_objects(roots, _ends_walk, _LEAVES):
        if place in ("dataset", "sampler", "loader") or isinstance(part, Dataset):
            with suppress(Exception):
                lengths.add(len(part))
        with suppress(Exception):  # Collections that raise when read are not compared.
            if (digest := _digest_collection(part)) is not None:
                found[place] = digest
        if len(found) == _COLLECTIONS:
            break
    return found, lengths


def _ends_walk(part: Any) -> bool:
    """Return True for a collection that is digested as a whole, a module, a generator, or an unreadable object."""
    try:
        return isinstance(part, (nn.Module, *GENERATORS)) or _is_collection(part)
    except Exception:  # A class of the user may raise any error when iterated.
        return True


def _is_collection(part: Any) -> bool:
    """Return True for a collection that is digested as a whole."""
    if isinstance(part, (dict, *_SEQUENCES)):
        first = _get_first(part)
        is_few_arrays = isinstance(first, _ARRAYS) and len(part) <= _FEW and not isinstance(part, dict)
        return _is_data(first) and not is_few_arrays  # A few arrays are, for example, the tensors of a TensorDataset.
    return isinstance(part, (*_ARRAYS, *_SETS)) or _is_table(part)


def _get_first(part: Any) -> Any:
    return next(iter(part.values() if isinstance(part, dict) else part), None)


def _is_data(item: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return True for scalars, arrays, records, and nested collections of them, judged by first items."""
    if depth and isinstance(item, (dict, *_SEQUENCES)):
        return _is_data(_get_first(item), depth - 1)
    return isinstance(item, (*_SCALARS, *_ARRAYS)) or is_dataclass(item)


def _is_table(part: Any) -> bool:
    library = type(part).__module__.partition(".")[0]
    marks = {"pandas": "iloc", "datasets": "with_format"}
    return library in marks and hasattr(part, marks[library]) and hasattr(type(part), "__len__")


def _digest_collection(part: Any) -> Collection | None:
    """Return the digest of a collection; None for other objects, for fewer than two items, and for caches with gaps."""
    if (
        not _is_collection(part)
        or not (items := _sample_items(part))
        or len(part) < 2
        or any(each is None for each in items)
    ):
        return None
    folder = _find_common_folder(items)
    codes = [_hash_item(item, folder) for item in items]
    if isinstance(part, dict):
        is_label_map = {*part.values()} == {*range(len(part))} if isinstance(_get_first(part), int) else False
        mixed = sum(_hash_item(each, folder) for item in items for each in item) if is_label_map else None
        return Collection(len(part), sum(codes), mixed, is_table=True)
    has_order = not isinstance(part, (deque, *_SETS)) and not _DEVICE.fullmatch(str(items[0]))
    return Collection(len(part), crc32(repr(codes).encode()) if has_order else sum(codes), sum(codes))


def _sample_items(part: Any) -> list[Any]:
    """Return evenly spaced items of a collection; an empty list if they cannot be read cheaply."""
    if isinstance(part, _ARRAYS):
        return _sample_rows(part, _MAX_SLOW_ITEMS if isinstance(part, np.memmap) else _MAX_ITEMS)
    if isinstance(part, (dict, *_SETS, deque)):
        items = part.items() if isinstance(part, dict) else part
        return list(islice(items, _MAX_ITEMS)) if len(part) <= _MAX_ITEMS or isinstance(part, (dict, deque)) else []
    is_on_disk = _is_table(part) and not hasattr(part, "iloc")
    is_nested = isinstance(part, _SEQUENCES) and not isinstance(_get_first(part), _SCALARS)
    most = _MAX_SLOW_ITEMS if is_on_disk else _MAX_NESTED_ITEMS if is_nested else _MAX_ITEMS
    positions = range(0, len(part), _compute_stride(len(part), most))
    if is_on_disk:
        return list(part.with_format("arrow")[list(positions)].to_pylist()) if positions else []
    if hasattr(part, "iloc"):
        rows = part.iloc[positions] if part.ndim == 1 else part.iloc[positions, :_FEW]
        return list(zip(rows.index.tolist(), np.asarray(rows, object).tolist(), strict=True))
    return [part[position] for position in positions]


def _compute_stride(length: int, most: int) -> int:
    return max(1, -(-length // most))


def _sample_rows(part: torch.Tensor | np.ndarray[Any, Any], most: int) -> list[Any]:
    """Return rows of an array or a tensor, with some values of each; an empty list without plain storage."""
    if isinstance(part, torch.Tensor):
        has_values = part.layout is torch.strided and not (part.is_meta or part.is_nested or part.is_quantized)
        if not has_values or hasattr(part, "placements"):  # The shards of a DTensor always differ between ranks.
            return []
        part = part.detach()
    if part.ndim == 0 or 0 in part.shape:
        return []
    strides = [_compute_stride(part.shape[0], most), *(_compute_stride(size, _MAX_VALUES) for size in part.shape[1:])]
    rows: Any = part[tuple(slice(None, None, stride) for stride in strides)]
    if isinstance(rows, torch.Tensor):
        rows = rows.cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    elif rows.dtype.hasobject:
        return rows.tolist()  # type: ignore[no-any-return]
    return [np.ascontiguousarray(row).tobytes() for row in rows]


def _find_common_folder(items: list[Any]) -> str:
    """Return the common folder of all paths among the items, with its slash; "" without a common folder."""
    strings = [each for item in items for each in (item if isinstance(item, tuple) else (item,))]
    paths = [os.fspath(each) for each in strings if isinstance(each, (str, os.PathLike)) and os.sep in str(each)]
    with suppress(ValueError):  # Some are absolute and some relative.
        if paths and (shared := os.path.commonpath([os.path.dirname(path) for path in paths])):
            return shared.rstrip(os.sep) + os.sep
    return ""


def _hash_item(item: Any, folder: str) -> int:
    code = 0
    for piece in islice(_iterate_bytes(item, folder, _MAX_DEPTH), _FEW):
        code = crc32(piece, code)
    return code


def _iterate_bytes(item: Any, folder: str, depth: int) -> Iterator[bytes]:
    """Yield the bytes of an item of a collection; an object counts by its class and its attributes."""
    if isinstance(item, (str, os.PathLike)):
        yield str(item).removeprefix(folder)[:_LONG_TEXT].encode(errors="surrogatepass")
    elif isinstance(item, (bytes, bytearray)):
        yield b"%d" % len(item) + item[:_LONG_TEXT] + item[-_LONG_TEXT:]
    elif isinstance(item, _ARRAYS) and item.ndim:
        yield from iterate_bytes([str(item.dtype), *item.shape, *_sample_rows(item, _FEW // 2)])
    elif isinstance(item, (*_SCALARS, *_ARRAYS)):
        yield from iterate_bytes(item)
    elif depth:
        yield type(item).__name__.encode()
        if isinstance(item, _SETS):
            yield b"%d" % sum(_hash_item(part, folder) for part in item)
        elif isinstance(item, _SEQUENCES):
            for part in islice(item, _FEW):
                yield from _iterate_bytes(part, folder, depth - 1)
        else:
            attributes = item if isinstance(item, dict) else getattr(item, "__dict__", {})
            yield b"%d" % sum(_hash_item(pair, folder) for pair in islice(attributes.items(), _FEW))
