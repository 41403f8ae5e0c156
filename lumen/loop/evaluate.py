"""Evaluation: one pass over loaders, for validation, test and prediction; and publication of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar, final

import torch

from lumen.checkpoint.save.collect import get_logger_states
from lumen.data.adapter import LoaderAdapter, Position
from lumen.data.nested import move_batch
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.distributed.dtensor import is_sharded
from lumen.loop.micro_batch import undo_forward_effects
from lumen.loop.step_in_parts import HalvingEvaluation, explain_memory_errors
from lumen.metrics.collector import StageMetrics
from lumen.metrics.step_values import is_for_loggers
from lumen.metrics.torchmetrics_states import Gather, SavedMetricStates
from lumen.random import EVALUATIONS, make_key, preserve_generators, seed_generators
from lumen.run.error_notes import note_place
from lumen.run.run import Run
from lumen.strategies import sync_buffers
from lumen.task.hooks import is_overridden
from lumen.task.modes import SavedModes, avoid_inference_tensors

T = TypeVar("T")
Numbered = tuple[Any, T]


@final
@dataclass
class SavedTrainingState:
    """State of an evaluation, and the state of the interrupted training to restore after it.

    Attributes:
        metrics: Collector of the values that the evaluation logs.
        modes: Modes of the task's modules before the evaluation.
        states: States of the task's torchmetrics objects before the evaluation.
        rows: Logged values of each batch of this process, by the numbers of the loader and of the batch.
        complete: True once the values of the evaluation are published.
    """

    metrics: StageMetrics
    modes: SavedModes
    states: SavedMetricStates
    rows: list[Numbered[dict[str, float | torch.Tensor]]] = field(default_factory=list)
    complete: bool = False


def evaluate(run: Run, stage: str) -> bool:
    """Evaluate all batches of the open evaluation loaders, in eval mode and without gradients.

    Afterwards the state of the training is restored. Modules get their modes back, except modes that a hook at the end
    of the evaluation has set. Hooks of the task, such as `on_validation_model_eval`, may set the modes instead.

    Args:
        run: The run that evaluates.
        stage: "validate", "sanity", "test" or "predict".

    Returns:
        False if a signal asked the run to stop. Then no values are published.
    """
    name = "validation" if stage in ("validate", "sanity") else stage
    if stage == "validate" and run.stage == "fit" and is_overridden(run.task, "on_validation_model_zero_grad"):
        run.task.on_validation_model_zero_grad()
    contexts = run.hooks.validation_context if run.stage == "fit" else []
    avoid_inference = partial(avoid_inference_tensors, run.task, vars(run.optim).get("optimizer"))
    with (
        save_training_state(run, stage) as saved,
        preserve_generators(),
        torch.no_grad(),
        enter_all(contexts),
        avoid_inference(),
    ):
        getattr(run.task, f"on_{name}_model_eval")()
        seed_generators(make_key(run.seed, EVALUATIONS[stage]))
        run.log.call_hooks(f"on_{name}_start")
        # Parameters that FSDP2 gathers under inference mode can never be trained again.
        uses_inference_mode = run.plan.inference_mode and not any(map(is_sharded, run.task.parameters()))
        with avoid_inference(), run.strategy.evaluation(inference_mode=uses_inference_mode):
            run.log.call_hooks(f"on_{name}_epoch_start")
            saved.states.reset_for_evaluation()
            named = zip(run.loaders.evaluation, run.loaders.list_suffixes(), strict=True)
            for number, (adapter, suffix) in enumerate(named):
                run.log.begin_loader(suffix)
                with explain_memory_errors(run):
                    outputs = evaluate_loader(run, stage, name, adapter, number, saved)
                run.log.end_loader()
                if run.ending.vote.stop_signal is not None:
                    return False
                if stage == "predict" and run.values.keeps_predictions:
                    run.values.keep_predictions(gather_in_order(run, outputs))
            finish_pass(run, stage, name, saved)
        saved.metrics.close()
        with saved.modes.keep_choices():
            for hook in getattr(run.hooks, f"on_{name}_end"):
                hook()
        if is_overridden(run.task, f"on_{name}_model_train"):
            saved.modes.hand_over_to(getattr(run.task, f"on_{name}_model_train"))
    run.records.end_evaluation()
    return True


@contextmanager
def enter_all(contexts: Iterable[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    """Make and enter several contexts, and exit them together."""
    with ExitStack() as stack:
        for make in contexts:
            stack.enter_context(make())
        yield


@contextmanager
def save_training_state(run: Run, stage: str) -> Iterator[SavedTrainingState]:
    """Save the state of the training, and restore it at the end of the context, after errors too."""
    run.records.write_pending_row()
    saved = SavedTrainingState(run.log.make_metrics(), SavedModes(run.task), SavedMetricStates(run.task))
    run.records.begin_evaluation(get_logger_states(run))
    with run.in_stage(stage, saved.metrics):
        try:
            run.log.share_metrics(run.task)
            sync_buffers(run.strategy, run.task)
            run.ending.vote.reset_interval()
            for adapter in run.loaders.evaluation:
                adapter.measure()
            try:
                yield saved
            finally:
                run.ending.vote.reset_interval()
                saved.metrics.reset_metrics()
                saved.states.restore_all(everything=not saved.complete or stage == "sanity")
                saved.modes.restore()
        except Exception as error:
            note_place(run, error)
            raise


def finish_pass(run: Run, stage: str, name: str, saved: SavedTrainingState) -> None:
    """End an evaluation pass: call the hooks that may still log, and publish the values. Collective."""
    run.log.end_loaders()
    seed_generators(make_key(run.seed, EVALUATIONS[stage], 1))
    saved.states.restore_untouched(run.log.gather if run.log.has_metrics else None)
    if run.log.has_evaluation_ends and stage != "predict":
        publish_values(run, saved.metrics, run.log.gather)  # The hooks may read these values.
    with saved.modes.keep_choices():
        run.log.call_hooks(f"on_{name}_epoch_end")
    values = publish_values(run, saved.metrics, run.log.gather)
    if stage != "sanity" and run.records.is_logged:
        for row in gather_in_order(run, saved.rows):
            run.records.write_values(row)
        run.records.write_values({name: values[name] for name in saved.metrics.list_epoch_names(is_for_loggers)})
    saved.complete = True


def gather_in_order(run: Run, local_values: list[Numbered[T]]) -> list[T]:
    """Return the values of all ranks, sorted by their numbers. Collective."""
    if run.log.gather is None:
        return [value for _, value in local_values]
    numbered = chain.from_iterable(run.log.gather(move_batch(local_values, torch.device("cpu"))))
    return [value for _, value in sorted(numbered, key=itemgetter(0))]


def evaluate_loader(
    run: Run,
    stage: str,
    name: str,
    adapter: LoaderAdapter,
    dataloader_idx: int,
    saved: SavedTrainingState,
) -> list[Numbered[Any]]:
    """Evaluate this rank's batches of one loader, and add a row of step values for each batch.

    Returns:
        The outputs of the steps with their batch numbers if predictions are kept; else an empty list.
    """
    hooks = run.hooks
    starts, ends = getattr(hooks, f"on_{name}_batch_start"), getattr(hooks, f"on_{name}_batch_end")
    call, arguments = run.strategy.call, run.calls.get_arguments
    step, domain, metrics = f"{name}_step", EVALUATIONS[stage], saved.metrics
    outputs: list[Numbered[Any]] = []
    keeps_predictions = stage == "predict" and run.values.keeps_predictions
    needs_outputs = bool(ends) or keeps_predictions
    halving = HalvingEvaluation(run, stage, keeps_outputs=needs_outputs) if run.plan.halve_on_oom else None
    window: AccumulationWindow | None = None
    limit = run.plan.get_limit(stage, adapter)
    for window in adapter.iterate_windows(0, Position(), limit):
        for micro in window:
            if micro.is_dummy and micro.batch is None:
                continue
            run.log.begin_batch(micro.samples, micro.index)
            seed_generators(make_key(run.seed, domain, 2, dataloader_idx, micro.index))
            batch = run.calls.move_to_device(micro.batch, dataloader_idx)
            if micro.is_dummy:  # The forward of the other ranks communicates and needs a forward of this rank.
                with undo_forward_effects(run):
                    call_step(run, step, micro, dataloader_idx, batch)
                continue
            if stage == "predict":
                run.values.note_batch(get_sample_indices(window))
            for hook in starts:
                hook(batch, micro.index, dataloader_idx)
            if halving is not None:
                run_step = partial(call_step, run, step, micro, dataloader_idx)
                output = halving.evaluate_batch(run_step, batch, micro)
            else:  # This repeats `call_step`, to have one stack frame less between `fit` and the step.
                with run.precision.forward():
                    output = call(step, *arguments(step, batch, micro.index, dataloader_idx or micro.loader))
            for hook in ends:
                hook(output, batch, micro.index, dataloader_idx)
            if keeps_predictions:
                outputs.append((micro.index, run.calls.move_to_host(output)))
            if row := metrics.compute_step_values(is_for_loggers):
                saved.rows.append(((dataloader_idx, micro.index), row))
        run.log.end_batch()
        run.ending.vote.poll_when_due()
        if run.ending.vote.stop_signal is not None:
            break
    if window is None and limit != 0:
        run.loaders.warn_of_empty(stage, adapter)
    return outputs


def get_sample_indices(window: AccumulationWindow) -> list[int] | None:
    """Return the data set indices of the samples in this process's batch; None if they are unknown."""
    if not window.requests:
        return None
    indices = list(window.requests[0].indices)
    return [int(index) for index in indices] if all(hasattr(each, "__index__") for each in indices) else None


def call_step(run: Run, step: str, micro: MicroBatch, dataloader_idx: int, batch: Any) -> Any:
    """Call a step of the task with a batch or a part of a batch. Returns the output of the step."""
    with run.precision.forward():
        arguments = run.calls.get_arguments(step, batch, micro.index, dataloader_idx or micro.loader)
        return run.strategy.call(step, *arguments)


def publish_values(run: Run, metrics: StageMetrics, gather: Gather | None) -> dict[str, float]:
    """Publish the values of an epoch or evaluation to monitors, schedulers and the progress bar. Collective."""
    before = {*run.values.newest.values()}
    values = run.values.publish_values(run.stage, metrics, gather)
    epoch = run.progress.epoch  # The step is no known number: it may equal a process's count of batches.
    run.log.doubts.warn_of_doubtful(metrics.hook_values, {epoch, epoch + 1, *before})
    for scheduler in run.optim.schedulers if run.stage != "sanity" else ():
        scheduler.store_monitor_value(values)
    return values
