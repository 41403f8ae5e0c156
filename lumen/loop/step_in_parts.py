"""A batch that does not fit into memory is made in parts: of a step, whose gradients sum to its own, or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from torch import nn

from lumen.console import logger as _log
from lumen.data.nested import detached
from lumen.data.parts import cut, joined, spans
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import ConfigError
from lumen.internals.memory import drop_failed_backward, empty_device_cache, is_out_of_memory
from lumen.loop.micro_batch import accumulate, mark, unnoticed
from lumen.metrics.torchmetrics_states import load_metric_state, metric_state, metrics_of
from lumen.random import GeneratorStates
from lumen.run.run import Run
from lumen.task.step_output import read_output

if TYPE_CHECKING:
    from torchmetrics import Metric

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HINT = (
    "Trainer(halve_on_oom=True) makes a micro-batch that does not fit in halves, with the gradient of the whole; a "
    "smaller batch_size with the same global_batch_size does so too."
)
_REFUSED = (
    "halve_on_oom: the processes communicate in each forward (FSDP, SyncBatchNorm), so a process without memory "
    "cannot repeat one alone. Leave halve_on_oom out, or use strategy: ddp; a smaller batch_size of the loader with "
    "the same global_batch_size gives the same step."
)


@final
class StepInParts:
    """Makes the micro-batches of one step, and again in parts where memory does not suffice.

    Lumen restores what an attempt has logged, added to metrics, drawn and moved in buffers, and makes the gradients of
    the step so far again, unnoticed. Each process does so alone: processes communicate gradients after the last
    backward, not in it. There they exchange what has fitted, for all later steps.

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
            What `training_step` returned; outputs of parts are joined along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: It is not known where the samples of the batch are.
            ConfigError: What the step returned of parts cannot be joined.
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
                largest = min(run.step.fits or largest, largest)
                run.step.fits = smaller(error, largest)
            # behind the except clause: what the error held of the attempt is free only now, and the loss with its graph
            run.step.loss, again = None, True
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
        if len(parts) > 1:
            run.step.weighting.plan_with_guess()
        for begin, end in parts:
            of_part, weight = batch, micro.weight
            if len(parts) > 1:
                of_part, weight = cut(batch, samples, begin, end), weight_of_part(run, micro, begin, end)
            run.log.batch_samples = end - begin
            part = micro.part(end - begin, weight)
            output, _ = accumulate(run, part, of_part, run.step.weighting, check=check)
            if self._wanted and output is not None:
                outputs.append(detached(output))
                sizes.append(end - begin)
        return joined_outputs(outputs, sizes) if outputs else None


def weight_of_part(run: Run, micro: MicroBatch, begin: int, end: int) -> float:
    """The weight of some samples of a micro-batch, known before their forward."""
    if not run.step.weighting.by_task:
        return end - begin
    return float(run.task.batch_weight(cut(micro.batch, micro.samples, begin, end)))


def smaller(error: RuntimeError, samples: int) -> int:
    """How many samples to try instead of those that an error has come of.

    Raises:
        RuntimeError: It itself, if it does not say that memory has not sufficed, or a single sample does not fit.
    """
    if is_out_of_memory(error) and samples > 1:
        return (samples + 1) // 2
    if is_out_of_memory(error):
        error.add_note("One sample does not fit, so it cannot be halved any further.")
    raise error


def joined_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
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


def agree_on_size(run: Run) -> set[int]:
    """Keep to what fits on every process. Collective: every rank must call this.

    Returns:
        The ranks on which a larger micro-batch has not fitted.
    """
    told, before = run.processes.gather(run.step.fits), run.progress.fits
    run.step.fits = run.progress.fits = min(filter(None, told))
    return {rank for rank, fits in enumerate(told) if fits != before}


def say_size(run: Run, ranks: set[int]) -> None:
    """Say that micro-batches are made in parts from here on.

    Args:
        run: The run that trains.
        ranks: Where one has not fitted.
    """
    _log.warning(
        "step %d: a micro-batch did not fit into memory%s. It was made in parts, as all larger ones are from here on: "
        "of %d samples or a few less, whose gradients sum to that of the whole%s. A smaller batch_size with the same "
        "global_batch_size gives the same training",
        run.progress.step + 1,
        f" on rank {', '.join(map(str, sorted(ranks)))}" if run.processes.world_size > 1 else "",
        run.progress.fits,
        "; but BatchNorm sees each part by itself" if _has_batch_norm(run.task) else "",
    )


def check_halving(run: Run) -> None:
    """Refuse `halve_on_oom` where a process cannot repeat a forward alone.

    Raises:
        ConfigError: The strategy (FSDP), or SyncBatchNorm in training, communicates in forwards.
    """
    strategy, trains = run.strategy, run.stage == "fit" and run.processes.world_size > 1
    synced = trains and any(isinstance(module, nn.SyncBatchNorm) for module in run.task.modules())
    if synced or strategy.communicates_in("forward") or strategy.communicates_in("evaluation"):
        raise ConfigError(_REFUSED)


def explain(run: Run, error: Exception) -> None:
    """Say what helps in the error of a step, if that ran out of memory or an optimizer cannot serve here."""
    name = type(run.optim.optimizer).__name__
    if run.optim.is_updating and run.strategy.shards:
        error.add_note(
            f"{name} failed on parameters that are cut up over processes. Write lumen.optim.WholeMatrices({name}(...))"
            ", which gives it whole ones, if it treats each parameter by itself; or use strategy: ddp."
        )
    if run.optim.is_updating and "does not require grad" in str(error):
        error.add_note(
            f"If {name} computes second derivatives, let the task's backward(self, loss, *args, **kwargs) call "
            "loss.backward(create_graph=True)."
        )
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


_HINT_OF_EVALUATION = (
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
            error.add_note(_HINT_OF_EVALUATION)
        raise
