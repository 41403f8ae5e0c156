"""`halve_on_oom`: compute a batch that does not fit into memory in parts.

In training (`StepInParts`) the gradients of the parts sum to the gradient of the full micro-batch. In an evaluation
(`HalvingEvaluation`) the values equal the values of a smaller batch size. The file also has the hints for an error
without this setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from torch import nn

from lumen.console import logger as _log
from lumen.data.nested import detach_all
from lumen.data.parts import cut_batch, halve_spans, join_outputs
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.errors import ConfigError
from lumen.internals.memory import empty_device_cache, free_failed_backward, is_out_of_memory
from lumen.loop.micro_batch import accumulate_gradient, make_restore_point, undo_forward_effects
from lumen.metrics.torchmetrics_states import copy_metric_state, find_metrics, load_metric_state
from lumen.random import GeneratorStates
from lumen.run.run import Run
from lumen.task.steps import read_output

if TYPE_CHECKING:
    from torchmetrics import Metric

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_HINT = (
    "Trainer(halve_on_oom=True) computes a micro-batch that does not fit in halves, with the same gradient. A smaller "
    "batch_size with the same global_batch_size gives the same gradient too."
)
_REFUSAL = (
    "halve_on_oom: the processes communicate in each forward (FSDP, Mesh, SyncBatchNorm), so a process without memory "
    "cannot repeat a forward alone. Remove halve_on_oom, or use strategy: ddp. A smaller batch_size of the loader with "
    "the same global_batch_size gives the same step."
)


@final
class StepInParts:
    """Forward and backward of the micro-batches of one step, in parts where memory does not suffice.

    When an attempt runs out of memory, some gradients of this micro-batch are already in `parameter.grad`, added to
    the gradients of earlier micro-batches. So Lumen drops all gradients of the step, computes the earlier micro-batches
    again, and tries with smaller parts. Before that, Lumen restores logged values, metrics, generators and buffers.
    Each process does so alone: under DDP processes communicate only after the last backward. There they agree on a
    size that fits into the memory of all.

    Args:
        run: The run that trains.
        window: The micro-batches of the step.
    """

    def __init__(self, run: Run, window: AccumulationWindow) -> None:
        self._run, self._window = run, window
        self._keeps_outputs = bool(run.hooks.on_train_batch_end)
        self._finished_micro_batches: list[tuple[MicroBatch, Any, GeneratorStates]] = []

    def accumulate_gradient(self, micro: MicroBatch, batch: Any) -> Any:
        """Add the gradient of a micro-batch; in the last one, sum gradients over the processes.

        Returns:
            The return value of `training_step`; outputs of parts are joined along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: The positions of the samples in the batch are unknown.
            ConfigError: The return values for the parts cannot be joined.
        """
        output = None
        if not micro.is_dummy:
            self._finished_micro_batches.append((micro, batch, GeneratorStates()))
            output = self._compute_gradient(micro, batch)
            self._run.log.set_weight(micro.samples)
        if micro.last:
            # No part may communicate, since a later attempt may fail. So a dummy without a batch ends the step. The
            # backward of this dummy, with a loss of zero, averages the gradients over the processes.
            accumulate_gradient(self._run, micro.make_ending_dummy(), None, self._run.step.weighting)
        return output

    def _compute_gradient(self, micro: MicroBatch, batch: Any) -> Any:
        """Add the gradient of the newest micro-batch, in parts as large as fit."""
        run, largest = self._run, micro.samples
        logged, weighting, is_repeated = run.log.stage, run.step.weighting, False
        assert logged is not None
        while True:
            before, counted, restore = (
                logged.make_restore_point(),
                weighting.make_restore_point(),
                make_restore_point(run),
            )
            try:
                if is_repeated:
                    self._recompute_gradients(self._finished_micro_batches[:-1])
                    self._finished_micro_batches[-1][-1].restore()
                return self._compute_in_parts(micro, batch)
            except RuntimeError as error:
                largest = min(run.progress.fits or largest, largest)
                run.step.set_max_samples(halve_size(error, largest))  # This drops the loss and its graph too.
            # The error holds the tensors of the attempt, so their memory is free only after the except clause.
            is_repeated = True
            logged.restore(before)
            restore()
            weighting.restore(counted)
            free_failed_backward()
            empty_device_cache(run.strategy.device)

    def _recompute_gradients(self, finished: Sequence[tuple[MicroBatch, Any, GeneratorStates]]) -> None:
        """Compute the gradients again of micro-batches that already count in the step."""
        run, weighting = self._run, self._run.step.weighting
        run.optim.zero_grad(run.progress.epoch, self._window.first_index)
        for micro, batch, states in finished:
            counted = weighting.make_restore_point()
            states.restore()
            with undo_forward_effects(run):
                self._compute_in_parts(micro, batch, check=False)
            weighting.restore(counted)

    def _compute_in_parts(self, micro: MicroBatch, batch: Any, *, check: bool = True) -> Any:
        run, samples = self._run, micro.samples
        parts = [*halve_spans(0, samples, run.progress.fits or samples)]
        outputs, sizes = [], []
        if len(parts) > 1:
            run.step.weighting.use_guess()
        for begin, end in parts:
            of_part, weight = batch, micro.weight
            if len(parts) > 1:
                of_part, weight = cut_batch(batch, samples, begin, end), get_part_weight(run, micro, begin, end)
            run.log.set_weight(end - begin)
            part = micro.make_part(end - begin, weight)
            output, _ = accumulate_gradient(run, part, of_part, run.step.weighting, check=check)
            if self._keeps_outputs and output is not None:
                outputs.append(detach_all(output))
                sizes.append(end - begin)
        return join_step_outputs(outputs, sizes) if outputs else None


def get_part_weight(run: Run, micro: MicroBatch, begin: int, end: int) -> float:
    """Return the weight of some samples of a micro-batch, as known before their forward."""
    if not run.step.weighting.is_set_by_task:
        return end - begin
    return float(run.task.batch_weight(cut_batch(micro.batch, micro.samples, begin, end)))


def halve_size(error: RuntimeError, samples: int) -> int:
    """Return the number of samples to try after an error.

    Args:
        error: The error of the attempt.
        samples: Number of samples in the attempt.

    Raises:
        RuntimeError: This error, if memory was not the cause, or a single sample does not fit.
    """
    if is_out_of_memory(error) and samples > 1:
        return (samples + 1) // 2
    if is_out_of_memory(error):
        error.add_note("A single sample does not fit into memory, so halve_on_oom cannot help.")
    raise error


def join_step_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output that `training_step` would have returned for the unsplit micro-batch.

    Args:
        outputs: The outputs of `training_step` for the parts.
        sizes: Number of samples of each part.
    """
    losses, weights = zip(*map(read_output, outputs), strict=True)
    if len(outputs) == 1 or None in weights:
        return outputs[0] if len(outputs) == 1 else join_outputs(outputs, sizes, averages=True)
    total = sum(weights)
    loss = sum(loss * (weight / total if total else 0.0) for loss, weight in zip(losses, weights, strict=True))
    if isinstance(outputs[0], tuple):
        return loss, total
    remaining = [{key: value for key, value in output.items() if key not in ("loss", "weight")} for output in outputs]
    return join_outputs(remaining, sizes, averages=True) | {"loss": loss, "weight": total}


