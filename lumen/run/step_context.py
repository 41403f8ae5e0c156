"""State of the optimizer step in progress, and transfer of batches to the task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from lumen.data.nested import CopyStream, move_batch
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.metrics.torchmetrics_states import Gather
from lumen.precision import Precision
from lumen.random import Domain, make_key, seed_generators
from lumen.run.anomalies import NonFiniteCheck, OperationFinder, StepPlace
from lumen.run.loaders import Loaders
from lumen.run.log_context import LogContext
from lumen.run.loss_weighting import LossWeighting, StartSum
from lumen.run.plan import Progress
from lumen.strategies import Strategy, count_training_parts
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.hooks import fit_to_signature, is_overridden
from lumen.task.steps import make_argument_picker
from lumen.task.task_module import TaskModule


@final
@dataclass
class Counters:
    """Sums over the steps of this part of a run, as all processes know them.

    Attributes:
        samples: Training samples, of all processes.
        waited_s: Seconds that this process has waited for training data.
        counts_units: True if the task weighs its micro-batches, by tokens or boxes. Then speeds are in these units.
        held_s: Seconds in which a debugger's prompt or a stop signal (Ctrl-Z, SIGSTOP) held this process.
    """

    samples: int = 0
    waited_s: float = 0.0
    counts_units: bool = False
    held_s: float = 0.0

    def note_held(self, seconds: float) -> None:
        """Note the seconds in which a debugger's prompt or a stop signal held this process."""
        self.held_s += seconds


