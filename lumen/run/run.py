"""Run: the one list of what a run is. The trainer fills it, the loop moves it, checkpoints save it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

import torch
from torch.optim import Optimizer

from lumen.data.adapter import Feed, Position
from lumen.data.nested import CopyStream, move
from lumen.data.windows import MicroBatch, Window
from lumen.errors import ConfigError
from lumen.internals.optimizers import StepGuard
from lumen.metrics.collector import StageMetrics, StepRow
from lumen.metrics.outside_steps import Doubts
from lumen.metrics.torchmetrics_states import Gather, metrics_of, share_metrics, unshare_metrics
from lumen.precision import Precision
from lumen.random import Domain, make_key, seed_generators
from lumen.run.anomalies import OperationFinder
from lumen.run.configure_optimizers import SchedulerConfig, check_held
from lumen.run.loss_weighting import StepWeights
from lumen.run.nonfinite import LossCheck, Place
from lumen.run.plan import Plan
from lumen.run.stop_vote import Pulse
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule
from lumen.task.hooks import Hooks, overrides, step_arguments
from lumen.task.task_module import TaskModule

if TYPE_CHECKING:
    from lumen.checkpoint import Checkpoint, Saves
    from lumen.loggers import Logger

_log = logging.getLogger("lumen")
_STOPPED = "stopped early"
_ZERO_GRAD = Optimizer.zero_grad  # as it is now: somebody may replace it


@final
@dataclass
class Progress:
    """How far a run is; part of every checkpoint. A step is a completed optimizer update, everywhere.

    Attributes:
        step: Optimizer updates completed.
        epoch: Epochs completed.
        samples: Samples consumed of the epoch in progress: the position in its order.
        batches: Micro-batches consumed of the epoch in progress.
        micro_batches: Micro-batches consumed in the whole run; keys dropout.
        in_epoch: The epoch in progress has begun.
        validation_due: This step's validation has not been completed.
        should_stop: A callback or the user asked the run to end; honoured after the minimum of steps and epochs.
        elapsed_s: Seconds of training, over all resumed parts.
        weight_guess: See `StepWeights`.
        units: Weight of all updates: the tokens, boxes or samples learned from.
        loader: Where the training loader stands, as its feed said after the last window.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    batches: int = 0
    micro_batches: int = 0
    in_epoch: bool = False
    validation_due: bool = False
    should_stop: bool = False
    elapsed_s: float = 0.0
    weight_guess: float = 0.0
    units: float = 0.0
    loader: Any = None

    def advance(self, window: Window, *, updated: bool) -> None:
        """Count one window; a step only if the update was not skipped."""
        self.step += updated
        self.samples += window.samples
        self.batches += len(window.sizes)
        self.loader = window.state

    def next_epoch(self) -> None:
        """The epoch in progress is complete."""
        self.epoch += 1
        self.samples = self.batches = 0
        self.in_epoch = False

    @property
    def epochs_begun(self) -> int:
        """The epoch in progress counted from 1; between two of them the one that is complete. What people are told."""
        return self.epoch + self.in_epoch

    @property
    def position(self) -> Position:
        """Where the epoch in progress stands."""
        return Position(self.samples, self.batches, self.loader)


