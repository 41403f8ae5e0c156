"""Choice of the adapter for a user's loader."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lumen.console import logger as _log
from lumen.data.adapter import LoaderAdapter
from lumen.data.combined import CombinedAdapter, CombinedLoader, holds_loaders
from lumen.data.fingerprint import get_length
from lumen.data.iterable_style import IterableAdapter, ShardedIterableAdapter, depends_on_training, shards_itself
from lumen.data.map_style import MapStyleAdapter
from lumen.data.orders import Order, PlainOrder, SampledOrder
from lumen.data.windows import SINGLE_RANK, RankSlice
from lumen.errors import ConfigError, DataError
from lumen.internals.loaders import has_default_iter
from lumen.random import Domain, make_key


def adapt_loader(
    loader: Any,
    seed: int,
    accumulate: int = 1,
    global_batch_size: int | None = None,
    *,
    rewinds: bool = False,
    rank_slice: RankSlice = SINGLE_RANK,
) -> LoaderAdapter:
    """Return the adapter of a loader. Lumen controls the order of a standard `DataLoader` over map-style data.

    All other loaders are read in their own order.

    Args:
        loader: A `DataLoader`, any iterable of batches, a `CombinedLoader`, or a list or dictionary of loaders.
        seed: The run's seed, which keys everything random.
        accumulate: Micro-batches of an optimizer step, of all processes together.
        global_batch_size: Samples of an optimizer step; replaces `accumulate`.
        rewinds: True: every pass over iterable data with a state restarts where the first pass began, for evaluations.
        rank_slice: The part of each step that this process takes. Passes over several processes are collective: every
            rank must begin them, and read them to the same step.

    Raises:
        ConfigError: The batch size does not fit `global_batch_size`.
        DataError: `loader` cannot be iterated; or is one of several and gives each process a different part.
    """
    if holds_loaders(loader):
        loader = CombinedLoader(loader, "max_size_cycle")
    if isinstance(loader, CombinedLoader):
        if global_batch_size is not None:
            raise ConfigError(
                f"global_batch_size: {global_batch_size} is ambiguous for {len(loader.flattened)} training loaders. "
                "Set accumulate_grad_batches instead."
            )

        def adapt(part: Any, number: int) -> LoaderAdapter:
            _refuse_parts(part, rank_slice)
            part_slice = rank_slice._replace(needs_dummies=False, splits=False)  # Dummy batches combine all loaders.
            loader_seed = make_key(seed, Domain.LOADER, number)  # Two loaders over the same data get different orders.
            return adapt_loader(part, loader_seed, rewinds=rewinds, rank_slice=part_slice)

        return CombinedAdapter(loader, adapt, accumulate, rank_slice)
    if not hasattr(loader, "__iter__") or isinstance(loader, (str, bytes, torch.Tensor)):
        of_samples = " of it, as in DataLoader(data_set, batch_size=32)" if isinstance(loader, Dataset) else ""
        raise DataError(
            f"a loader is an iterable of batches, found {type(loader).__name__}. Return a DataLoader{of_samples}."
        )
    if _is_standard(loader):
        return MapStyleAdapter(
            loader, _make_order(loader, seed, accumulate, global_batch_size, rank_slice), seed, rank_slice
        )
    if isinstance(loader, DataLoader) and loader.num_workers and not loader.in_order:
        _log.warning("setting in_order=True on the DataLoader: ranks and resumed runs need batches in one order.")
        loader.in_order = True
    kind = ShardedIterableAdapter if shards_itself(loader, rank_slice.world_size) else IterableAdapter
    accumulate = _count_batches_per_step(loader, accumulate, global_batch_size, rank_slice)
    return kind(loader, seed, accumulate, rank_slice, rewinds=rewinds)


def _refuse_parts(loader: Any, rank_slice: RankSlice) -> None:
    if depends_on_training(loader):
        raise DataError(
            f"{type(getattr(loader, 'dataset', loader)).__name__} sets follows_training, but is one of several "
            "training loaders, which Lumen reads a step ahead. Combine the loaders into one loader."
        )
    if rank_slice.world_size > 1 and shards_itself(loader, rank_slice.world_size):
        raise DataError(
            f"{type(getattr(loader, 'dataset', loader)).__name__}, one of several training loaders, gives every "
            "process different batches, so Lumen cannot compare where the loaders end. Return all batches on every "
            "process (without shards_itself): Lumen keeps each process's share."
        )


def _is_standard(loader: Any) -> bool:
    """Return True if a loader only reads the samples that a sampler names from a map-style data set."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return has_default_iter(type(loader)) or _is_torchdata_class(type(loader))  # Lumen's position replaces its state.


def _is_torchdata_class(kind: type) -> bool:
    return kind.__module__.startswith("torchdata.stateful_dataloader.")


