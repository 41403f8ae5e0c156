"""Data set whose random numbers depend only on (seed, epoch, sample); samples are seeded once one of them draws."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from ctypes import c_bool
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from lumen.data.fingerprint import get_length
from lumen.data.generators import KeptGenerators
from lumen.errors import DataError
from lumen.internals.generator_memory import MEMORIES
from lumen.internals.loaders import has_default_collate
from lumen.random import Domain, make_key, seed_unless_unused, watch_generators

watch_generators(MEMORIES)


class BatchRequest(NamedTuple):
    """Request for one micro-batch, with everything that its samples and their random numbers depend on.

    Attributes:
        epoch: Key of the epoch, see `Position.get_order_key`.
        start: Position of the first sample in the epoch's order, from 0.
        indices: Indices into the data set: an int64 array of shape (samples,), or a list of any keys that it accepts.
        by_place: True if an index may occur twice in an epoch, so position instead of index keys the random numbers.
    """

    epoch: int
    start: int
    indices: Sequence[Any] | np.ndarray[Any, Any]
    by_place: bool

    def split(self, parts: int) -> list[BatchRequest]:
        """Return the same samples in at most `parts` parts of equal size; the last part may be smaller."""
        size = -(-len(self.indices) // parts)
        places = range(0, len(self.indices), size)
        return [self._replace(start=self.start + at, indices=self.indices[at : at + size]) for at in places]

    def __reduce__(self) -> tuple[Callable[..., BatchRequest], tuple[Any, ...]]:
        """Pickle the indices as bytes for a worker, which is three times as fast as numpy's pickling."""
        epoch, start, indices, by_place = self
        if isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.ndim == 1:
            return _unpickle_request, (epoch, start, indices.tobytes(), by_place)
        return BatchRequest, (epoch, start, indices, by_place)


def _unpickle_request(epoch: int, start: int, indices: bytes, by_place: bool) -> BatchRequest:
    writable = np.frombuffer(indices, np.int64).copy()  # Torch needs writable memory.
    return BatchRequest(epoch, start, writable, by_place)


def can_use_random_numbers(dataset: Any) -> bool:
    """Return False for a data set of tensors, which uses no random numbers."""
    dataset = _unwrap_subsets(dataset)
    if type(dataset) is ConcatDataset:
        return any(can_use_random_numbers(part) for part in dataset.datasets)
    return type(dataset) is not TensorDataset


