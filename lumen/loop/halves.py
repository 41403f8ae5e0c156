"""An evaluation step that ran out of memory is made again for the halves of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from lumen.data.parts import cut, joined
from lumen.data.windows import MicroBatch
from lumen.internals.memory import empty_device_cache, is_out_of_memory
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


@final
class Halves:
    """Makes the steps of an evaluation, and again for halves of a batch where one runs out of memory.

    Lumen restores what the attempt has logged, added to metrics and drawn: values are those of smaller batches, and
    values of single steps are the means of the halves'. Random draws continue from the key of the batch: they are the
    same in each run, but differ from those of the whole batch. What a step keeps itself, in an attribute or a buffer,
    is not restored. A step must not communicate.

    Args:
        run: The run that evaluates.
        stage: "validate", "sanity", "test" or "predict".
        wanted: True if somebody reads what the steps return.
    """

    def __init__(self, run: Run, stage: str, *, wanted: bool) -> None:
        self._run, self._wanted = run, wanted
        self._stage = "validate" if stage == "sanity" else stage
        self._metrics = list(metrics_of(run.task).values())

    def evaluate(self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch) -> Any:
        """Make a step for a batch.

        Args:
            step: Makes the step, for the batch that it is given.
            batch: The batch on the device.
            micro: Its micro-batch, with the number of its samples: the weight of its means.

        Returns:
            What the step returned; outputs of halves are joined along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of halves cannot be joined.
        """
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
