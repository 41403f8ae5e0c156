"""RunView: the part of a trainer that callbacks and tasks may read."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from signal import SIGTERM
from typing import Any, Literal, NoReturn, Self, final

import torch

from lumen import console
from lumen.callbacks import Callback, EarlyStopping, ModelCheckpoint, ProgressBar, savers_of
from lumen.data.adapter import LoaderAdapter
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import at_least
from lumen.errors.lightning_names import ATTRIBUTES
from lumen.loggers import Logger
from lumen.metrics.step_values import for_the_bar
from lumen.run.gradients import total_norm
from lumen.run.open_loaders import open_loaders
from lumen.run.plan import Plan, Progress
from lumen.run.run import Run
from lumen.run.step_context import begun_in_step
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule

Status = Literal["initializing", "running", "finished", "interrupted"]
#: Lightning's names of what a run does at a moment, by Lumen's.
_STAGES: dict[str, str | None] = {"fit": "train", "sanity": "sanity_check", "": None}


@final
@dataclass(frozen=True)
class TrainerState:
    """What a trainer does, in plain words, which compare equal to Lightning's enumerations.

    Attributes:
        status: "initializing" before the first run, "running", "finished"; "interrupted" by an error or a stop request.
        fn: The call that is running or was the last one: "fit", "validate", "test" or "predict"; None before it.
        stage: What it does now: "train", "sanity_check", "validate", "test" or "predict"; None when it is over.
    """

    status: Status
    fn: str | None
    stage: str | None

    @property
    def finished(self) -> bool:
        """The last run has ended as it should."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """No run is in progress, but there was one."""
        return self.status in ("finished", "interrupted")


class RunView:
    """Trainer as callbacks and tasks read it; nothing here changes a run, but for `should_stop`.

    `Trainer` is its one child: what a callback may use is in one place, how a run is made in another. The names are
    Lightning's, but for those that docs/site/trainer.md lists as Lumen's own. Arguments of the trainer are as they are
    after `fast_dev_run` and `overfit_batches`, and none can be set afterwards.

    Attributes:
        plan: How long the run is and what happens when.
        strategy: On which devices tasks lie, and how a step is computed there.
        callbacks: Those that were given, and the default ones.
        loggers: Where its record goes beside `metrics.csv`, or that alone; empty: there is none.
        run_directory: Where it writes; None if it writes nothing.
    """

    plan: Plan
    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    run_directory: Path | None
    _run: Run | None
    _status: Status
    _fn: str | None
    _given_optimizers: Callable[[], Any] | None = None
    _counted: Progress | None = None  # of the newest fit
    _command = ""  # first words of a command that trains, such as "lumen fit"

    def __getattr__(self, name: str) -> NoReturn:
        """Say what is read in place of an attribute that only Lightning's trainer has.

        Raises:
            AttributeError: There is none of this name.
        """
        if hasattr(type(self), name):  # one that has failed for want of another
            object.__getattribute__(self, name)
        near = difflib.get_close_matches(name, [each for each in dir(type(self)) if not each.startswith("_")])
        hint = ATTRIBUTES.get(name) or (f"Did you mean {' or '.join(near)}?" if near else "")
        raise AttributeError(f"{type(self).__name__} has no attribute {name}. {hint}".rstrip())

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> Any:
        """Refuse to pickle a run, whose data, devices and processes stay where they are.

        Raises:
            ConfigError: The trainer has run.
        """
        if self._run is not None:
            raise ConfigError(
                "a Trainer that has run cannot be pickled. Pickle what is needed of it, such as "
                "trainer.callback_metrics or task.state_dict(), or make a new Trainer with the same arguments."
            )
        return super().__getstate__()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what a run would never read.

        Raises:
            ConfigError: It is an argument, or what a run tells; or it is an attribute of Lightning's trainer alone.
        """
        found = getattr(type(self), name, None)
        if name in ATTRIBUTES or (isinstance(found, property) and found.fset is None):
            given = name in inspect.signature(type(self).__init__).parameters
            hint = f"Give it to Trainer({name}=...)." if given else ATTRIBUTES.get(name, "It can only be read.")
            raise ConfigError(f"{type(self).__name__}.{name} cannot be set. {hint}")
        super().__setattr__(name, value)

    @classmethod
    def add_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Not here: a command line is `lumen.CLI`.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError(
            "Trainer.add_argparse_args is of Lightning 1. Use lumen.CLI, which has the trainer's options."
        )

    @classmethod
    def from_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Not here; see `add_argparse_args`.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError("Trainer.from_argparse_args is of Lightning 1. Use lumen.CLI, or write Trainer(**settings).")

    @property
    def run(self) -> Run:
        """The run in progress, or the last one: its parts, for callbacks that need more than the trainer shows.

        The parts (`progress`, `values`, `ending`, `saves`, ...) are listed in `lumen.run.run.Run`. Their members may
        change from one version to the next.

        Raises:
            ConfigError: None has been started.
        """
        if self._run is None:
            raise ConfigError("this trainer has not started a run yet; call fit, validate, test or predict.")
        return self._run

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`, which an evaluation leaves as they are; 0 before it."""
        return 0 if self._counted is None else self._counted.step

    @property
    def current_epoch(self) -> int:
        """Epochs completed, likewise."""
        return 0 if self._counted is None else self._counted.epoch

    @property
    def state(self) -> TrainerState:
        """What the trainer does: `status`, `fn` and `stage`, `finished` and `stopped`."""
        stage = "" if self._run is None else self._run.stage
        return TrainerState(self._status, self._fn, _STAGES.get(stage, stage))

    @property
    def interrupted(self) -> bool:
        """The last run has ended by an error, or because it was asked to."""
        return self._status == "interrupted"

    @property
    def lightning_module(self) -> TaskModule | None:
        """The task of the run in progress, or of the last one; None before it. Nothing is wrapped around it."""
        return None if self._run is None else self._run.task

    @property
    def model(self) -> TaskModule | None:
        """The same as `lightning_module`."""
        return self.lightning_module

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint whose parameters the run has read; None: of none."""
        checkpoint = None if self._run is None else self._run.checkpoint
        return None if checkpoint is None else str(checkpoint.path)

    @property
    def should_stop(self) -> bool:
        """Set it to True, on one rank or on all, to end training at the end of the step in progress.

        That holds in every hook and step of the task and of callbacks. Elsewhere (in a thread, in the hooks of a
        callback that says `stops_at_steps = False`), several processes hear of it in the step after it.
        """
        return self._run is not None and self._run.progress.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.run.ending.is_decided and not self.should_stop:
            raise TrainingError(
                "should_stop was set in on_step_checkpoint, where it is decided whether the run ends here. "
                "Set it in on_step_end."
            )
        self.run.ending.request_stop(value=value)

    def skip_update(self) -> None:
        """Make no update of the step in progress: its batches are used, but no step is counted, no schedule moves.

        To be called in `on_before_optimizer_step`, on every rank; elsewhere it is a `TrainingError`.
        """
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("skip_update: no update is about to be made. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()

    def roll_back(self, before: int = 0, after: int = 0) -> None:
        """Undo the step in progress, and go on from a checkpoint without it and so many steps around it.

        The run is closed and opened again, as one that goes on after a kill, from its newest checkpoint that is older
        than all that is left out; newer ones are removed. The batches left out count as used and as no step. Where
        there is no such checkpoint, the run ends with a `TrainingError`. To be called within a training step, on every
        rank; elsewhere it is a `TrainingError`.

        Args:
            before: Steps before this one that are left out too, >= 0; each as many micro-batches as this one.
            after: Steps after it, likewise.
        """
        at_least(0, before=before, after=after)
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("roll_back: no step is in progress. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()
        self.run.ending.roll_back(before, after)

    @property
    def progress(self) -> Progress:
        """How far the run is; to be read only."""
        return self.run.progress

    def request_agreement(self) -> None:
        """Have all processes agree, after `on_step_end`, whether the run ends at this boundary: before it is saved.

        To be called in `on_step_end`, on every rank.
        """
        self.run.ending.request_agreement()

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""
        return self._is_in("sanity")

    @property
    def training(self) -> bool:
        """True during training steps."""
        return self._is_in("fit")

    @property
    def validating(self) -> bool:
        """True during validation."""
        return self._is_in("validate")

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self._is_in("test")

    @property
    def predicting(self) -> bool:
        """True during prediction."""
        return self._is_in("predict")

    @property
    def evaluating(self) -> bool:
        """True during validation, the sanity check and a test."""
        return self._is_in("validate", "sanity", "test")

    def _is_in(self, *stages: str) -> bool:
        return self._run is not None and self._run.stage in stages

    @property
    def received_sigterm(self) -> bool:
        """This process was sent SIGTERM: the run leaves once all know of it."""
        return self._run is not None and self._run.ending.vote.requested == SIGTERM

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, in a list; of a task that optimizes by hand all that it has."""
        if not hasattr(self.run.optim, "optimizer"):
            raise ConfigError("there is no optimizer: it exists during fit, once configure_optimizers has returned.")
        return list(self.run.optim.optimizers)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers and when they step."""
        return list(self.run.optim.schedulers)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str | None:
        """The run directory."""
        return None if self.run_directory is None else str(self.run_directory)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every `ModelCheckpoint`; the first is `checkpoint_callback`."""
        return savers_of(self.callbacks)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The `ModelCheckpoint` that says which checkpoint is best: the first with a monitor, else the first."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every `EarlyStopping`, in their order."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first of them."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The progress bar."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # ------------------------------------------------------------------ values

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The newest value of every logged name: a tensor without dimensions, on the CPU. Waits for the device.

        Tensors are float64 if a parameter of the task is, else float32; `newest_values` has all digits.
        """
        if self._run is None:
            return {}
        is_double = any(parameter.dtype is torch.float64 for parameter in self._run.task.parameters())
        dtype = torch.float64 if is_double else torch.float32
        return {name: torch.tensor(value, dtype=dtype) for name, value in self.newest_values.items()}

    @property
    def newest_values(self) -> dict[str, float]:
        """The newest value of every logged name, with all digits. Waits for the device.

        Values of an epoch or a validation are the same on every rank, of what all ranks have seen; values of the step
        in progress are of this rank's micro-batches. A name logged as `x_step` and `x_epoch` is there as `x` too: the
        newest of both.
        """
        run, steps = self.run, dict[str, Any](self.run.log.train.step_values())
        values = run.values.newest | steps if run.log.in_train_step else steps | run.values.newest
        for name, (of_step, of_epoch) in run.values.forks(run.log.train).items():
            ended = of_epoch in run.values.updated or not (run.progress.in_epoch and of_step in steps)
            if newest := [each for each in (of_epoch, of_step) if each in values]:
                values[name] = values[newest[0] if ended else newest[-1]]
        return {name: float(value) for name, value in values.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Those of `callback_metrics` that loggers are given, under the names that they have there."""
        if self._run is None:
            return {}
        train = self._run.log.train
        left_out = self._run.values.unlogged(train) | self._run.values.forks(train).keys()
        return {name: value for name, value in self.callback_metrics.items() if name not in left_out}

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """What the newest training step has logged with `prog_bar=True`, else its loss. Waits for no device.

        Tensors have no dimensions, and lie where the step has put them; values are of this rank.
        """
        values: dict[str, float | torch.Tensor] = self.run.log.train.step_values(for_the_bar)
        if not values and self.run.step.loss is not None:
            values = {"loss": self.run.step.loss}
        return values

    def step_loss(self) -> torch.Tensor:
        """The mean loss of the step over all processes, in `on_before_optimizer_step`: a scalar tensor. Collective.

        Raises:
            ConfigError: No callback has `reads_step_loss = True`, so it was not kept; or the task optimizes by hand.
        """
        if self.run.optim.manual is not None:
            raise ConfigError(
                f"trainer.step_loss(): {type(self.run.task).__name__} optimizes by hand, so that Lumen does not know "
                "which of its losses is the step's. Log that one, and read trainer.callback_metrics."
            )
        if (parts := self.run.step.weighting.losses) is None:
            raise ConfigError(
                "trainer.step_loss(): the losses of a step are kept for callbacks that say so. Write reads_step_loss = "
                "True in the class of yours."
            )
        own = torch.stack(parts).sum() if parts else torch.zeros((), device=self.strategy.device)
        return self.run.step.weighting.mean(own, self.strategy.reduce)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the step's gradient, in `on_before_optimizer_step` that before clipping: a scalar. Collective."""
        return total_norm(dict.fromkeys(self.run.optim.parameters))  # optimizers by hand may share some

    # ------------------------------------------------------------------ arguments, and processes

    @property
    def max_steps(self) -> int:
        """The limit; -1: there is none."""
        return -1 if self.plan.max_steps is None else self.plan.max_steps

    @property
    def max_epochs(self) -> int:
        """The limit; -1: there is none."""
        return -1 if self.plan.max_epochs is None else self.plan.max_epochs

    @property
    def min_steps(self) -> int:
        """Optimizer updates before a callback may stop the run."""
        return self.plan.min_steps

    @property
    def min_epochs(self) -> int:
        """Epochs before a callback may stop the run."""
        return self.plan.min_epochs

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step in each process, in the epoch in progress; with `global_batch_size` they follow.

        Raises:
            ConfigError: They follow from the training loader, which is not open yet.
        """
        if self.plan.global_batch_size is None:
            return self.plan.accumulate_in(self.current_epoch)
        loader = None if self._run is None else self._run.loaders.train
        if loader is None:
            raise ConfigError(
                "accumulate_grad_batches: it follows from global_batch_size and the training loader, which is not open "
                "yet. Read it during fit."
            )
        return math.ceil(loader.per_step / self.strategy.data_world_size)

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest gradient norm or element; None: nothing is clipped."""
        return self.plan.clip_value if self.plan.clip_norm is None else self.plan.clip_norm

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """By "norm" or by "value"; None: nothing is clipped."""
        return None if self.gradient_clip_val is None else "value" if self.plan.clip_norm is None else "norm"

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """When to validate: optimizer steps as an int, a share of an epoch as a float, or a duration."""
        if self.plan.val_every_s is not None:
            return timedelta(seconds=self.plan.val_every_s)
        every, share = self.plan.val_every_n_steps, self.plan.val_every_epoch_fraction
        return every if every is not None else share if share is not None else 1.0

    @property
    def check_val_every_n_epoch(self) -> int:
        """Validate in every n-th epoch only."""
        return self.plan.val_every_n_epochs

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Validation batches to try before training; infinite: all."""
        return math.inf if self.plan.sanity_batches < 0 else self.plan.sanity_batches

    @property
    def limit_train_batches(self) -> int | float:
        """A count, or a share, of the batches of an epoch."""
        return self._limit("train")

    @property
    def limit_val_batches(self) -> int | float:
        """Likewise for validation."""
        return self._limit("validate")

    @property
    def limit_test_batches(self) -> int | float:
        """Likewise for test."""
        return self._limit("test")

    @property
    def limit_predict_batches(self) -> int | float:
        """Likewise for prediction."""
        return self._limit("predict")

    @property
    def overfit_batches(self) -> int | float:
        """A count, or a share, of the batches that every epoch repeats; 0.0: off."""
        return self._limit("train") if self.plan.same_batches else 0.0

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """New loaders are asked for at the start of every n-th epoch; 0: never."""
        return self.plan.reload_every_n_epochs

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two written values."""
        return self.plan.log_every_n_steps

    def _limit(self, stage: str) -> int | float:
        limit = self.plan.limits.get(stage)
        return 1.0 if limit is None else limit

    @property
    def processes(self) -> Processes:
        """Who takes part in the run, and what of plain data they tell each other."""
        return self.strategy.processes

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.processes.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self.processes.node

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return self.processes.nodes

    @property
    def num_devices(self) -> int:
        """Devices of this node that the run uses; a process has one."""
        return self.processes.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Their numbers on this node."""
        return list(range(self.num_devices))

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print once, in the first process, above the progress bar."""
        if self.is_global_zero:
            console.print_values(*values, sep=sep, end=end)

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""
        return self.processes.is_global_zero

    # ------------------------------------------------------------------ data

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run."""
        return self.run.loaders.datamodule

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules that need their length, as long as the data is now.

        Raises:
            ConfigError: Neither `max_steps` nor `max_epochs` with a loader of known length says so.
        """
        if self.run.loaders.train is None:
            open_loaders(self.run)
        return self.plan.total_steps(self.run.loaders.epoch_lengths())

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch, as one process would count; infinite if the loader has no length."""
        if (adapter := self.run.loaders.train) is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self._batches("train", adapter)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of the epoch in progress, as long as the data is now; None if the loader has no length."""
        if self.run.loaders.train is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        lengths = self.run.loaders.epoch_lengths()
        return None if lengths is None else lengths.of(self.run.progress.epoch)

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or several, as the user gave them; None before they are opened.

        A run reads it in its own way, so that a look at it changes nothing; with several processes it is that of all.
        """
        return self._source("fit")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or several, likewise."""
        return self._source("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, or several, likewise."""
        return self._source("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, or several, likewise."""
        return self._source("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader that the sanity check tries, as one process would count."""
        return self._of_evaluation("sanity", "fit")

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader, as one process would count; infinite for one without a length."""
        return self._of_evaluation("validate", "fit", "validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader, likewise."""
        return self._of_evaluation("test", "test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each prediction loader, likewise."""
        return self._of_evaluation("predict", "predict")

    @property
    def enable_validation(self) -> bool:
        """`fit` has a validation; known once its loaders are open, before `on_fit_start`."""
        return bool(self.num_val_batches)

    @property
    def is_last_batch(self) -> bool:
        """The micro-batch of this process in progress, or the newest one, is its last of the epoch.

        Raises:
            ConfigError: The loader has no length, so that only its end will tell.
        """
        run, batches = self.run, self.num_training_batches
        if batches == math.inf:
            raise ConfigError("is_last_batch: the training loader has no length, so that only its end will tell.")
        if not run.log.in_train_step:
            return run.progress.batches >= batches
        others = run.strategy.data_world_size - 1 if run.task.automatic_optimization else 0
        return run.progress.batches + begun_in_step(run.step) + others >= batches

    @property
    def is_epoch_end(self) -> bool:
        """All batches of the epoch are done, in a validation or `on_train_epoch_end`; False if the run ends before."""
        return self.run.ending.ends_epoch

    def _source(self, stage: str) -> Any:
        return None if self._run is None else self._run.loaders.sources.get(stage)

    def _of_evaluation(self, stage: str, *runs: str) -> list[int | float]:
        if self._run is None or self._fn not in runs:
            return []
        return [self._batches(stage, adapter) for adapter in self._run.loaders.evaluation]

    def _batches(self, stage: str, adapter: LoaderAdapter) -> int | float:
        batches = self.plan.batches(stage, adapter)
        return math.inf if batches is None else batches