def _unwrap_subsets(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


@final
class SeededDataset(Dataset[Any]):
    """Data set of whole micro-batches, with the generators seeded for each sample and then for the collate function.

    Seeding takes longer than reading most samples, and most data sets draw no random numbers. A batch is therefore
    first loaded without seeds, from an unused state of the generators. If the state is unchanged afterwards, seeds
    would not have changed the batch. The first batch that draws is loaded again with seeds, and all later batches are
    seeded.

    Rows of a `TensorDataset` are indexed at once; the result is bitwise identical to stacking single rows.

    Args:
        dataset: The user's map-style data set.
        collate: The loader's collate function; with `single` it converts one sample.
        seed: The run's seed, which keys everything random.
        single: True if the loader has `batch_size=None`, so every item is one sample.

    Attributes:
        should_watch: True if the next batch is the first of a pass, before which the search for generators is repeated.
        kept_generators: The random generators inside the data set and the collate function.
        is_seeded: True if samples are seeded, or a whole batch is.
        has_drawn: Shared flag, True once samples have drawn in this process or a worker.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int, *, single: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.may_draw = can_use_random_numbers(dataset)
        self.collate, self.single = collate, single
        self.uses_default_collate = collate is default_collate and not single
        self.keys_collate = self.may_draw or not self.uses_default_collate
        roots = {"dataset": dataset} if self.may_draw else {}
        self.kept_generators = KeptGenerators(roots | ({} if collate is default_collate else {"collate_fn": collate}))
        # Torch reads single items one by one. `__getitems__` of a `Subset` counts if its data set has this method.
        takes_one = single or (self.may_draw and not hasattr(_unwrap_subsets(dataset), "__getitems__"))
        self.fetch_samples = None if takes_one else getattr(dataset, "__getitems__", None)
        self.has_rows = self.uses_default_collate and type(_unwrap_subsets(dataset)) is TensorDataset
        self.is_seeded = not self.may_draw or self.fetch_samples is not None  # One seed per batch costs little.
        self.has_drawn = c_bool(False)
        self.should_watch, self._is_first = self.keys_collate, False

    def __getitem__(self, request: BatchRequest) -> Any:
        """Return the requested single sample, if the loader has `batch_size=None`."""
        return self.__getitems__(request)

    def __getitems__(self, request: BatchRequest) -> Any:
        """Return the requested micro-batch.

        Raises:
            DataError: The data set has become shorter, the sampler gives an index out of range, or fetching raised
                StopIteration.
        """
        try:
            if self.should_watch:
                return self._make_first_batch(request)
            if self.has_rows and (rows := take_rows(self.dataset, request.indices)) is not None:
                return rows
            return self._make_batch(request)
        except (IndexError, StopIteration) as error:
            self._explain_error(request, error)
            raise

    def _make_first_batch(self, request: BatchRequest) -> Any:
        """Load the first batch of a pass; load it again with seeds if loading created generators."""
        self.should_watch, self._is_first = False, True
        self._find_generators()
        made = self._make_batch(request)
        self._is_first = False
        return self._make_batch(request) if self._find_generators() else made

    def _find_generators(self) -> bool:
        """Search for generators, and for code that may draw unseen. Return True if there is more than before."""
        has_new = self.kept_generators.refresh()
        self.is_seeded |= bool(self.kept_generators.generators) or self.kept_generators.may_restore
        return has_new

    def _explain_error(self, request: BatchRequest, error: IndexError | StopIteration) -> None:
        if isinstance(error, StopIteration):
            raise make_early_end_error(
                self.dataset, f"at the samples {', '.join(map(str, request.indices[:8]))}"
            ) from error
        length = get_length(self.dataset)
        beyond = [index for index in request.indices if isinstance(index, (int, np.integer)) and index >= (length or 0)]
        if length is not None and beyond:
            raise DataError(
                f"this epoch needs sample {beyond[0]}, but {type(self.dataset).__name__} has only {length} samples. "
                "The data set became shorter in the middle of the epoch, or its sampler gives larger indices. "
                "Change a data set only in on_train_epoch_end or on_train_epoch_start."
            ) from error

    def _make_batch(self, request: BatchRequest) -> Any:
        indices = request.indices.tolist() if isinstance(request.indices, np.ndarray) else request.indices
        collate_words = self.seed, Domain.COLLATE, request.epoch, request.start
        if not self.is_seeded:
            unused = seed_unless_unused(*collate_words)
            try:
                samples = self._take_samples(request, indices, seeded=False)
                batch = self._collate_samples(samples) if self.uses_default_collate else None
            except Exception:
                if unused.is_unchanged():
                    raise
            else:
                if unused.is_unchanged():
                    if self.uses_default_collate:
                        return batch
                    self.kept_generators.seed_function(make_key(*collate_words))
                    return self._collate_samples(samples)
            self.is_seeded = self.has_drawn.value = True
            if self._is_first:
                self.kept_generators.refresh()
        if self.fetch_samples is not None:
            if self.may_draw:
                self.kept_generators.seed_function(make_key(self.seed, Domain.SAMPLE, request.epoch, request.start))
            samples = self.fetch_samples(indices)
        else:
            samples = self._take_samples(request, indices, seeded=self.may_draw)
        if self.keys_collate:
            self.kept_generators.seed_function(make_key(*collate_words))
        return self._collate_samples(samples)

    def _collate_samples(self, samples: list[Any]) -> Any:
        if self.single:
            return self.collate(samples[0])
        return (self.uses_default_collate and stack_samples(samples)) or self.collate(samples)

    def _take_samples(self, request: BatchRequest, indices: Sequence[Any], *, seeded: bool) -> list[Any]:
        dataset, samples, rest = self.dataset, [], iter(indices)
        try:
            if not seeded:
                return [dataset[index] for index in rest]
            for place, index in enumerate(rest, request.start):
                key = place if request.by_place else index
                self.kept_generators.seed_function(make_key(self.seed, Domain.SAMPLE, request.epoch, key))
                samples.append(dataset[index])
            return samples
        except Exception as error:
            index = indices[len(indices) - operator.length_hint(rest) - 1]
            error.add_note(f"It was raised for sample {index} of {type(dataset).__name__}.")
            raise


def make_early_end_error(data: Any, where: str) -> DataError:
    """Return the error for a StopIteration in user code, which Python would treat as the end of the data.

    Args:
        data: The data set that raised it, or whose collate function did.
        where: Words for the message, such as "in its collate function".
    """
    return DataError(
        f"{type(data).__name__} raised StopIteration {where}, in the middle of the data. The cause is next() on an "
        "iterator that has ended; the traceback shows the line. Give next() a default, or end the data set where "
        "the iterator ends."
    )


def _is_plain_tensor(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested


def stack_samples(samples: list[Any]) -> list[torch.Tensor] | None:
    """Collate tuples of tensors and ints like `default_collate`, in two thirds of its time; None for other samples."""
    first = samples[0]
    if type(first) is not tuple or get_worker_info() is not None:  # Workers must stack into shared memory.
        return None
    for part in first:
        if type(part) is not int and not _is_plain_tensor(part):
            return None
    if not has_default_collate():
        return None
    try:
        columns = list(zip(*samples, strict=True))
    except (TypeError, ValueError):
        return None
    return [
        torch.tensor(column) if type(part) is int else torch.stack(column)
        for part, column in zip(first, columns, strict=True)
    ]


def take_rows(dataset: Any, indices: Any) -> list[torch.Tensor] | None:
    """Collate rows of a `TensorDataset` or a `Subset` of it like `default_collate`, with one indexing call per tensor.

    Returns:
        One tensor of shape (samples, ...) for each tensor of the data set; None if the result might differ.
    """
    try:
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        in_range = type(indices) is np.ndarray  # True for indices of Lumen's orders; others may be negative.
        rows = torch.from_numpy(indices) if in_range else torch.tensor([operator.index(index) for index in indices])
    except TypeError:
        return None
    tensors = dataset.tensors
    for each in tensors:
        if not (_is_plain_tensor(each) and each.is_cpu and each.is_contiguous()):
            return None
    if not has_default_collate():
        return None
    try:
        return [tensor.index_select(0, rows) if in_range else tensor[rows] for tensor in tensors]
    except NotImplementedError:  # for this dtype
        return None
