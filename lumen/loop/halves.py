"""An evaluation step that ran out of memory is made again for the halves of its batch."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from lumen.data.nested import convert, tensors
from lumen.errors import ConfigError, DataError
from lumen.internals.tensors import empty_device_cache
from lumen.metrics.torchmetrics_states import load_metric_state, metric_state, metrics_of
from lumen.random import GeneratorStates
from lumen.run.run import Run

_log = logging.getLogger("lumen")
_PLAIN = (str, bytes, int, float, complex, type(None))
_HINT = (
    "Trainer(halve_on_oom=True) evaluates a batch that does not fit in halves; a smaller batch_size of the evaluation "
    "loader gives the same values too."
)


@final
class Halves:
    """Makes the steps of an evaluation, and again for the halves of a batch where one runs out of memory.

    What the attempt has logged, added to metrics and drawn is put back first: values are those of smaller batches, and
    those of single steps the means of the halves'. What a step draws goes on from the key of its batch: the same in
    each run, but other numbers than for the whole batch. What a step keeps itself, in an attribute or a buffer, is not
    put back. A step must not communicate.

    Args:
        run: The run that evaluates.
        stage: "validate", "sanity", "test" or "predict".
        wanted: Somebody reads what the steps return.
    """

    def __init__(self, run: Run, stage: str, *, wanted: bool) -> None:
        self._run, self._wanted = run, wanted
        self._averages = stage != "predict"
        self._metrics = list(metrics_of(run.task).values())

    def evaluate(self, step: Callable[[Any], Any], batch: Any, samples: int) -> Any:
        """Make a step for a batch.

        Args:
            step: Makes it, for the batch that it is given.
            batch: On the device.
            samples: In the batch: the weight of its means.

        Returns:
            What the step returned; of halves, put together along dimension 0.

        Raises:
            torch.OutOfMemoryError: A single sample does not fit.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of halves cannot be put together.
        """
        try:
            return self._evaluate(step, batch, samples, 0, samples)
        finally:
            self._run.log.batch_samples = samples

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, samples: int, begin: int, end: int) -> Any:
        size = self._run.log.batch_samples = end - begin
        put_back = self._mark()
        try:
            return step(batch if size == samples else cut(batch, samples, begin, end))
        except torch.OutOfMemoryError as error:
            if size < 2:
                error.add_note("A batch of one sample does not fit, so it cannot be halved any further.")
                raise
        # behind the except clause: what the error held of the attempt is free only now
        put_back()
        empty_device_cache(self._run.strategy.device)
        self._say(size)
        middle = begin + (size + 1) // 2
        halves = (begin, middle), (middle, end)
        outputs = [self._evaluate(step, batch, samples, *half) for half in halves]
        sizes = middle - begin, end - middle
        return joined(outputs, sizes, averages=self._averages) if self._wanted else None

    def _mark(self) -> Callable[[], None]:
        """Return what puts back what a step changes from here on."""
        logged, drawn = self._run.log.stage, GeneratorStates()
        assert logged is not None
        mark, states = logged.mark(), [(metric, metric_state(metric)) for metric in self._metrics]

        def put_back() -> None:
            logged.go_back(mark)
            drawn.restore()
            for metric, state in states:
                load_metric_state(metric, state)

        return put_back

    def _say(self, samples: int) -> None:
        if not self._run.loaders.too_large:
            _log.warning(
                "a batch of %d samples does not fit into memory: it is evaluated in halves, as later ones are. A "
                "smaller batch_size of the evaluation loader saves the attempts and gives the same values",
                samples,
            )
        self._run.loaders.too_large = True


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """The context of an evaluation: where it runs out of memory, the error says what helps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not run.plan.halve_on_oom:
            error.add_note(_HINT)
        raise


def cut(batch: Any, samples: int, begin: int, end: int) -> Any:
    """A part of a batch; its tensors are views.

    Tensors are cut along dimension 0, and lists and tuples without tensors that have an item for each sample. What has
    no dimension is in each part.

    Args:
        batch: Tensors and lists, in mappings, lists, tuples or dataclasses.
        samples: How many the whole batch has.
        begin: First sample of the part.
        end: The sample after its last one.

    Raises:
        DataError: A tensor has another size in dimension 0; or it is not known where the samples are.
    """

    def part(leaf: Any) -> Any:
        return _part(leaf, samples, slice(begin, end))

    def is_listed(data: Any) -> bool:
        return data is not batch and type(data) in (list, tuple) and len(data) == samples

    return convert(batch, part, is_leaf=is_listed) if not _is_row(batch, samples) else batch[begin:end]


def _is_row(data: Any, size: int) -> bool:
    """Whether a list has an item for each sample, and no tensors."""
    return type(data) in (list, tuple) and len(data) == size and next(tensors(data), None) is None


def _part(leaf: Any, samples: int, where: slice) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        if leaf.dim() == 0:
            return leaf
        if len(leaf) == samples:
            return leaf[where]
    elif isinstance(leaf, _PLAIN):
        return leaf
    elif _is_row(leaf, samples):
        return leaf[where]
    raise DataError(
        f"a batch of {samples} samples does not fit into memory, and cannot be halved: where its samples are is not "
        f"known of {_described(leaf)}; only tensors that have them along dimension 0 can be cut, and lists without "
        "tensors. Make batch_size of the evaluation loader smaller."
    )


def joined(outputs: Sequence[Any], sizes: Sequence[int], *, averages: bool) -> Any:
    """What steps returned for the parts of a batch, as one step would have for all of it.

    Args:
        outputs: Of each part; tensors, or mappings, lists and tuples of tensors.
        sizes: Samples of each part.
        averages: A tensor without dimensions, or a float, is a mean over samples; else it is an error.

    Raises:
        ConfigError: Something is no tensor with the samples of its part along dimension 0.
    """
    first, kind = outputs[0], type(outputs[0])
    parts = list(zip(outputs, sizes, strict=True))
    if any(type(output) is not kind for output in outputs):
        raise _not_joined(parts)
    if first is None:
        return None
    if kind is dict and all(output.keys() == first.keys() for output in outputs):
        return {key: joined([output[key] for output in outputs], sizes, averages=averages) for key in first}
    if kind in (list, tuple):
        if all(_is_row(output, size) for output, size in parts):
            return sum(outputs[1:], start=first)
        if all(len(output) == len(first) and next(tensors(output), None) is not None for output in outputs):
            return kind([joined(items, sizes, averages=averages) for items in zip(*outputs, strict=True)])
    if isinstance(first, torch.Tensor):
        if all(output.shape == (size, *first.shape[1:]) for output, size in parts):
            return torch.cat(list(outputs))
        averages = averages and first.is_floating_point() and all(output.dim() == 0 for output in outputs)
    if averages and isinstance(first, (torch.Tensor, float)):
        return sum(output * (size / sum(sizes)) for output, size in parts)
    raise _not_joined(parts)


def _not_joined(parts: Sequence[tuple[Any, int]]) -> ConfigError:
    found = " and ".join(f"{_described(output)} for {size}" for output, size in parts)
    return ConfigError(
        f"halve_on_oom: the step returned, for halves of a batch, {found} samples, which cannot be put together. "
        "Return tensors with the samples along dimension 0, or mappings, lists and tuples of them; or make batch_size "
        "of the evaluation loader smaller."
    )


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else reprlib.repr(value)
