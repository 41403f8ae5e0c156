"""An evaluation step that ran out of memory is made again for the halves of its batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from lumen.data.parts import cut, joined
from lumen.internals.memory import empty_device_cache, is_out_of_memory
from lumen.metrics.torchmetrics_states import load_metric_state, metric_state, metrics_of
from lumen.random import GeneratorStates
from lumen.run.run import Run

_log = logging.getLogger("lumen")
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
        self._stage = "validate" if stage == "sanity" else stage
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
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of halves cannot be put together.
        """
        try:
            return self._evaluate(step, batch, samples, 0, samples)
        finally:
            self._run.log.batch_samples = samples

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, samples: int, begin: int, end: int) -> Any:
        size = self._run.log.batch_samples = end - begin
        if size <= self._run.loaders.fits.get(self._stage, size):
            put_back = self._mark()
            try:
                return step(batch if size == samples else cut(batch, samples, begin, end))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if size < 2:
                    error.add_note("A batch of one sample does not fit, so it cannot be halved any further.")
                    raise
            # behind the except clause: what the error held of the attempt is free only now
            put_back()
            empty_device_cache(self._run.strategy.device)
            self._keep(size)
        middle = begin + (size + 1) // 2
        halves = (begin, middle), (middle, end)
        outputs = [self._evaluate(step, batch, samples, *half) for half in halves]
        sizes = middle - begin, end - middle
        return joined(outputs, sizes, averages=self._stage != "predict") if self._wanted else None

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

    def _keep(self, samples: int) -> None:
        """Try no batch again that is as large as this one, which does not fit."""
        fits = self._run.loaders.fits
        if not fits:
            _log.warning(
                "a batch of %d samples does not fit into memory: it is evaluated in halves, as later ones are. A "
                "smaller batch_size of the evaluation loader gives the same values",
                samples,
            )
        fits[self._stage] = (samples + 1) // 2


@contextmanager
def explained(run: Run) -> Iterator[None]:
    """The context of an evaluation: where it runs out of memory, the error says what helps."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not run.plan.halve_on_oom:
            error.add_note(_HINT)
        raise
