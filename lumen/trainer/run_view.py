"""`RunView`: the part of a trainer that callbacks and tasks may read."""

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
from lumen.callbacks import Callback, EarlyStopping, ModelCheckpoint, ProgressBar, get_checkpoint_callbacks
from lumen.data.adapter import LoaderAdapter
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import check_at_least
from lumen.errors.lightning_names import ATTRIBUTES, INSTEAD_OF_SETTING
from lumen.loggers import Logger
from lumen.metrics.step_values import is_for_progress_bar
from lumen.run.gradients import compute_total_norm
from lumen.run.open_loaders import open_loaders
from lumen.run.plan import Plan, Progress
from lumen.run.run import Run
from lumen.run.step_context import count_micro_batches_started
from lumen.strategies import Strategy, count_training_parts
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule

Status = Literal["initializing", "running", "finished", "interrupted"]
#: Lightning's names of the stages of a run, by Lumen's names.
_STAGES: dict[str, str | None] = {"fit": "train", "sanity": "sanity_check", "": None}


@final
@dataclass(frozen=True)
class TrainerState:
    """State of a trainer, as strings that compare equal to Lightning's enumerations.

    Attributes:
        status: "initializing" before the first run, "running", "finished", or "interrupted" by an error or a stop
            request.
        fn: The running or last call: "fit", "validate", "test" or "predict"; None before the first call.
        stage: The present stage: "train", "sanity_check", "validate", "test" or "predict"; None outside of a run.
    """

    status: Status
    fn: str | None
    stage: str | None

    @property
    def finished(self) -> bool:
        """True if the last run has finished without an error or a stop request."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """True if the last run has ended, for any reason."""
        return self.status in ("finished", "interrupted")


class RunView:
    """View of a trainer for callbacks and tasks. Only `should_stop` and a few methods change the run.

    `RunView` has the members that callbacks use. Its only subclass, `Trainer`, adds `fit`, `validate` and the like. The
    names are Lightning's, except for the names that docs/site/trainer.md lists as Lumen's own. Attributes named like
    arguments of the trainer are read only. With `fast_dev_run` or `overfit_batches`, these attributes may differ from
    the arguments.

    Attributes:
        plan: Length of the run, and the steps at which Lumen validates and logs.
        strategy: The strategy, which places tasks on devices and computes steps there.
        callbacks: The given and the default callbacks.
        loggers: The given loggers, or the logger of `metrics.csv` by default; empty without loggers.
        run_directory: The run directory; None if the run writes nothing.
    """

    plan: Plan
    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    run_directory: Path | None
    _run: Run | None
    _status: Status
    _fn: str | None
    _configure_optimizers: Callable[[], Any] | None = None
    _shown_progress: Progress | None = None  # progress of the newest fit
    _has_user_loggers = False  # True if the argument `logger` has a name or an object
    _evaluation_directory: Path | None = None  # record of evaluations before the first fit
    _command = ""  # first words of a command that trains, such as "lumen fit"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error that names the replacement of an attribute of Lightning's trainer.

        Raises:
            AttributeError: The trainer has no attribute of this name.
        """
        if hasattr(type(self), name):  # a property that raised an AttributeError: raise that error again
            object.__getattribute__(self, name)
        similar = difflib.get_close_matches(name, [each for each in dir(type(self)) if not each.startswith("_")])
        hint = ATTRIBUTES.get(name) or (f"Did you mean {' or '.join(similar)}?" if similar else "")
        raise AttributeError(f"{type(self).__name__} has no attribute {name}. {hint}".rstrip())

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> Any:
        """Refuse to pickle a trainer that has run, because its data, devices and processes cannot move.

        Raises:
            ConfigError: The trainer has run.
        """
        if self._run is not None:
            raise ConfigError(
                "a Trainer that has run cannot be pickled. Pickle the values that you need, such as "
                "trainer.callback_metrics or task.state_dict(), or make a new Trainer with the same arguments."
            )
        return super().__getstate__()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set an attribute that a run never reads.

        Raises:
            ConfigError: The name is an argument of the trainer, a read-only property, or an attribute of Lightning's
                trainer only.
        """
        found = getattr(type(self), name, None)
        if name in ATTRIBUTES or (isinstance(found, property) and found.fset is None):
            is_argument = name in inspect.signature(type(self).__init__).parameters
            other = ATTRIBUTES.get(name) or INSTEAD_OF_SETTING.get(name, f"{name} is read-only.")
            hint = f"Write Trainer({name}=...)." if is_argument else other
            raise ConfigError(f"{type(self).__name__}.{name} cannot be set. {hint}")
        super().__setattr__(name, value)

    @classmethod
    def add_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise an error that names the replacement: `lumen.CLI`.

        Raises:
            ConfigError: Always, with the code to write instead.
        """
        raise ConfigError(
            "Trainer.add_argparse_args is of Lightning 1. Use lumen.CLI, which has the trainer's options."
        )

    @classmethod
    def from_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise an error that names the replacement: `lumen.CLI`.

        Raises:
            ConfigError: Always, with the code to write instead.
        """
        raise ConfigError("Trainer.from_argparse_args is of Lightning 1. Use lumen.CLI, or write Trainer(**settings).")

    @property
    def run(self) -> Run:
        """Run in progress, or the last run, for callbacks that need more than the trainer shows.

        `lumen.run.run.Run` lists its parts (`progress`, `values`, `ending`, `saves`, ...). Their members may change
        between versions.

        Raises:
            ConfigError: The trainer has not started a run yet.
        """
        if self._run is None:
            raise ConfigError("this trainer has not started a run yet; call fit, validate, test or predict.")
        return self._run

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`; 0 before the first `fit`. Evaluations do not change it."""
        return 0 if self._shown_progress is None else self._shown_progress.step

    @property
    def current_epoch(self) -> int:
        """Epochs completed by the newest `fit`; 0 before the first `fit`."""
        return 0 if self._shown_progress is None else self._shown_progress.epoch

    @property
    def state(self) -> TrainerState:
        """State of the trainer: `status`, `fn`, `stage`, `finished` and `stopped`."""
        stage = "" if self._run is None else self._run.stage
        return TrainerState(self._status, self._fn, _STAGES.get(stage, stage))

    @property
    def interrupted(self) -> bool:
        """True if an error or a stop request ended the last run."""
        return self._status == "interrupted"

    @property
    def lightning_module(self) -> TaskModule | None:
        """Task of the run in progress, or of the last run; None before the first run. No wrapper surrounds the task."""
        return None if self._run is None else self._run.task

    @property
    def model(self) -> TaskModule | None:
        """Same object as `lightning_module`."""
        return self.lightning_module

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint from which the run has read its parameters, or None."""
        checkpoint = None if self._run is None else self._run.checkpoint
        return None if checkpoint is None else str(checkpoint.path)

    @property
    def should_stop(self) -> bool:
        """Request to end training. Set True, on one rank or on all, to end training after the step in progress.

        Every hook, and every step of the task, may set `should_stop`. A run on several processes stops one step later
        if a thread, or a callback with `may_stop_at_steps = False`, sets `should_stop`.
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
        """Skip the update of the step in progress.

        The batches of the step count as used, but the step does not count and no schedule moves. Every rank must call
        this in `on_before_optimizer_step`. Elsewhere it raises a `TrainingError`.
        """
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("skip_update: no update is about to be made. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()

    def roll_back(self, before: int = 0, after: int = 0) -> None:
        """Undo the step in progress: resume from a checkpoint, and leave out this step and some steps around it.

        Lumen closes the run and reopens it, as after a kill, from the newest checkpoint that is older than all left-out
        steps. Lumen removes newer checkpoints. Left-out batches count as used, but not as steps. If no
        checkpoint is older than all left-out steps, the run ends with a `TrainingError`.

        Every rank must call this within a training step. Elsewhere it raises a `TrainingError`.

        Args:
            before: Number of earlier steps to leave out as well, >= 0. Lumen assumes that each earlier step
                had as many micro-batches as this step.
            after: Number of later steps to leave out as well, >= 0.
        """
        check_at_least(0, before=before, after=after)
        if not self.run.log.in_train_step or self.run.step.is_updating:
            raise TrainingError("roll_back: no step is in progress. Call it in on_before_optimizer_step.")
        self.run.step.skip_update()
        self.run.ending.roll_back(before, after)

    @property
    def progress(self) -> Progress:
        """Progress of the run; read only."""
        return self.run.progress

    def request_stop_vote(self) -> None:
        """Request a vote of all processes on whether the run ends at this step.

        The vote takes place after `on_step_end` and before Lumen saves.

        Every rank must call this, in `on_step_end`.
        """
        self.run.ending.request_stop_vote()

    @property
    def sanity_checking(self) -> bool:
        """True during the sanity check."""
        return self._is_in_stage("sanity")

    @property
    def training(self) -> bool:
        """True during training steps."""
        return self._is_in_stage("fit")

    @property
    def validating(self) -> bool:
        """True during validation."""
        return self._is_in_stage("validate")

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self._is_in_stage("test")

    @property
    def predicting(self) -> bool:
        """True during prediction."""
        return self._is_in_stage("predict")

    @property
    def evaluating(self) -> bool:
        """True during validation, the sanity check or a test."""
        return self._is_in_stage("validate", "sanity", "test")

    def _is_in_stage(self, *stages: str) -> bool:
        return self._run is not None and self._run.stage in stages

    @property
    def received_sigterm(self) -> bool:
        """True if this process has received SIGTERM. The run ends as soon as all processes know."""
        return self._run is not None and self._run.ending.vote.requested_signal == SIGTERM

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """List with the optimizer; all of the task with manual optimization; empty before configure_optimizers."""
        has_any = self._run is not None and hasattr(self._run.optim, "optimizer")
        return list(self.run.optim.optimizers) if has_any else []

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Schedulers, each with its interval and frequency."""
        return [] if self._run is None else list(self._run.optim.schedulers)

    @property
    def logger(self) -> Logger | None:
        """First logger, or None."""
        return next(iter(self.loggers), None)

    @property
    def log_dir(self) -> str | None:
        """Run directory, or the directory in which an evaluation writes to your loggers; None without files."""
        directory = self.run_directory or self._evaluation_directory
        return None if directory is None else str(directory)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All `ModelCheckpoint` callbacks, in order."""
        return get_checkpoint_callbacks(self.callbacks)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """`ModelCheckpoint` that decides which checkpoint is best: the first with a monitor, else the first."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """All `EarlyStopping` callbacks, in order."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """First `EarlyStopping` callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """Progress bar, or None."""
        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    # ------------------------------------------------------------------ values

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Newest value of every logged name: a tensor without dimensions, on the CPU. Waits for the device.

        Tensors are float64 if a parameter of the task is float64, else float32; `newest_values` has all digits.
        """
        if self._run is None:
            return {}
        is_double = any(parameter.dtype is torch.float64 for parameter in self._run.task.parameters())
        dtype = torch.float64 if is_double else torch.float32
        return {name: torch.tensor(value, dtype=dtype) for name, value in self.newest_values.items()}

    @property
    def newest_values(self) -> dict[str, float]:
        """Newest value of every logged name, with all digits. Waits for the device.

        Values of an epoch or a validation cover all ranks, and are equal on every rank. Values of the step in progress
        cover this rank's micro-batches. A name logged as `x_step` and `x_epoch` also appears as `x`: the newer of the
        two values.
        """
        run, steps = self.run, dict[str, Any](self.run.log.train.compute_step_values(has_earlier=True))
        values = run.values.newest | steps if run.log.in_train_step else steps | run.values.newest
        begun = run.log.train.map_published_names() if run.progress.in_epoch else {}
        for name, (of_step, of_epoch) in run.values.get_forked_names(run.log.train).items():
            ended = of_epoch in run.values.updated or name not in begun
            if newest := [each for each in (of_epoch, of_step) if each in values]:
                values[name] = values[newest[0] if ended else newest[-1]]
        return {name: float(value) for name, value in values.items()}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """Values that loggers receive, under the names that loggers receive. Waits for the device.

        Besides entries of `callback_metrics` these are the values of single evaluation batches, logged with `on_step`.
        """
        if (run := self._run) is None:
            return {}
        train, values = run.log.train, self.callback_metrics
        left_out = run.values.get_unlogged_names(train) | run.values.get_forked_names(train).keys()
        steps = run.values.get_evaluation_steps(run.log.stage if run.log.stage is not train else None)
        found = {name: torch.tensor(float(value)) for name, value in steps.items()}
        return found | {name: value for name, value in values.items() if name not in left_out}

    @property
    def progress_bar_metrics(self) -> dict[str, float | torch.Tensor]:
        """Newest values that were logged with `prog_bar=True`. Does not wait for a device.

        Values of steps are tensors without dimensions on the device of the step, and cover this rank only. Values of
        epochs and evaluations are floats.
        """
        if self._run is None:
            return {}
        steps: dict[str, float | torch.Tensor] = self._run.log.train.compute_step_values(
            is_for_progress_bar, has_earlier=True
        )
        return steps | self._run.values.get_progress_bar_values()

    def step_loss(self) -> torch.Tensor:
        """Return the mean loss of the step over all processes, a scalar tensor, in `on_before_optimizer_step`.

        Collective: every rank must call this.

        Raises:
            ConfigError: No callback has `needs_step_loss = True`, so Lumen did not keep the losses; or the task uses
                manual optimization.
        """
        if self.run.optim.manual is not None:
            raise ConfigError(
                f"trainer.step_loss(): {type(self.run.task).__name__} uses manual optimization, so Lumen does not "
                "know the loss of the step. Log it, and read trainer.callback_metrics."
            )
        if (parts := self.run.step.weighting.losses) is None:
            raise ConfigError(
                "trainer.step_loss(): Lumen keeps the losses of a step only on request. Write needs_step_loss = True "
                "in your callback class."
            )
        return self.run.step.weighting.compute_mean_loss(parts, self.processes.all_reduce_sum)

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the step's gradient: a scalar tensor.

        In `on_before_optimizer_step` the gradient is not clipped yet. Collective: every rank must call this.
        """
        optim = self.run.optim
        return compute_total_norm(dict.fromkeys(optim.parameters), exact=optim.is_exact)  # manual ones may share them

    # ------------------------------------------------------------------ arguments, and processes

    @property
    def max_steps(self) -> int:
        """Limit of optimizer steps; -1: no limit."""
        return -1 if self.plan.max_steps is None else self.plan.max_steps

    @property
    def max_epochs(self) -> int:
        """Limit of epochs; -1: no limit."""
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
        """Micro-batches per step in each process, in the epoch in progress.

        With `global_batch_size` Lumen computes the number from the training loader.

        Raises:
            ConfigError: The number depends on the training loader, which is not open yet.
        """
        if self.plan.global_batch_size is None:
            return self.plan.get_accumulation(self.current_epoch)
        loader = None if self._run is None else self._run.loaders.train
        if loader is None:
            raise ConfigError(
                "accumulate_grad_batches depends on global_batch_size and the training loader, which is not open yet. "
                "Read accumulate_grad_batches during fit."
            )
        return math.ceil(loader.per_step / count_training_parts(self.strategy))

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest gradient norm or element; None: no clipping."""
        return self.plan.clip_value if self.plan.clip_norm is None else self.plan.clip_norm

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """Kind of clipping: "norm" or "value"; None: no clipping."""
        return None if self.gradient_clip_val is None else "value" if self.plan.clip_norm is None else "norm"

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """Interval between validations: optimizer steps (int), a fraction of an epoch (float), or a timedelta."""
        if self.plan.val_every_s is not None:
            return timedelta(seconds=self.plan.val_every_s)
        every, share = self.plan.val_every_n_steps, self.plan.val_every_epoch_fraction
        return every if every is not None else share if share is not None else 1.0

    @property
    def check_val_every_n_epoch(self) -> int:
        """Number of epochs between validations."""
        return self.plan.val_every_n_epochs

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Validation batches to run before training; infinite: all."""
        return math.inf if self.plan.sanity_batches < 0 else self.plan.sanity_batches

    @property
    def limit_train_batches(self) -> int | float:
        """Number or fraction of the batches per training epoch."""
        return self._get_limit("train")

    @property
    def limit_val_batches(self) -> int | float:
        """Number or fraction of the validation batches."""
        return self._get_limit("validate")

    @property
    def limit_test_batches(self) -> int | float:
        """Number or fraction of the test batches."""
        return self._get_limit("test")

    @property
    def limit_predict_batches(self) -> int | float:
        """Number or fraction of the prediction batches."""
        return self._get_limit("predict")

    @property
    def overfit_batches(self) -> int | float:
        """Number or fraction of the batches that every epoch repeats; 0.0: off."""
        return self._get_limit("train") if self.plan.same_batches else 0.0

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """Number of epochs after which Lumen requests new loaders; 0: never."""
        return self.plan.reload_every_n_epochs

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two written values."""
        return self.plan.log_every_n_steps

    def _get_limit(self, stage: str) -> int | float:
        limit = self.plan.limits.get(stage)
        return 1.0 if limit is None else limit

    @property
    def processes(self) -> Processes:
        """Processes of the run, with methods to exchange plain data between them."""
        return self.strategy.processes

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Rank of this process, from 0."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node, from 0."""
        return self.processes.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node, from 0."""
        return self.processes.node

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the run."""
        return self.processes.nodes

    @property
    def num_devices(self) -> int:
        """Number of devices of this node that the run uses; each process has one device."""
        return self.processes.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Numbers of this node's devices that the run uses."""
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
        """Data module of the run, or None."""
        return None if self._run is None else self._run.loaders.datamodule

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run at the data's present length, for schedules that need the number.

        Raises:
            ConfigError: The run has no `max_steps`, and no `max_epochs` with a loader of known length.
        """
        if self.run.loaders.train is None:
            open_loaders(self.run)
        return self.plan.count_total_steps(self.run.loaders.get_epoch_lengths())

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch, summed over all processes; infinite without a loader of known length."""
        adapter = None if self._run is None else self._run.loaders.train
        return math.inf if adapter is None else self._count_batches("train", adapter)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of the epoch in progress at the data's present length; None if the loader has no length."""
        if self.run.loaders.train is None:
            raise ConfigError(
                "steps_per_epoch: the training loader is not open yet. Read it from on_fit_start on, or read "
                "estimated_stepping_batches, the steps of the run, which opens the loader."
            )
        lengths = self.run.loaders.get_epoch_lengths()
        return None if lengths is None else lengths.get_length(self.run.progress.epoch)

    @property
    def train_dataloader(self) -> Any:
        """Training loader, or several, as the user gave them; None before Lumen opens them.

        Lumen reads loaders in its own way, so iterating over this loader changes nothing in the run. With several
        processes the loader covers the data of all processes.
        """
        return self._get_source("fit")

    @property
    def val_dataloaders(self) -> Any:
        """Validation loader, or several, as the user gave them; None before Lumen opens them."""
        return self._get_source("validate")

    @property
    def test_dataloaders(self) -> Any:
        """Test loader, or several, as the user gave them; None before Lumen opens them."""
        return self._get_source("test")

    @property
    def predict_dataloaders(self) -> Any:
        """Prediction loader, or several, as the user gave them; None before Lumen opens them."""
        return self._get_source("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader in the sanity check, summed over all processes."""
        return self._list_evaluation_batches("sanity", "fit")

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader, summed over all processes; infinite for a loader without a length."""
        return self._list_evaluation_batches("validate", "fit", "validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader, summed over all processes; infinite for a loader without a length."""
        return self._list_evaluation_batches("test", "test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each prediction loader, summed over all processes; infinite for a loader without a length."""
        return self._list_evaluation_batches("predict", "predict")

    @property
    def enable_validation(self) -> bool:
        """True if `fit` has a validation; known after its loaders are open, before `on_fit_start`."""
        return bool(self.num_val_batches)

    @property
    def is_last_batch(self) -> bool:
        """True if this process has reached its last micro-batch of the epoch.

        Raises:
            ConfigError: The loader has no length, so the last batch is unknown.
        """
        run, batches = self._run, self.num_training_batches
        if run is None or run.loaders.train is None:
            return False
        if batches == math.inf:
            raise ConfigError("is_last_batch: the training loader has no length, so the last batch is unknown.")
        if not run.log.in_train_step:
            return run.progress.batches >= batches
        other_ranks = count_training_parts(run.strategy) - 1 if run.task.automatic_optimization else 0
        return run.progress.batches + count_micro_batches_started(run.step) + other_ranks >= batches

    @property
    def is_epoch_end(self) -> bool:
        """True in a validation or `on_train_epoch_end` if all batches of the epoch are done."""
        return self.run.ending.ends_epoch

    def _get_source(self, stage: str) -> Any:
        return None if self._run is None else self._run.loaders.sources.get(stage)

    def _list_evaluation_batches(self, stage: str, *runs: str) -> list[int | float]:
        if self._run is None or self._fn not in runs:
            return []
        return [self._count_batches(stage, adapter) for adapter in self._run.loaders.evaluation]

    def _count_batches(self, stage: str, adapter: LoaderAdapter) -> int | float:
        batches = self.plan.count_batches(stage, adapter)
        return math.inf if batches is None else batches