def reduce_max_samples(run: Run) -> set[int]:
    """Use the smallest size that fits on every process from here on. Collective: every rank must call this.

    Returns:
        The ranks on which a larger micro-batch did not fit.
    """
    found = run.processes.all_gather((run.progress.fits, run.step.has_shrunk))
    run.step.apply_max_samples(min(max_samples for max_samples, _ in found if max_samples))
    return {rank for rank, (_, has_shrunk) in enumerate(found) if has_shrunk}


def warn_of_parts(run: Run, ranks: set[int]) -> None:
    """Warn that micro-batches are computed in parts from here on.

    Args:
        run: The run that trains.
        ranks: The ranks on which a micro-batch did not fit.
    """
    _log.warning(
        "step %d: a micro-batch did not fit into memory%s. Lumen computes larger micro-batches from here on in parts "
        "of at most %d samples, whose gradients sum to the same gradient%s. A smaller batch_size with the same "
        "global_batch_size gives the same training",
        run.progress.step + 1,
        f" on rank {', '.join(map(str, sorted(ranks)))}" if run.processes.world_size > 1 else "",
        run.progress.fits,
        ", except that BatchNorm normalizes each part alone" if _has_batch_norm(run.task) else "",
    )


def check_halving(run: Run) -> None:
    """Refuse `halve_on_oom` where a process cannot repeat a forward alone.

    Raises:
        ConfigError: The strategy (FSDP), or SyncBatchNorm in training, communicates in forwards.
    """
    strategy, trains = run.strategy, run.stage == "fit" and run.processes.world_size > 1
    synced = trains and any(isinstance(module, nn.SyncBatchNorm) for module in run.task.modules())
    if synced or strategy.has_collectives_in("forward") or strategy.has_collectives_in("evaluation"):
        raise ConfigError(_REFUSAL)


