"""An evaluation step that ran out of memory is made again for the halves of its batch."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

from lumen.data.parts import cut, joined
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.internals.memory import empty_device_cache, is_out_of_memory
from lumen.loop.around_step import unnoticed
from lumen.loop.parts_together import common_cuts, drop, keep_pace
from lumen.loop.step_in_parts import smaller
from lumen.metrics.torchmetrics_states import load_metric_state, metric_state, metrics_of
from lumen.random import GeneratorStates
from lumen.run.run import Run

if TYPE_CHECKING:
    from torchmetrics import Metric

_log = logging.getLogger("lumen")
_HINT = (
    "Trainer(halve_on_oom=True) evaluates a batch that does not fit in halves; a smaller batch_size of the evaluation "
    "loader gives the same values too."
)


class Halving(ABC):
    """Makes the steps of an evaluation, and again for parts of a batch where one runs out of memory.

    What the attempt has logged, added to metrics and drawn is put back first: values are those of smaller batches, and
    those of single steps the means of the parts'. What a step draws goes on from the key of its batch: the same in
    each run, but other numbers than for the whole batch. What a step keeps itself, in an attribute or a buffer, is not
    put back. A step must not communicate.

    Args:
        run: The run that evaluates.
        stage: "validate", "sanity", "test" or "predict".
        wanted: Somebody reads what the steps return.
    """

    def __init__(self, run: Run, stage: str, *, wanted: bool) -> None:
        self._run, self._wanted = run, wanted
        self._stage = "validate" if stage == "sanity" else stage
        self._metrics = list(metrics_of(run.task).values())

    @abstractmethod
    def evaluate(self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch, window: AccumulationWindow) -> Any:
        """Make a step for a batch.

        Args:
            step: Makes it, for the batch that it is given.
            batch: On the device.
            micro: Its micro-batch, with the number of its samples: the weight of its means.
            window: Where it comes from, which knows those of the other processes.

        Returns:
            What the step returned; of halves, put together along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of halves cannot be put together.
        """


@final
class Halves(Halving):
    """By this process alone: in halves, and halves of these."""

    def evaluate(self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch, window: AccumulationWindow) -> Any:
        """See `Halving.evaluate`."""
        try:
            return self._evaluate(step, batch, micro.samples, 0, micro.samples)
        finally:
            self._run.log.batch_samples = micro.samples

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, samples: int, begin: int, end: int) -> Any:
        size = self._run.log.batch_samples = end - begin
        if size <= self._run.loaders.fits.get(self._stage, size):
            put_back = mark_values(self._run, self._metrics)
            try:
                return step(batch if size == samples else cut(batch, samples, begin, end))
            except RuntimeError as error:
                fits = smaller(error, size)
            # behind the except clause: what the error held of the attempt is free only now
            put_back()
            empty_device_cache(self._run.strategy.device)
            keep(self._run, self._stage, fits)
        middle = begin + (size + 1) // 2
        halves = (begin, middle), (middle, end)
        outputs = [self._evaluate(step, batch, samples, *half) for half in halves]
        sizes = middle - begin, end - middle
        return joined(outputs, sizes, averages=self._stage != "predict") if self._wanted else None


@final
class HalvesTogether(Halving):
    """By all processes, which communicate in each forward: all make a batch again, in as many parts.

    A process that runs out of memory first goes through the rest of its batch with what fits, for nothing: the others
    wait for it in each unit. Then all learn of it.
    """

    def evaluate(self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch, window: AccumulationWindow) -> Any:
        """Make a step for a batch; see `Halving.evaluate`. Collective: every rank must call this, with a dummy too."""
        run, largest = self._run, window.largest(micro)
        while True:
            put_back, before = mark_values(run, self._metrics), run.loaders.fits.get(self._stage, 0)
            output, fits = self._attempt(step, batch, micro, common_cuts(micro, largest, before), before)
            (failures,) = run.processes.sum([float(fits != before)])
            run.log.batch_samples = micro.samples
            if not failures:
                return output
            put_back()
            drop(run, rejoins=False)
            keep(run, self._stage, min(size for size in run.processes.gather(fits) if size != before))

    def _attempt(
        self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch, pieces: list[tuple[int, int, bool]], fits: int
    ) -> tuple[Any, int]:
        """Make the parts of a batch. Returns what the step returned for them, and how many samples fit."""
        run, outputs, sizes, fitted = self._run, [], [], True
        for begin, end, is_dummy in pieces:
            size = run.log.batch_samples = end - begin
            part, rejoins = batch if size == micro.samples else cut(batch, micro.samples, begin, end), fitted
            if fitted:
                try:
                    with unnoticed(run) if is_dummy else nullcontext(), run.strategy.gradient_sync(False):
                        output = step(part)
                    if self._wanted and not is_dummy:
                        outputs.append(output)
                        sizes.append(size)
                except RuntimeError as error:
                    fits, fitted = smaller(error, size), False
            if not fitted:
                fits = keep_pace(run, partial(self._for_nothing, step, part, size), size, fits, rejoins=rejoins)
        if not outputs or not fitted:
            return None, fits
        return joined(outputs, sizes, averages=self._stage != "predict") if len(outputs) > 1 else outputs[0], fits

    def _for_nothing(self, step: Callable[[Any], Any], batch: Any, size: int, samples: int) -> None:
        with unnoticed(self._run), self._run.strategy.gradient_sync(False):
            step(cut(batch, size, 0, samples))


def mark_values(run: Run, metrics: Sequence[Metric]) -> Callable[[], None]:
    """Return what puts back what an evaluation step changes from here on."""
    logged, drawn = run.log.stage, GeneratorStates()
    assert logged is not None
    mark, states = logged.mark(), [(metric, metric_state(metric)) for metric in metrics]

    def put_back() -> None:
        logged.go_back(mark)
        drawn.restore()
        for metric, state in states:
            load_metric_state(metric, state)

    return put_back


def keep(run: Run, stage: str, fits: int) -> None:
    """Try no larger part of a batch again in this stage."""
    if not run.loaders.fits:
        _log.warning(
            "a batch of more than %d samples does not fit into memory: it is evaluated in halves, as later ones are. A "
            "smaller batch_size of the evaluation loader gives the same values",
            fits,
        )
    run.loaders.fits[stage] = fits


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """The context of an evaluation: where it runs out of memory, the error says what helps."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not run.plan.halve_on_oom:
            error.add_note(_HINT)
        raise