@final
class Run:
    """Everything that a run consists of. One exists from the start of a stage to its end.

    Attributes:
        metrics: The newest value of every name, by name; what monitors read.
        fresh: Names whose value is new since the last boundary: what monitors look at.
        logged: Names that have had a value since this part of the run began; those in `metrics` may be from before.
        pulse: The time and the stop request that all processes act on.
    """

    def __init__(
        self,
        trainer: Any,
        task: TaskModule,
        datamodule: DataModule | None,
        strategy: Strategy,
        precision: Precision,
        plan: Plan,
        seed: int,
        callbacks: Sequence[Any],
        loggers: Sequence[Logger],
    ) -> None:
        self.trainer = trainer
        self.task = task
        self.datamodule = datamodule
        self.strategy = strategy
        self.precision = precision
        self.plan = plan
        self.seed = seed
        self.callbacks = callbacks
        self.loggers = loggers
        self.hooks = Hooks(task, callbacks, trainer)
        self.is_logged, self.has_epoch_ends = bool(loggers), bool(self.hooks.on_train_epoch_end)  # on any rank
        self.has_metrics = bool(metrics_of(task))  # on any rank
        self.progress = Progress()
        self.optimizer: Optimizer  # once `fit` has built it
        self.needs_closure = False  # it evaluates a step's loss several times
        self.is_updating = False  # its step is called by the run
        self.step_guard: StepGuard | None = None
        self._held = 0  # parameters of the optimizer that are known to be the task's
        self.built_groups: list[list[str]] = []  # names of the parameters in its groups, when it was built
        self.schedulers: list[SchedulerConfig] = []
        self.configured: dict[str, Any] = {}  # what their settings were when they were built
        self.built: dict[str, list[str]] = {}  # what was frozen and in eval mode then
        self.train_feed: Feed | None = None
        self.feeds_epoch = 0  # in which the loaders of fit were asked for
        self.eval_feeds: list[Feed] = []
        self.stage = ""
        self.loaders: tuple[Any, Any] | None = None  # given to fit instead of a data module: training, evaluation
        self.checkpoint: Checkpoint | None = None  # what `fit` goes on from
        self.saves: Saves  # from the start, but it needs a run itself
        self.absent_records: dict[str, Any] = {}  # states of the loggers that it had in an earlier part only
        self.records: dict[str, Any] | None = None  # states of its loggers before an evaluation that is not complete
        self.train_metrics = StageMetrics()
        self._row: StepRow | None = None  # on its way to the loggers
        self._has_updated = False  # the newest window, so that its values are those of a step
        self.kept_row: tuple[int, dict[str, float]] = 0, {}  # a step, not logged when it was made, and its values
        self.metrics: dict[str, float] = {}
        self.fresh: set[str] = set()
        self.logged: set[str] = set()
        self.read_of_steps: set[str] = set()  # the same of values of single steps, where a scheduler has looked
        self.published: dict[str, StageMetrics] = {}  # by stage, the newest
        self.has_ended_epoch = self.has_validated = False  # since this part of the run began
        self.empty: list[str] = []  # why evaluation loaders give nothing
        self.predictions: list[list[Any]] = []
        # what self.log reads
        self.stage_metrics: StageMetrics | None = None
        self.in_train_step = False
        self.in_evaluation_pass = False  # over the batches of its loaders
        self.batch_samples = 1
        self.loader_suffix = ""
        self.doubts = Doubts()
        self.hook = ""  # that is being called, of those around steps
        # how a batch reaches the task
        self.bind_steps()
        self.weighs_batches = False  # once training begins: whether the task has batch_weight
        self.weights: StepWeights
        self.replays_graphs = trainer.compilation.replays_graphs(strategy.device)
        self._transfer_hooks = self._find_transfer_hooks()
        # how a run ends
        self.pulse = Pulse(strategy)
        self.time_is_up = False
        self.finished = self._stop_agreed = False
        self.is_saving = False  # a callback will save this boundary, on all ranks
        self.is_decided = False  # whether the run ends here, as callbacks that save have to know
        # what the bar shows
        self.last_loss: torch.Tensor | None = None
        self.grad_norm: torch.Tensor | None = None
        self.waited_s = 0.0
        self.samples_seen = 0
        self.has_units = False  # the task weighs its micro-batches
        self.weighted_windows = 0
        finds = torch.is_anomaly_enabled()
        self.losses = LossCheck(OperationFinder.over(precision, self._where).told if finds else None)
        self.kept: tuple[Any, MicroBatch] | None = None  # a batch that gave a loss, to stand in for one that gives none
        self._first_micro_batch = 0  # of the step in progress
        self._clock_s = self._validated_at_s = self.pulse.now_s

    # ------------------------------------------------------------------ batches

    def receive(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Bring a batch to the device through the user's transfer hooks."""
        for hook in self._transfer_hooks:
            batch = hook(batch, dataloader_idx)
        return batch

    def bind_steps(self) -> None:
        """Find out what the steps are called with, now that these loaders are open."""
        evaluates_several = len(self.eval_feeds) > 1 or any(feed.in_turn for feed in self.eval_feeds)
        several = dict.fromkeys(("validation_step", "test_step", "predict_step"), evaluates_several)
        several["training_step"] = self.train_feed is not None and self.train_feed.in_turn
        self._step_arguments = {
            step: step_arguments(function, several=of_several)
            for step, of_several in several.items()
            if (function := getattr(self.task, step)) is not None
        }

    def to_host(self, output: Any) -> Any:
        """What a step returned, to be kept: on an accelerator all of it would pile up, or be written over."""
        return output if self.strategy.device.type == "cpu" else move(output, torch.device("cpu"))

    def call_step(self, step: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Run a step of the task with the arguments its signature has."""
        return self.strategy.call(step, *self._step_arguments[step]((batch, batch_idx, dataloader_idx)))

    def _find_transfer_hooks(self) -> list[Callable[[Any, int], Any]]:
        device, dtype = self.strategy.device, self.precision.dtype

        def owner(method: str) -> Any:
            return next((thing for thing in (self.datamodule, self.task) if thing and overrides(thing, method)), None)

        hooks: list[Callable[[Any, int], Any]] = []
        if (before := owner("on_before_batch_transfer")) is not None:
            hooks.append(before.on_before_batch_transfer)
        if (mover := owner("transfer_batch_to_device")) is not None:
            hooks.append(lambda batch, index: mover.transfer_batch_to_device(batch, device, index))
        elif device.type == "cuda":
            copies = CopyStream(device, dtype)
            hooks.append(lambda batch, index: copies.move(batch))
        elif device.type != "cpu" or dtype is not None:
            hooks.append(lambda batch, index: move(batch, device, dtype))
        if self.replays_graphs:
            hooks.append(_mark_step)
        if (after := owner("on_after_batch_transfer")) is not None:
            hooks.append(after.on_after_batch_transfer)
        return hooks

    def measure(self) -> Feed:
        """The training data, with the length of the epoch in progress: it may grow or shrink from one to the next."""
        assert self.train_feed is not None
        self.train_feed.measure(self.progress.position)
        return self.train_feed

    def begin_step(self) -> None:
        """Count micro-batches from here."""
        self._first_micro_batch = self.progress.micro_batches

    def seed_micro_batch(self, micro: MicroBatch) -> None:
        """Key everything random in a training micro-batch by its number in the run."""
        number = self._first_micro_batch + micro.number
        seed_generators(make_key(self.seed, Domain.TRAIN, number))
        self.progress.micro_batches = number + 1
        self.batch_samples = micro.samples

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer moves now: hooks may add to its groups at any time."""
        held: list[torch.nn.Parameter] = []
        for group in self.optimizer.param_groups:
            held += group["params"]
        return held

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of what the optimizer moves."""
        return [parameter.grad for parameter in self.parameters]

    def zero_grad(self) -> None:
        """Drop the gradients of the step before, once it is sure that the optimizer moves the task alone."""
        held = 0
        for group in self.optimizer.param_groups:
            held += len(group["params"])
        if held != self._held:
            check_held(self.task, self.optimizer)
            self._held = held
        if getattr(self.optimizer.zero_grad, "__func__", None) is not _ZERO_GRAD:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self.optimizer.param_groups:  # as torch's does, at the cost of this alone
            for parameter in group["params"]:
                parameter.grad = None

    def end_step(self, window: Window) -> None:
        """The step's micro-batches are used, those of all processes."""
        self._has_updated = False
        self.progress.micro_batches = self._first_micro_batch + len(window.sizes)

    def check_loss(self, loss: torch.Tensor, share: float) -> None:
        """Refuse a NaN or infinite loss; fp16 leaves one with a weight to its scaler."""
        self.last_loss = loss.detach().clone() if self.replays_graphs else loss
        if not (share and self.precision.handles_overflow):
            self.losses.check(loss, share, self._where)

    def check_gradient(self, norm: torch.Tensor) -> None:
        """Refuse a NaN or infinite norm of the gradients; fp16 leaves one to its scaler."""
        if not self.precision.handles_overflow:
            self.losses.check(norm, None, self._where)

    def _where(self) -> Place:
        """The step in progress, its epoch, and its newest micro-batch."""
        return self.progress.step + 1, self.progress.epoch, self.progress.micro_batches - 1

    def count(self, window: Window, weights: StepWeights, *, updated: bool) -> None:
        """Advance by one window."""
        progress, counted = self.progress, weights.counted
        self._has_updated = updated
        progress.advance(window, updated=updated)
        progress.micro_batches = self._first_micro_batch + len(window.sizes)
        if counted or not progress.weight_guess:
            progress.weight_guess = weights.next_guess
        if updated:
            progress.units += weights.total
        self.waited_s += window.waited_s
        self.samples_seen += window.samples
        self.has_units |= counted
        if not self.weighted_windows:
            self.strategy.processes.begin_training()
        self.weighted_windows += bool(weights.total)

    def seed_hooks(self, place: int) -> None:
        """Key what hooks draw at the start (0) and the end (1) of an epoch."""
        seed_generators(make_key(self.seed, Domain.HOOK, self.progress.epoch, place))

    # ------------------------------------------------------------------ values

    def call_hooks(self, name: str) -> None:
        """Call hooks that stand around steps: a number that they log is of this process, not of samples."""
        self.hook = name
        for hook in getattr(self.hooks, name):
            hook()
        self.hook = ""

    def publish(self, metrics: StageMetrics, gather: Gather | None) -> dict[str, float]:
        """Make the values of an epoch known to monitors, `callback_metrics` and the progress bar. Collective."""
        values = metrics.epoch_values(self.task, gather)
        self.published[self.stage] = metrics
        epoch = self.progress.epoch  # not the step: after one epoch a process may have kept as many batches
        self.doubts.look(metrics.of_hooks, {epoch, epoch + 1, *self.metrics.values()})
        self.metrics.update(values)
        self.fresh.update(values)
        self.logged.update(values)
        for scheduler in self.schedulers:
            scheduler.take(values)
        return values

    def forget_values(self) -> None:
        """Those of a sanity check are nobody's."""
        for values in (self.metrics, self.fresh, self.logged, self.published):
            values.clear()
        for scheduler in self.schedulers:
            scheduler.unread, scheduler.known = None, False

    def say_empty(self, stage: str, feed: Feed) -> None:
        """Say once that an evaluation reads nothing from a loader; who misses its values hears of it again."""
        stage = "validate" if stage == "sanity" else stage
        why = f"the loader{f' {feed.name}' if feed.name else ''} to {stage} is empty: {feed.nothing()}"
        if why not in self.empty:
            self.empty.append(why)
            _log.warning("%s. It gives no values", why)

    @property
    def all_have_logged(self) -> bool:
        """Everything that logs has had its turn since this part of the run began: what has no value now never has."""
        return self.has_ended_epoch and (self.has_validated or not self.eval_feeds)

    def read_step_values(self, scheduler: SchedulerConfig) -> None:
        """Show a scheduler what the step in progress has logged. Waits for the device. Collective."""
        values = {name: float(value) for name, value in self.train_metrics.step_values(gather=self.gather).items()}
        self.read_of_steps.update(values)
        scheduler.take(values)

    def move(self, scheduler: SchedulerConfig) -> None:
        """Move a schedule by one.

        Raises:
            ConfigError: It is strict about a monitor that has no value.
        """
        name, never = scheduler.monitor, not scheduler.known or self.all_have_logged
        is_known = name in self.logged or name in self.read_of_steps
        if name is not None and scheduler.strict and never and not is_known:
            known = self.logged | self.read_of_steps
            said = self.of_steps_alone(name) or (
                f"has no value of an epoch or a validation; there are: {', '.join(sorted(known)) or 'none'}. Log it so "
                "(on_epoch=True), set a frequency at which it has one, or set strict: false."
            )
            raise ConfigError(f"lr_scheduler: the monitor {name!r} {said}")
        scheduler.step()

    def of_steps_alone(self, name: str) -> str:
        """What is said of a monitor that has values of single steps only, each of one batch; "" of any other."""
        epoch = next((found[name] for each in self.published.values() if name in (found := each.of_steps())), None)
        if epoch is None:
            return ""
        if epoch in self.logged:
            return f"has values of single steps only, each of one batch; the one of an epoch is {epoch!r}. Write that."
        return (
            f"is logged per step only, and a step's value is that of one batch. Write self.log({name!r}, ..., "
            f"on_step=False, on_epoch=True); or on_epoch=True alone, and {epoch!r} as the monitor."
        )

    @property
    def gather(self) -> Gather | None:
        """`strategy.gather`; None where there is one process, which has nothing to merge."""
        return self.strategy.gather if self.strategy.world_size > 1 else None

    def share_metrics(self) -> None:
        """Let the task's torchmetrics objects compute over all processes, except where these go ways of their own."""
        if self.gather is not None:
            share_metrics(self.task, self.gather, lambda: self.in_train_step or self.in_evaluation_pass)

    def log_step(self) -> None:
        """Let the loggers have the values of this step: now, or once a device has computed them. Collective."""
        if self.is_logged:
            self._row = self._newest_row()
            if not self.strategy.is_asynchronous:
                self.write_row()

    def log_last_step(self) -> None:
        """Let the loggers have the values of the run's last step, if no `log_step` gave them. Collective."""
        progress = self.progress
        if self._is_unlogged:
            self.keep_row()
            step, values = self.kept_row
            self._write(values if step == progress.step else {}, step, progress.epoch - (not progress.in_epoch))

    def keep_row(self) -> None:
        """Keep the values of the newest step, if it was not logged: it may turn out to be the last. Collective."""
        if self._is_unlogged and self._has_updated:
            self.kept_row = self.progress.step, self._newest_row().values(self.gather)

    @property
    def _is_unlogged(self) -> bool:
        return self.is_logged and self.progress.step % self.plan.log_every_n_steps != 0

    def _newest_row(self) -> StepRow:
        return StepRow(self.train_metrics, self.grad_norm, self.progress.step, self.progress.epoch)

    def write_row(self) -> None:
        """Write what `log_step` has left, before anything else is written or saved. Collective."""
        if self._row is not None:
            row, self._row = self._row, None
            self._write(row.values(self.gather), row.step, row.epoch)

    def write(self, values: Mapping[str, float | torch.Tensor]) -> None:
        """Give values to every logger at the current step."""
        self._write({name: float(value) for name, value in values.items()}, self.progress.step, self.progress.epoch)

    def _write(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        if values:
            for logger in self.loggers:
                logger.log_metrics(values, step, epoch)

    # ------------------------------------------------------------------ what is due

    def validation_due(self, window: Window, *, updated: bool) -> bool:
        """Whether the plan asks for a validation now, after a window."""
        plan, progress = self.plan, self.progress
        if not self.eval_feeds or (progress.epoch + 1) % plan.val_every_n_epochs:
            return False
        if plan.val_every_n_steps is not None:
            return updated and progress.step % plan.val_every_n_steps == 0
        if plan.val_every_s is not None:
            return self.pulse.now_s - self._validated_at_s >= plan.val_every_s
        fraction = plan.val_every_epoch_fraction
        if fraction is None:
            return False
        if fraction == 1.0:
            return window.last
        assert self.train_feed is not None
        batches = plan.batches("train", self.train_feed)
        assert batches is not None  # Plan.check_validation
        done = progress.batches
        before = done - len(window.sizes)
        return int(done / (batches * fraction) + 1e-9) > int(before / (batches * fraction) + 1e-9)

    def validation_done(self) -> None:
        """The validation of this step is complete."""
        self.progress.validation_due = False
        self.has_validated = True
        self._validated_at_s = self.pulse.now_s

    def start_weighing(self) -> None:
        """Training begins now: hooks that could give the task a `batch_weight` are over."""
        strategy, self.weighs_batches = self.strategy, overrides(self.task, "batch_weight")
        self.weights = StepWeights(
            by_task=self.weighs_batches, world=strategy.world_size, scaled=self.precision.handles_overflow,
            begin_agreement=strategy.begin_agreement if strategy.world_size > 1 else None, gather=self.gather,
        )  # fmt: skip

    def start_clock(self) -> None:
        """Training begins now; what came before does not count."""
        self._clock_s = self._validated_at_s = self.pulse.now_s
        self.tick()

    def tick(self) -> None:
        """Read the clock, at boundaries only, and decide whether the run ends here. Collective."""
        self.pulse.beat()
        now_s = self.pulse.now_s
        self.progress.elapsed_s += now_s - self._clock_s
        self._clock_s = now_s
        if self.plan.max_time_s is not None:
            self.time_is_up = self.progress.elapsed_s >= self.plan.max_time_s

    def agree(self, *wishes: bool) -> list[bool]:
        """Look at the clocks, for signals, and whether a callback wants to end the run, now; of any rank.

        Collective: at the start, after a validation or an epoch, and where a checkpoint is due.

        Args:
            wishes: Of this process.

        Returns:
            Of each whether some process has it.
        """
        wants_to_stop, *others = self.pulse.agree(self.progress.should_stop, *wishes)
        if self.strategy.world_size > 1:
            self.progress.should_stop = self._stop_agreed = wants_to_stop
        return others

    def leave(self) -> None:
        """A stop was asked for: where it ends the run here, find out whether it does on every rank.

        Raises:
            TrainingError: Others go on.
        """
        strategy = self.strategy
        if strategy.world_size == 1 or self._stop_agreed or self.limit_reached != _STOPPED:
            return
        if self.pulse.stop_signal is not None:
            return  # all leave here
        if self.weighs_batches:
            strategy.processes.sum([0.0])  # those who go on begin their step with that
        StepWeights.leave(strategy.agree_in_next_step, strategy.world_size)
        self._stop_agreed = True

    @property
    def limit_reached(self) -> str | None:
        """Why the run is over, or None; a step whose validation is due is not done."""
        plan, progress = self.plan, self.progress
        if progress.validation_due:
            return None
        if plan.max_steps is not None and progress.step >= plan.max_steps:
            return f"max_steps={plan.max_steps} reached"
        if plan.max_epochs is not None and progress.epoch >= plan.max_epochs:
            return f"max_epochs={plan.max_epochs} reached"
        if self.time_is_up:
            return f"max_time of {plan.max_time_s:g} s reached"
        return _STOPPED if progress.should_stop and self.may_stop else None

    @property
    def may_stop(self) -> bool:
        """The minimum of steps and epochs is reached, so that a callback's or the user's wish to stop is granted."""
        return self.progress.step >= self.plan.min_steps and self.progress.epoch >= self.plan.min_epochs

    @property
    def is_ending(self) -> bool:
        """This boundary is the last one, as all know in `on_boundary_end`: the run is over, or was asked to leave."""
        return self.finished or self.pulse.stop_signal is not None

    def close(self) -> None:
        """End the loaders' workers; the task is again one without a run, whose `log` does nothing."""
        self.stage = ""
        if self.step_guard is not None:
            self.step_guard.remove()
        self.close_feeds()
        unshare_metrics(self.task)

    def close_feeds(self) -> None:
        """End the loaders' workers."""
        for feed in (self.train_feed, *self.eval_feeds):
            if feed is not None:
                feed.close()

    def progress_state(self) -> dict[str, Any]:
        """Progress as plain data."""
        return {item.name: getattr(self.progress, item.name) for item in fields(Progress)}


def _mark_step(batch: Any, _: int) -> Any:
    """What compiled modules returned for the batch before may be written over from here on."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return batch