@final
class StepContext:
    """The step in progress: random keys, weights and loss; and sums over the steps of this part of a run.

    Args:
        strategy: Strategy of the run, whose processes sum weights.
        precision: The run's precision; fp16 skips non-finite updates itself.
        progress: Counters of the run.
        log: Collector of the values that the run logs.
        seed: The run's seed, which keys everything random.
        replays_graphs: True if compiled modules (CUDA graphs) write their output into the same memory for each batch.

    Attributes:
        weighting: The weighting of the losses of the step, after `make_weighting`.
        nonfinite: Check of losses and gradient norms for NaN and infinity.
        skips_epoch: True if a hook of this process has ended the epoch in this step.
        skips_update: True if hooks of all processes have skipped the update of this step.
        has_shrunk: True if a part of a micro-batch was too large in this process, until the processes have agreed.
        is_updating: True while the run calls the `step` of an optimizer.
        requests: Requests of this process to a map-style data set in this step, one for each of its micro-batches;
            None for other data.
        dummy: A batch that gave a loss, with its micro-batch. A rank without a loss computes this batch again.
        loss: The newest loss, a scalar tensor on the device, perhaps with its graph.
        grad_norm: The newest gradient norm before clipping, a scalar tensor; None without clipping by norm.
        counters: Sums over all steps.
        updated: True if the newest window made an update, so that its values belong to a step.
        weighted_windows: Number of windows with an attempted update whose weights sum to more than 0.
    """

    def __init__(
        self,
        strategy: Strategy,
        precision: Precision,
        progress: Progress,
        log: LogContext,
        seed: int,
        *,
        replays_graphs: bool,
    ) -> None:
        self._strategy, self._precision, self._progress, self._log = strategy, precision, progress, log
        self._seed, self._replays_graphs, self._first_micro_batch = seed, replays_graphs, 0
        self.weighting: LossWeighting
        finds_operations = torch.is_anomaly_enabled()
        self.nonfinite = NonFiniteCheck(
            OperationFinder(precision, self.get_place).describe if finds_operations else None
        )
        self.skips_epoch = self.skips_update = self.has_shrunk = self.is_updating = self.updated = False
        self.requests: Sequence[Any] | None = None
        self.dummy: tuple[Any, MicroBatch] | None = None
        self.loss: torch.Tensor | None = None
        self.grad_norm: torch.Tensor | None = None
        self.counters = Counters()
        self.weighted_windows = 0

    def make_weighting(
        self, task: TaskModule, gather: Gather | None, start_sum: StartSum, *, keeps_losses: bool
    ) -> None:
        """Make the weighting of losses, once no later hook can give the task a `batch_weight`.

        Args:
            task: The task that is trained.
            gather: Function that returns the values of all processes; None for a single process.
            start_sum: Function that begins to sum numbers over the processes; see `LossWeighting`.
            keeps_losses: True if a callback reads the loss of a step.
        """
        processes, data_ranks = self._strategy.processes.world_size, self._strategy.data_world_size
        self.weighting = LossWeighting(
            is_set_by_task=is_overridden(task, "batch_weight"),
            data_world_size=data_ranks, processes_per_data_rank=processes // data_ranks,
            context_size=data_ranks // count_training_parts(self._strategy),
            uses_scaler=self._precision.handles_overflow, start_sum=start_sum if processes > 1 else None, gather=gather,
            keeps_losses=keeps_losses, exact_rank=self._strategy.data_rank if self._strategy.is_exact else None,
        )  # fmt: skip

    def begin_step(self, window: AccumulationWindow) -> None:
        """Begin a step: reset its flags, collect its values, and number its micro-batches."""
        self.skips_epoch = self.skips_update = False
        self.requests = window.requests
        self._log.in_train_step = True
        self._log.train.begin_window()
        self._first_micro_batch = self._progress.micro_batches

    def seed_micro_batch(self, micro: MicroBatch, index: int) -> None:
        """Key everything random in a training micro-batch by its number in the run.

        Args:
            micro: The micro-batch whose forward comes next.
            index: The `batch_idx` of the micro-batch.
        """
        self._log.batch_samples, self._log.batch_index = micro.samples, index
        number = self._first_micro_batch + micro.number
        seed_generators(make_key(self._seed, Domain.TRAIN, number))
        self._progress.micro_batches = number + 1

    def seed_hooks(self, place: int) -> None:
        """Seed the hooks at the start (0) and the end (1) of an epoch, and the opening of its loaders (2)."""
        seed_generators(make_key(self._seed, Domain.HOOK, self._progress.epoch, place))

    def skip_epoch(self) -> None:
        """Record that a hook of this process ends the epoch in this step."""
        self.skips_epoch = True

    def keep_dummy(self, batch: Any, micro: MicroBatch) -> None:
        """Keep a batch that gave a loss, for a later micro-batch without one."""
        self.dummy = batch, micro

    @contextmanager
    def repeat_evaluation(self) -> Iterator[None]:
        """Evaluate the step again within the context, and drop its logged values and gradient norm."""
        before = self.grad_norm
        with self._log.discard_logged():
            try:
                yield
            finally:
                self.grad_norm = before

    def skip_update(self) -> None:
        """Make no update in this step. Every rank must call this."""
        self.skips_update = True

    def store_norm(self, norm: torch.Tensor | None) -> None:
        """Keep the norm of the gradients before clipping; None: they were not clipped."""
        self.grad_norm = None if norm is None else norm.to(self._strategy.device)

    def set_max_samples(self, max_samples: int) -> None:
        """Limit parts to `max_samples` from here on, because this process ran out of memory with a larger part."""
        self._progress.fits, self.has_shrunk, self.loss = max_samples, True, None

    def apply_max_samples(self, max_samples: int) -> None:
        """Limit parts to the number of samples that fits on every process."""
        self._progress.fits, self.has_shrunk = max_samples, False

    def end_step(self, window: AccumulationWindow) -> None:
        """Count the step's micro-batches of all processes as used, without an update."""
        self.updated = False
        self._progress.micro_batches = self._first_micro_batch + len(window.sizes)

    def count_excluded(self, window: AccumulationWindow) -> None:
        """Count a window that is not trained on."""
        self.skips_epoch = self.skips_update = False
        self._first_micro_batch = self._progress.micro_batches
        self._progress.count_window(window, updated=False)
        self.end_step(window)

    def get_place(self) -> StepPlace:
        """Return the step in progress, its epoch, and its newest micro-batch."""
        return self._progress.step + 1, self._progress.epoch, self._progress.micro_batches - 1

    def check_loss(self, loss: torch.Tensor, loss_factor: float) -> None:
        """Refuse a NaN or infinite loss. With fp16 the scaler handles a loss whose weight is not 0.

        Args:
            loss: A scalar tensor.
            loss_factor: The factor that the weight of the loss gives; 0 for a loss without weight.
        """
        self.loss = loss.detach().clone() if self._replays_graphs else loss
        if not (loss_factor and self._precision.handles_overflow):
            self.nonfinite.check(loss, loss_factor, self.get_place)

    def begin_update(self) -> None:
        """Refuse a NaN or infinite gradient norm before the update. With fp16 the scaler handles it."""
        if self.grad_norm is not None and not self._precision.handles_overflow:
            self.nonfinite.check(self.grad_norm, None, self.get_place)
        self.is_updating = True

    def count_window(self, window: AccumulationWindow, *, updated: bool, was_attempted: bool = True) -> None:
        """Advance the run by one window.

        Args:
            window: The window whose micro-batches are all used.
            updated: True if the window made an update.
            was_attempted: True if an update was attempted; fp16 may have skipped it.
        """
        progress, weighting, counters = self._progress, self.weighting, self.counters
        counted = weighting.is_set_by_task or bool(weighting.has_returned_weights)  # `counts_units`, without a call
        progress.count_window(window, updated=updated)
        progress.micro_batches = self._first_micro_batch + len(window.sizes)
        self.updated, self.is_updating, self.skips_update = updated, False, False
        if counted or not progress.weight_guess:
            progress.weight_guess = weighting.next_guess
        if updated:
            progress.units += weighting.total
        counters.waited_s += window.waited_s
        counters.samples += window.samples
        counters.counts_units |= counted
        if not self.weighted_windows:
            self._strategy.processes.begin_training()
        self.weighted_windows += was_attempted and bool(weighting.total)