def _make_order(
    loader: DataLoader[Any], seed: int, accumulate: int, global_batch_size: int | None, rank_slice: RankSlice
) -> Order:
    """Return the order of samples that the loader's sampler or batch sampler defines."""
    sampler: Any = loader.sampler
    world = rank_slice.world_size
    batch_size, drop_last = loader.batch_size, loader.drop_last
    if batch_size is None and type(loader.batch_sampler) is BatchSampler:
        batches = loader.batch_sampler
        sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
    if batch_size is None:
        accumulate = _count_batches_per_step(loader, accumulate, global_batch_size, rank_slice)
        single = loader.batch_sampler is None
        source = sampler if single else loader.batch_sampler
        return SampledOrder(source, seed, batch_size=None, step_size=accumulate, drop_last=False, single=single)
    if global_batch_size is not None and global_batch_size < batch_size and not rank_slice.splits:
        raise ConfigError(
            f"global_batch_size: {global_batch_size} is smaller than the loader's batch_size {batch_size}. "
            "Lower batch_size."
        )
    step_size = global_batch_size or accumulate * batch_size
    if rank_slice.splits:
        batch_size = step_size
    else:
        _warn_of_idle_ranks(global_batch_size, -(-step_size // batch_size), world)
    batching = {"batch_size": batch_size, "step_size": step_size, "drop_last": drop_last}
    samples = get_length(loader.dataset)
    if _is_plain_distributed_sampler(sampler):  # Lumen distributes the samples itself.
        return PlainOrder(sampler.dataset, seed, shuffle=sampler.shuffle, **batching)  # type: ignore[arg-type]
    if samples is None and type(sampler) is SequentialSampler:
        raise DataError(
            f"{type(loader.dataset).__name__} has no length, and the loader has no sampler. Define a __len__ that "
            "returns an int, pass a sampler, or derive the data set from IterableDataset."
        )
    if not _is_plain_sampler(sampler, samples):
        return SampledOrder(sampler, seed, **batching)  # type: ignore[arg-type]
    generator = loader.generator or (sampler.generator if type(sampler) is RandomSampler else None)
    order_seed = seed if generator is None else generator.initial_seed()
    shuffle = type(sampler) is not SequentialSampler
    return PlainOrder(sampler.data_source, order_seed, shuffle=shuffle, **batching)  # type: ignore[arg-type]


def _is_plain_distributed_sampler(sampler: Any) -> bool:
    """Return True for a `DistributedSampler`, but False for a user's subclass with its own order."""
    kind = type(sampler)
    as_torch_does = kind.__iter__ is DistributedSampler.__iter__ or _is_torchdata_class(kind)
    return isinstance(sampler, DistributedSampler) and as_torch_does


def _is_plain_sampler(sampler: Any, samples: int | None) -> bool:
    """Return True if a sampler gives the data set's own order or a plain shuffle of it."""
    kind = type(sampler)
    shuffles = kind is RandomSampler or (_is_torchdata_class(kind) and kind.__name__ == "RandomSampler")
    if not (shuffles or kind is SequentialSampler) or getattr(sampler, "replacement", False):
        return False
    return samples is not None and get_length(sampler) == get_length(sampler.data_source) == samples


def _count_batches_per_step(loader: Any, accumulate: int, global_batch_size: int | None, rank_slice: RankSlice) -> int:
    """Return the batches of an optimizer step, for loaders whose batches cannot be divided."""
    if global_batch_size is None:
        return accumulate
    batch_size = getattr(loader, "batch_size", None)
    if not batch_size or global_batch_size % batch_size:
        raise ConfigError(
            f"global_batch_size: {global_batch_size} is not a multiple of the batch size {batch_size} of "
            f"{type(loader).__name__}, whose batches Lumen cannot divide. Set accumulate_grad_batches instead."
        )
    batches, world = global_batch_size // int(batch_size), rank_slice.world_size
    if rank_slice.splits and batches > world:
        raise ConfigError(
            f"global_batch_size: {global_batch_size} is {batches} batches of {type(loader).__name__}, but with manual "
            f"optimization a step has one batch of each process. Set batch_size to {global_batch_size // world}, or "
            "call step() of the optimizers only in every n-th batch."
        )
    _warn_of_idle_ranks(global_batch_size, batches, world)
    return batches


def _warn_of_idle_ranks(global_batch_size: int | None, micro_batches: int, world: int) -> None:
    if global_batch_size is not None and micro_batches % world:
        _log.warning(
            "global_batch_size: %d samples are %d micro-batches for %d processes, so some processes are idle in the "
"last round of every step. Choose a batch_size that gives a multiple of %d micro-batches.",
            global_batch_size, micro_batches, world, world,
        )  # fmt: skip
