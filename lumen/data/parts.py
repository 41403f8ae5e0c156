"""Division of a batch into parts along its samples, and concatenation of the step outputs of the parts."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lumen.data.nested import iterate_tensors, map_leaves
from lumen.errors import ConfigError, DataError

_PLAIN = (str, bytes, int, float, complex, type(None))


def halve_spans(begin: int, end: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range of samples, none larger than `largest`, by repeated halving.

    Yields:
        The first sample of a part, and the sample after its last.
    """
    if end - begin <= largest:
        yield begin, end
        return
    middle = begin + (end - begin + 1) // 2
    yield from halve_spans(begin, middle, largest)
    yield from halve_spans(middle, end, largest)


def cut_batch(batch: Any, samples: int, begin: int, end: int) -> Any:
    """Return a part of a batch; its tensors are views.

    Tensors are sliced along dimension 0. Lists and tuples without tensors are sliced if they have one item per sample.
    Scalars are included in each part.

    Args:
        batch: Tensors and lists, in mappings, lists, tuples or dataclasses.
        samples: Number of samples in the whole batch.
        begin: First sample of the part.
        end: The sample after the last sample of the part.

    Raises:
        DataError: A tensor has a different size in dimension 0, or the place of the samples is unknown.
    """

    def part(leaf: Any) -> Any:
        return _cut_leaf(leaf, samples, slice(begin, end))

    def is_listed(data: Any) -> bool:
        return data is not batch and type(data) in (list, tuple) and len(data) == samples

    return map_leaves(batch, part, is_leaf=is_listed) if not _is_per_sample_list(batch, samples) else batch[begin:end]


def _is_per_sample_list(data: Any, size: int) -> bool:
    """Return True if a list has one item per sample, and no tensors."""
    return type(data) in (list, tuple) and len(data) == size and next(iterate_tensors(data), None) is None


def _cut_leaf(leaf: Any, samples: int, where: slice) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        if leaf.dim() == 0:
            return leaf
        if len(leaf) == samples:
            return leaf[where]
    elif isinstance(leaf, _PLAIN):
        return leaf
    elif _is_per_sample_list(leaf, samples):
        return leaf[where]
    raise DataError(
        f"a batch of {samples} samples does not fit into memory, and Lumen cannot halve the batch: the samples of "
        f"{_describe_value(leaf)} are unknown. Lumen divides tensors with the samples along dimension 0, and lists "
        "without tensors. Reduce batch_size of this loader."
    )


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int], *, averages: bool) -> Any:
    """Concatenate step outputs for the parts of a batch to the output for the whole batch.

    Args:
        outputs: Output of each part; tensors, or mappings, lists and tuples of tensors.
        sizes: Number of samples of each part.
        averages: True: a tensor without dimensions, or a float, is a mean over samples; False: it is an error.

    Raises:
        ConfigError: An output is not a tensor with the samples of its part along dimension 0.
    """
    first, kind = outputs[0], type(outputs[0])
    parts = list(zip(outputs, sizes, strict=True))
    if any(type(output) is not kind for output in outputs):
        raise _make_join_error(parts)
    if first is None:
        return None
    if kind is dict and all(output.keys() == first.keys() for output in outputs):
        return {key: join_outputs([output[key] for output in outputs], sizes, averages=averages) for key in first}
    if kind in (list, tuple):
        if all(_is_per_sample_list(output, size) for output, size in parts):
            return sum(outputs[1:], start=first)
        if all(len(output) == len(first) and next(iterate_tensors(output), None) is not None for output in outputs):
            return kind([join_outputs(items, sizes, averages=averages) for items in zip(*outputs, strict=True)])
    if isinstance(first, torch.Tensor):
        if all(output.shape == (size, *first.shape[1:]) for output, size in parts):
            return torch.cat(list(outputs))
        averages = averages and first.is_floating_point() and all(output.dim() == 0 for output in outputs)
    if averages and isinstance(first, (torch.Tensor, float)):
        return sum(output * (size / sum(sizes)) for output, size in parts)
    raise _make_join_error(parts)


def _make_join_error(parts: Sequence[tuple[Any, int]]) -> ConfigError:
    found = " and ".join(f"{_describe_value(output)} for {size}" for output, size in parts)
    return ConfigError(
        f"halve_on_oom: cannot join the step's outputs for the halves of a batch, {found} samples. Return tensors "
        "with the samples along dimension 0, or mappings, lists and tuples of them; or reduce batch_size of this "
        "loader."
    )


def _describe_value(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else reprlib.repr(value)
