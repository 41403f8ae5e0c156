"""A micro-batch that does not fit into memory is made in parts, whose gradients sum to its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

from torch import nn

from lumen.data.nested import detached
from lumen.data.parts import cut, joined, spans
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import ConfigError
from lumen.internals.memory import drop_failed_backward, empty_device_cache, is_out_of_memory
from lumen.loop.around_step import mark, unnoticed
from lumen.loop.micro_batch import accumulate
from lumen.random import GeneratorStates
from lumen.run.run import Run
from lumen.task.step_output import read_output

_log = logging.getLogger("lumen")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HINT = (
    "Trainer(halve_on_oom=True) makes a micro-batch that does not fit in halves, with the gradient of the whole; a "
    "smaller batch_size with the same global_batch_size does so too."
)
_TOGETHER = (
    "halve_on_oom: {why}, so none can make one again alone. Leave it out, and make batch_size of the training loader "
    "smaller; global_batch_size keeps what a step is."
)


@final
class StepInParts:
    """Makes the micro-batches of one step, and again in parts where memory does not suffice.

    What an attempt has logged, added to metrics, drawn and moved in buffers is put back; the gradients of the step so
    far are made again, unnoticed. That is between a process and itself: processes communicate gradients after the last
    backward, not in it, and tell each other there what has fitted, for all steps after.

    Args:
        run: The run that trains.
        window: The micro-batches of the step.
    """

    def __init__(self, run: Run, window: AccumulationWindow) -> None:
        self._run, self._window = run, window
        self._wanted = bool(run.hooks.on_train_batch_end)
        self._made: list[tuple[MicroBatch, Any, GeneratorStates]] = []

    def accumulate(self, micro: MicroBatch, batch: Any) -> Any:
        """Add the gradient of a micro-batch; of the last one communicate them.

        Returns:
            What `training_step` returned; of parts, put together along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of parts cannot be put together.
        """
        output = None
        if not micro.is_dummy:
            self._made.append((micro, batch, GeneratorStates()))
            output = self._make(micro, batch)
            self._run.log.batch_samples = micro.samples
        if micro.last:
            accumulate(self._run, micro.end(), None, self._run.step.weighting)
        return output

    def _make(self, micro: MicroBatch, batch: Any) -> Any:
        """Add the gradient of the newest micro-batch, in parts as large as fit."""
        run, largest = self._run, micro.samples
        logged, weighting, again = run.log.stage, run.step.weighting, False
        assert logged is not None
        while True:
            before, counted, put_back = logged.mark(), weighting.mark(), mark(run)
            try:
                if again:
                    self._make_again(self._made[:-1])
                    self._made[-1][-1].restore()
                return self._in_parts(micro, batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                largest = min(run.step.fits or largest, largest)
                if largest < 2:
                    error.add_note("One sample does not fit, so it cannot be halved any further.")
                    raise
            # behind the except clause: what the error held of the attempt is free only now, and the loss with its graph
            run.step.loss = None
            again, run.step.fits = True, (largest + 1) // 2
            logged.go_back(before)
            put_back()
            weighting.go_back(counted)
            drop_failed_backward()
            empty_device_cache(run.strategy.device)

    def _make_again(self, made: Sequence[tuple[MicroBatch, Any, GeneratorStates]]) -> None:
        """Make the gradients of micro-batches that are counted already, and no others."""
        run, weighting = self._run, self._run.step.weighting
        run.optim.zero_grad(run.progress.epoch, self._window.first_index)
        for micro, batch, states in made:
            counted = weighting.mark()
            states.restore()
            with unnoticed(run):
                self._in_parts(micro, batch, check=False)
            weighting.go_back(counted)

    def _in_parts(self, micro: MicroBatch, batch: Any, *, check: bool = True) -> Any:
        run, samples = self._run, micro.samples
        parts = [*spans(0, samples, run.step.fits or samples)]
        outputs, sizes = [], []
        for begin, end in parts:
            of_part, weight = batch, micro.weight
            if len(parts) > 1:
                of_part, weight = cut(batch, samples, begin, end), self._weight(micro, begin, end)
            run.log.batch_samples = end - begin
            part = micro.part(end - begin, weight)
            output, _ = accumulate(run, part, of_part, run.step.weighting, check=check)
            if self._wanted and output is not None:
                outputs.append(detached(output))
                sizes.append(end - begin)
        return _joined(outputs, sizes) if outputs else None

    def _weight(self, micro: MicroBatch, begin: int, end: int) -> float:
        if not self._run.step.weighting.by_task:
            return end - begin
        return float(self._run.task.batch_weight(cut(micro.batch, micro.samples, begin, end)))


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What `training_step` returned for parts of a micro-batch, as it would have for all of it."""
    losses, weights = zip(*map(read_output, outputs), strict=True)
    if len(outputs) == 1 or None in weights:
        return outputs[0] if len(outputs) == 1 else joined(outputs, sizes, averages=True)
    total = sum(weights)
    loss = sum(loss * (weight / total if total else 0.0) for loss, weight in zip(losses, weights, strict=True))
    if isinstance(outputs[0], tuple):
        return loss, total
    others = [{key: value for key, value in output.items() if key not in ("loss", "weight")} for output in outputs]
    return joined(others, sizes, averages=True) | {"loss": loss, "weight": total}


def keep_size(run: Run) -> None:
    """Make micro-batches in parts that fit on every process from here on. Collective: every rank must call this."""
    told, before = run.processes.gather(run.step.fits), run.progress.fits
    ranks = [str(rank) for rank, fits in enumerate(told) if fits != before]
    run.progress.fits = min(filter(None, told))
    _log.warning(
        "step %d: a micro-batch did not fit into memory%s. It was made in parts, as all larger ones are from here on: "
        "of %d samples or a few less, whose gradients sum to that of the whole%s. A smaller batch_size with the same "
        "global_batch_size gives the same training",
        run.progress.step + 1,
        f" on rank {', '.join(ranks)}" if len(told) > 1 else "",
        run.progress.fits,
        "; but BatchNorm sees each part by itself" if _has_batch_norm(run.task) else "",
    )


def check_halving(run: Run) -> None:
    """Refuse `halve_on_oom` where a process cannot make a micro-batch again by itself.

    Raises:
        ConfigError: Processes communicate in forwards.
    """
    if run.strategy.communicates_in("forward"):
        raise ConfigError(_TOGETHER.format(why="with this strategy all processes communicate in each forward"))
    if run.processes.world_size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in run.task.modules()):
        raise ConfigError(_TOGETHER.format(why="SyncBatchNorm communicates in each forward"))


def explain(run: Run, error: RuntimeError) -> None:
    """Say what helps in the error of a step, if that ran out of memory."""
    if not is_out_of_memory(error):
        return
    if not run.plan.halve_on_oom:
        error.add_note(_HINT)
    elif run.optim.manual is not None or run.optim.needs_closure:
        error.add_note(
            "halve_on_oom makes no step again that moves its optimizers itself, or whose optimizer evaluates the loss "
            "several times. Make batch_size of the training loader smaller."
        )


def _has_batch_norm(task: nn.Module) -> bool:
    return any(isinstance(module, _BATCH_NORMS) and module.training for module in task.modules())