def count_micro_batches_started(step: StepContext) -> int:
    """Return the number of micro-batches started in this step, over all ranks, up to this process's newest."""
    return step._progress.micro_batches - step._first_micro_batch


_Pick = Callable[[tuple[Any, int, int]], tuple[Any, ...]]  # from (batch, batch_idx, dataloader_idx)


@final
class TaskCalls:
    """Transfer of batches to the device, and choice of arguments for the task's steps.

    Args:
        task: The task, with its steps, and with transfer hooks that the data module lacks.
        datamodule: The data module, or None.
        strategy: Strategy of the run, which has the device.
        precision: Precision of the run, which may change the dtype of batches.
        compilation: Compilation of the task. Its CUDA graphs write their output into the same memory for each batch.

    Attributes:
        compilation: The modules of the task that are compiled during the run.
    """

    def __init__(
        self,
        task: TaskModule,
        datamodule: DataModule | None,
        strategy: Strategy,
        precision: Precision,
        compilation: Compilation,
    ) -> None:
        self.compilation, self._task, self._device = compilation, task, strategy.device
        self._arguments = _make_argument_pickers(task, {})
        marks_steps = compilation.replays_graphs(strategy.device)
        self._hooks = _list_transfer_hooks(task, datamodule, strategy.device, precision.dtype, marks_steps=marks_steps)

    def choose_arguments(self, loaders: Loaders) -> None:
        """Determine the arguments of the steps for these open loaders."""
        evaluates_several = len(loaders.evaluation) > 1 or any(adapter.is_sequential for adapter in loaders.evaluation)
        several = dict.fromkeys(("validation_step", "test_step", "predict_step"), evaluates_several)
        several["training_step"] = loaders.train is not None and loaders.train.is_sequential
        self._arguments = _make_argument_pickers(self._task, several)

    def move_to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device through the user's transfer hooks."""
        for hook in self._hooks:
            batch = hook(batch, dataloader_idx)
        return batch

    def get_arguments(self, step: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Any, ...]:
        """Return the arguments for a step of the task that its signature has.

        Args:
            step: "training_step", "validation_step", "test_step" or "predict_step".
            batch: The batch on the device.
            batch_idx: Number of the batch in the epoch or evaluation.
            dataloader_idx: Number of the batch's loader.
        """
        return self._arguments[step]((batch, batch_idx, dataloader_idx))

    def move_to_host(self, output: Any) -> Any:
        """Move the output of a step to the host, because kept outputs would fill the memory of an accelerator."""
        return output if self._device.type == "cpu" else move_batch(output, torch.device("cpu"))


def _make_argument_pickers(task: TaskModule, several: dict[str, bool]) -> dict[str, _Pick]:
    """Return, for each step of the task, a function that picks its arguments.

    Args:
        task: The task, with its steps.
        several: A bool for each step: True if the step reads several loaders.
    """
    steps = {step: getattr(task, step) for step in ("training_step", "validation_step", "test_step", "predict_step")}
    return {
        step: make_argument_picker(each, several=several.get(step, False))
        for step, each in steps.items()
        if each is not None
    }


def _list_transfer_hooks(
    task: TaskModule, data: DataModule | None, device: torch.device, dtype: torch.dtype | None, *, marks_steps: bool
) -> list[Callable[[Any, int], Any]]:
    def find_user_hooks(method: str) -> list[Callable[..., Any]]:
        return [fit_to_signature(each, method) for each in (data, task) if each and is_overridden(each, method)][:1]

    hooks: list[Callable[[Any, int], Any]] = find_user_hooks("on_before_batch_transfer")
    if transfers := find_user_hooks("transfer_batch_to_device"):
        hooks.append(lambda batch, index: transfers[0](batch, device, index))
    elif device.type == "cuda":
        copies = CopyStream(device, dtype)
        hooks.append(lambda batch, index: copies.move_batch(batch))
    elif device.type != "cpu" or dtype is not None:
        hooks.append(lambda batch, index: move_batch(batch, device, dtype))
    if marks_steps:
        hooks.append(_mark_step)
    return hooks + find_user_hooks("on_after_batch_transfer")


def _mark_step(batch: Any, _: int) -> Any:
    """Allow CUDA graphs to overwrite their output for the batch before."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return batch