def explain_step_error(run: Run, error: Exception) -> None:
    """Add a hint to the error of a step that ran out of memory, or whose optimizer does not work here."""
    name = type(run.optim.optimizer).__name__
    if run.step.is_updating and run.strategy.shards:
        error.add_note(
            f"{name} failed on parameters that are sharded over processes. If {name} treats each parameter alone, "
            f"write lumen.optim.WholeMatrices({name}(...)), which gives it unsharded parameters; or use strategy: ddp."
        )
    if run.step.is_updating and "does not require grad" in str(error):
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
            "halve_on_oom does not repeat steps of manual optimization, or of an optimizer that evaluates the loss "
            "several times. Lower the batch_size of the training loader."
        )


def _has_batch_norm(task: nn.Module) -> bool:
    return any(isinstance(module, _BATCH_NORMS) and module.training for module in task.modules())


_HINT_OF_EVALUATION = (
    "Trainer(halve_on_oom=True) evaluates a batch that does not fit in halves. A smaller batch_size of the evaluation "
    "loader gives the same values too."
)


@final
class HalvingEvaluation:
    """Evaluation steps, which are repeated with halves of the batch where memory does not suffice.

    Lumen restores logged values, metrics and generators before the next attempt. So values equal the values of smaller
    batches, and values of single steps are means over the halves. Random draws continue from the key of the batch: they
    are the same in each run, but differ from the draws for the unsplit batch. Lumen does not restore attributes and
    buffers that a step changes. A step must not communicate.

    Args:
        run: The run that evaluates.
        stage: "validate", "sanity", "test" or "predict".
        keeps_outputs: True to return the outputs of the steps.
    """

    def __init__(self, run: Run, stage: str, *, keeps_outputs: bool) -> None:
        self._run, self._keeps_outputs = run, keeps_outputs
        self._stage = "validate" if stage == "sanity" else stage
        self._metrics = list(find_metrics(run.task).values())

    def evaluate_batch(self, step: Callable[[Any], Any], batch: Any, micro: MicroBatch) -> Any:
        """Evaluate a batch, in halves if memory does not suffice.

        Args:
            step: The step of the task, called with a batch.
            batch: The batch on the device.
            micro: The micro-batch, with its number of samples.

        Returns:
            The return value of the step; outputs of halves are joined along dimension 0.

        Raises:
            RuntimeError: A single sample does not fit; on accelerators a torch.OutOfMemoryError.
            DataError: The positions of the samples in the batch are unknown.
            ConfigError: The return values for the halves cannot be joined.
        """
        try:
            return self._evaluate(step, batch, micro.samples, 0, micro.samples)
        finally:
            self._run.log.set_weight(micro.samples)

    def _evaluate(self, step: Callable[[Any], Any], batch: Any, samples: int, begin: int, end: int) -> Any:
        size = end - begin
        self._run.log.set_weight(size)
        if size <= self._run.loaders.max_samples_per_part.get(self._stage, size):
            restore = mark_logged_values(self._run, self._metrics)
            try:
                return step(batch if size == samples else cut_batch(batch, samples, begin, end))
            except RuntimeError as error:
                max_samples = halve_size(error, size)
            # The error holds the tensors of the attempt, so their memory is free only after the except clause.
            restore()
            empty_device_cache(self._run.strategy.device)
            set_max_samples(self._run, self._stage, max_samples)
        middle = begin + (size + 1) // 2
        halves = (begin, middle), (middle, end)
        outputs = [self._evaluate(step, batch, samples, *half) for half in halves]
        sizes = middle - begin, end - middle
        return join_outputs(outputs, sizes, averages=self._stage != "predict") if self._keeps_outputs else None


def mark_logged_values(run: Run, metrics: Sequence[Metric]) -> Callable[[], None]:
    """Return a function that restores logged values, metrics and random states as they are now."""
    logged, generators = run.log.stage, GeneratorStates()
    assert logged is not None
    mark, states = logged.make_restore_point(), [(metric, copy_metric_state(metric)) for metric in metrics]

    def restore() -> None:
        logged.restore(mark)
        generators.restore()
        for metric, state in states:
            load_metric_state(metric, state)

    return restore


def set_max_samples(run: Run, stage: str, max_samples: int) -> None:
    """Evaluate no larger part of a batch in this stage again."""
    if not run.loaders.max_samples_per_part:
        _log.warning(
            "a batch of more than %d samples does not fit into memory: Lumen evaluates this and later batches in "
            "halves. A smaller batch_size of the evaluation loader gives the same values",
            max_samples,
        )
    run.loaders.set_max_samples(stage, max_samples)


@contextmanager
def explain_memory_errors(run: Run) -> Iterator[None]:
    """Add a hint to an out-of-memory error of an evaluation in this context."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) and not run.plan.halve_on_oom:
            error.add_note(_HINT_OF_EVALUATION)
        raise
