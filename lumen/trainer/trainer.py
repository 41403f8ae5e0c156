"""Trainer: keeps the pieces, opens a run, chooses the loop, closes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Literal, final

from lumen.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    ThroughputMonitor,
    choose_callbacks,
    scheduled,
)
from lumen.checkpoint import Part, Weights, as_place, malformed_is_damaged
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked, local_path, more_than_zero, refuse_unknown
from lumen.errors.lightning_names import INSTEAD, INSTEAD_IN_SAVE, NEUTRAL
from lumen.loggers import Logger, LoggerName, as_loggers
from lumen.loop.fit import train
from lumen.precision import Precision, make_precision
from lumen.profilers import Profiler, make_profiler
from lumen.random import checked_seed
from lumen.run.open_loaders import one_source
from lumen.run.plan import Duration, Plan, accumulation, batch_limit, count_limit, duration_s, validation_interval
from lumen.run.run import Run
from lumen.strategies import Strategy, make_strategy
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.hooks import check_training
from lumen.task.task_module import TaskModule
from lumen.trainer.logs import LogSettings
from lumen.trainer.prepare import Origin, begin_training, end_training, evaluate_all, roll_back
from lumen.trainer.run_view import RunView
from lumen.trainer.script_record import defaults_from_environment
from lumen.trainer.session import Session


@final
class Trainer(RunView):
    """Trains, evaluates and predicts.

    Args:
        max_epochs: Epochs to train. One of `max_epochs`, `max_steps` and `max_time` is required for `fit`; the first
            one reached ends it.
        max_steps: Optimizer updates to make.
        max_time: Time to train, over all resumed parts: "DD:HH:MM:SS", a timedelta, or its keywords.
        min_epochs: Epochs before a callback may stop the run.
        min_steps: Optimizer updates before a callback may stop the run.
        accelerator: `auto` (CUDA, else MPS, else CPU), `cpu`, `cuda`, `mps`.
        devices: How many of each node, a process each; `auto`: all accelerators. Default: as many as torchrun or SLURM
            started processes, else 1. Processes that nobody started are started by the run.
        num_nodes: How many nodes. Default: as many as torchrun or SLURM started processes on, else 1.
        strategy: `auto` (DDP if there are several processes), `single`, `ddp`, `fsdp`, or a `Strategy`.
        precision: `fp32`; `bf16`, `fp16` (autocast); `bf16-true`, `fp64` (parameters and batches); or a `Precision`.
        matmul_precision: With which float32 matrices are multiplied: `highest`, `high` (TF32 on CUDA) or `medium`.
            Default: as torch is set.
        benchmark: Let cuDNN time its algorithms and take the fastest, so that runs differ in the last bits. Default: as
            torch is set.
        compile: True: compile the task's `forward` and its direct child modules; class names: every module of these
            classes; a dictionary: options of `torch.compile` (mode, dynamic, fullgraph, backend, options) and `blocks`,
            the class names.
        global_batch_size: Samples of an optimizer step, whatever the hardware; the micro-batches follow from the
            loader's batch size.
        accumulate_grad_batches: Micro-batches of a step, without `global_batch_size`; `{4: 8}`: 8 from epoch 4 on.
        gradient_clip_val: Largest gradient norm or element.
        gradient_clip_algorithm: `norm` or `value`.
        val_check_interval: When to validate: an int counts optimizer steps, a float is a fraction of an epoch, a
            string ("00:00:15:00") or timedelta is a duration.
        check_val_every_n_epoch: Validate in every n-th epoch only.
        num_sanity_val_steps: Validation batches to try before training; -1: all.
        limit_train_batches: A count, or a fraction, of the batches of an epoch.
        limit_val_batches: Likewise for validation; 0 turns it off.
        limit_test_batches: Likewise for test.
        limit_predict_batches: Likewise for prediction.
        overfit_batches: Train on this count or fraction of the batches, the same in every epoch, and validate on as
            many: a model that cannot learn them by heart has a defect. 0: off.
        reload_dataloaders_every_n_epochs: Ask for new loaders at the start of every n-th epoch; 0: never.
        fast_dev_run: Run this many batches (True: 1) of training and validation, and write nothing.
        log_every_n_steps: Optimizer steps between two written values; the last step of a run is written too.
        callbacks: A list, or a dictionary whose names serve configs; None entries are left out.
        logger: True: `metrics.csv` and `system.csv` in the run directory; one or several: these beside them, by name
            (`tensorboard`, `wandb`, `mlflow`, `aim`) or as objects; False or an empty list: none at all.
        default_root_dir: Where run directories are made.
        name: Of the run. Default: the config file's stem, else the task's class name.
        resume: None: a new run directory `name`, `name-2`, ...; "auto": go on from the newest valid checkpoint of
            `name`, or start it; "last": the same, but there must be one; "best" or a path of a checkpoint or run: start
            a new run directory from there.
        resume_parts: What a new run takes over from "best" or a path; default: everything. `model`: parameters, buffers
            and what `on_save_checkpoint` added; else they are built anew. `optimizer`: its state and the scale of fp16;
            else it begins empty. `schedulers`: where they stand and the learning rates; else they and the optimizer's
            settings are those configured, moved to the step and epoch that the run begins at (one with a monitor begins
            anew). `progress`: step, epoch, time, the callbacks' states and the seed; else step 0 of epoch 0. `data`,
            which needs `progress`: the place in the epoch, its values so far, the data module's state; else the epoch
            begins anew.
        init_from: Parameters and buffers that a new run begins with: the path or URL of a checkpoint, a run or
            safetensors files, or `Weights`, which renames and leaves out. A run that is resumed does not read it.
        max_restarts: How often the launcher starts all processes of `fit` again after one has failed: from the newest
            checkpoint, unless the task is to blame. Under torchrun that is its own `--max-restarts`.
        grace_s: Seconds from the first signal until the process ends, saved or not. Default: none, 30 in evaluations.
        seed: Of everything random: 0 to 2**63 - 1. Default: that of `seed_everything`, else drawn once and recorded;
            when resuming the checkpoint's counts.
        deterministic: Use deterministic algorithms only; an operation that has none is an error, or
            with `warn` a warning.
        detect_anomaly: Find the operation that made a loss NaN or infinite, or whose backward made a NaN; slow.
        sync_batchnorm: Let BatchNorm see the batches of all processes: each becomes a `torch.nn.SyncBatchNorm`, which
            needs CUDA.
        profiler: `simple`: a table of where the time goes; `advanced`: by function; `torch`: traces; or a `Profiler`.
        inference_mode: Evaluate under `torch.inference_mode`, else under `torch.no_grad`; `on_validation_start` and
            `_end`, and those of test and predict, under the latter. What modules hold can be trained with afterwards.
        halve_on_oom: Repeat what does not fit into memory in halves, with the same gradient; not under FSDP.
        gc_every_n_steps: Let Python look for garbage (objects that refer to each other in circles) after every n-th
            optimizer step, in an evaluation after every n-th batch, and at no other time: so no process makes the
            others wait at a moment of its own. Default: whenever Python wants to.
        enable_progress_bar: Show progress: a bar in a terminal, plain lines elsewhere.
        enable_checkpointing: Save checkpoints in `fit`.
        enable_model_summary: Print a table of the model at the start.
        log_level: Of `run.log` and the terminal, for Lumen and every logger of yours: DEBUG, INFO, WARNING or ERROR.
            Libraries are heard from WARNING, unless named: `{root: INFO, urllib3: DEBUG, mypackage.data: ERROR}`. How
            the run began and ended, and the traceback of what it failed by, are in `run.log` at every level.
        log_format: Format of all lines in `run.log`, as for `logging.Formatter`: `[%(asctime)s][%(name)s] %(message)s`.
    """

    INSTEAD, NEUTRAL, NONE_IS_DEFAULT = INSTEAD, NEUTRAL, True
    _given: dict[str, Any] | None  # arguments as plain data

    @defaults_from_environment
    @checked
    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: Duration | None = None,
        min_epochs: int = 0,
        min_steps: int = 0,
        accelerator: str = "auto",
        devices: int | str | None = None,
        num_nodes: int | None = None,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision | type[Precision] = "fp32",
        matmul_precision: Literal["highest", "high", "medium"] | None = None,
        benchmark: bool | None = None,
        compile: bool | str | list[str] | dict[str, Any] | None = False,
        global_batch_size: int | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        val_check_interval: int | float | Duration = 1.0,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0,
        reload_dataloaders_every_n_epochs: int = 0,
        fast_dev_run: bool | int = False,
        log_every_n_steps: int = 50,
        callbacks: list[Callback] | dict[str, Callback | None] | Callback | None = None,
        logger: bool | LoggerName | Logger | list[LoggerName | Logger] = True,
        default_root_dir: str | Path = "runs",
        name: str | None = None,
        resume: str | Path | None = None,
        resume_parts: list[Part] | None = None,
        init_from: Weights | str | Path | None = None,
        max_restarts: int = 0,
        grace_s: float | None = None,
        seed: int | None = None,
        deterministic: bool | Literal["warn"] = False,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        profiler: Literal["simple", "advanced", "torch", "pytorch"] | Profiler | None = None,
        inference_mode: bool = True,
        halve_on_oom: bool = False,
        gc_every_n_steps: int | None = None,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        log_level: str | dict[str, str] = "INFO",
        log_format: str | None = None,
    ) -> None:
        if global_batch_size is not None and accumulate_grad_batches != 1:
            raise ConfigError(
                "global_batch_size and accumulate_grad_batches both say how large a step is. Set only one of them."
            )
        at_least(
            1, check_val_every_n_epoch=check_val_every_n_epoch, log_every_n_steps=log_every_n_steps,
            global_batch_size=global_batch_size, gc_every_n_steps=gc_every_n_steps,
        )  # fmt: skip
        at_least(
            0, min_epochs=min_epochs, min_steps=min_steps, fast_dev_run=fast_dev_run,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs, max_restarts=max_restarts,
        )  # fmt: skip
        at_least(-1, num_sanity_val_steps=num_sanity_val_steps)
        more_than_zero(gradient_clip_val=gradient_clip_val, grace_s=grace_s)
        self.strategy = make_strategy(strategy, accelerator, devices, num_nodes)
        self.precision = precision
        make_precision(precision).check(self.strategy.device, self.strategy.parameter_device)
        self.matmul_precision, self.benchmark = matmul_precision, benchmark
        self.compilation = Compilation(compile)
        self.fast_dev_run, self.max_restarts = int(fast_dev_run), 0 if fast_dev_run else max_restarts
        self.name, self.default_root_dir = name, local_path(default_root_dir)
        self.origin = self._origin = Origin(resume, resume_parts, init_from)
        self.seed = None if seed is None else checked_seed("seed", seed)
        self.deterministic, self.detect_anomaly, self.sync_batchnorm = deterministic, detect_anomaly, sync_batchnorm
        if sync_batchnorm and self.world_size > 1 and self.strategy.device.type == "cpu":
            raise ConfigError(
                f"sync_batchnorm: torch.nn.SyncBatchNorm needs CUDA, but the {self.world_size} processes run on the "
                "CPU. Leave it out there, or use a norm that does not depend on the batch, such as GroupNorm."
            )
        self.profiler = make_profiler(profiler)
        self.gc_every_n_steps, self.grace_s = gc_every_n_steps, grace_s
        self.log_settings = LogSettings(log_level, log_format)
        self.plan = Plan(
            max_steps=count_limit("max_steps", max_steps), max_epochs=count_limit("max_epochs", max_epochs),
            max_time_s=None if max_time is None else duration_s("max_time", max_time),
            min_steps=min_steps, min_epochs=min_epochs,
            clip_norm=gradient_clip_val if gradient_clip_algorithm == "norm" else None,
            clip_value=gradient_clip_val if gradient_clip_algorithm == "value" else None,
            val_every_n_epochs=check_val_every_n_epoch, sanity_batches=num_sanity_val_steps,
            limits={
                "train": batch_limit("limit_train_batches", limit_train_batches),
                "validate": batch_limit("limit_val_batches", limit_val_batches),
                "test": batch_limit("limit_test_batches", limit_test_batches),
                "predict": batch_limit("limit_predict_batches", limit_predict_batches),
            },
            log_every_n_steps=log_every_n_steps, inference_mode=inference_mode, halve_on_oom=halve_on_oom,
            accumulate=accumulation("accumulate_grad_batches", accumulate_grad_batches),
            global_batch_size=global_batch_size, reload_every_n_epochs=reload_dataloaders_every_n_epochs,
            **validation_interval(val_check_interval),
        )  # fmt: skip
        if overfit_batches:
            self.plan = self.plan.overfitting(overfit_batches)
        if self.fast_dev_run:
            self.plan, logger = self.plan.trial(self.fast_dev_run), False
        self.loggers = as_loggers(logger)
        defaults: dict[type[Callback], bool] = {
            ThroughputMonitor: bool(self.loggers),
            ModelSummary: enable_model_summary,
            ProgressBar: enable_progress_bar,
        }
        self.callbacks = choose_callbacks(callbacks, defaults, checkpointing=enable_checkpointing)
        self.plan = scheduled(self.plan, self.callbacks)
        self.enable_checkpointing = enable_checkpointing and not self.fast_dev_run
        if self.fast_dev_run:
            self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, ModelCheckpoint)]
        self.run_directory: Path | None = None
        self._run: Run | None = None
        self._status, self._fn = "initializing", None
        self._started, self._asks_task = False, True

    def _leave_no_traces(self, callbacks: list[Callback], log_level: str, **plan: Any) -> None:
        """Let the next run write, log, profile and restart nothing: a search or a tool throws that run away.

        Args:
            callbacks: The callbacks of the run, in place of the trainer's.
            log_level: The lowest level that is shown.
            **plan: Fields of the plan that differ.
        """
        self.callbacks, self.loggers, self.profiler = callbacks, [], make_profiler(None)
        self.enable_checkpointing, self.max_restarts, self._asks_task = False, 0, False
        self.log_settings = LogSettings(log_level)
        self._change(**plan)

    def _change(self, callbacks: Iterable[Callback] = (), **plan: Any) -> None:
        """Add callbacks and change fields of the plan, before a run is opened."""
        self.callbacks = [*self.callbacks, *callbacks]
        self.plan = replace(self.plan, **plan)

    # ------------------------------------------------------------------ the four loops

    def fit(
        self,
        model: TaskModule,
        train_dataloaders: DataModule | Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        configure_optimizers: Callable[[], Any] | None = None,
    ) -> None:
        """Train.

        Args:
            model: The task to train.
            train_dataloaders: A training loader, several, or a data module; None if the task brings its loaders.
            val_dataloaders: One validation loader or several, beside a training loader.
            datamodule: A data module, in place of loaders.
            ckpt_path: As `resume` of the trainer, for this run.
            weights_only: Accepted for users of Lightning; nothing is ever unpickled.
            configure_optimizers: Used instead of the task's.

        Raises:
            LumenError: Something is wrong; see `lumen.errors`.
            KeyboardInterrupt: The run was asked to stop; a checkpoint was saved and the resuming command printed.
        """
        check_training(model, train_dataloaders, optimizer_given=configure_optimizers is not None)
        task, data = model, one_source(train_dataloaders, datamodule, val_dataloaders)
        origin = self._origin.asked_for(ckpt_path)
        if self.plan.max_steps is None and self.plan.max_epochs is None and self.plan.max_time_s is None:
            raise ConfigError("how long to train is not set. Set one of max_epochs, max_steps and max_time.")
        session = Session(self, "fit", task, data, val_dataloaders)
        session.check()
        self.origin, is_over = origin, False
        with session.opened():
            while not is_over:
                with session.new_run() as run, malformed_is_damaged(run.checkpoint):
                    begin_training(self, run, configure_optimizers)
                    left_out = train(run)
                    is_over = left_out is None
                    if left_out is None:
                        end_training(self, run)
                    else:
                        roll_back(self, run, left_out)

    def validate(
        self,
        model: TaskModule | None = None,
        dataloaders: DataModule | Any = None,
        ckpt_path: Weights | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        average: str | Sequence[str | PurePath] | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the validation data.

        Args:
            model: What to evaluate. Default: that of the run before, with its data if none is given, and with the best
                parameters that it saved if it had a monitor.
            dataloaders: A loader, several, or a data module; None if the task brings its loaders.
            ckpt_path: Parameters to load first: "best" or "last" of the run, or what `init_from` may be. Default: those
                that the task has, with a warning where nobody has trained or loaded them.
            verbose: Let the progress bar show the values at the end.
            datamodule: A data module, in place of loaders.
            weights_only: Accepted for users of Lightning; nothing is ever unpickled.
            average: What to evaluate of the checkpoint at `ckpt_path`, such as "parameters" or "last:5"; see
                `load_from_checkpoint`. The task then holds it.

        Returns:
            One dictionary of logged values per loader; the same on every rank.
        """
        source = one_source(dataloaders, datamodule)
        run = evaluate_all(self, "validate", model, source, ckpt_path, average=average, verbose=verbose)
        return run.values.by_loader()

    def test(
        self,
        model: TaskModule | None = None,
        dataloaders: DataModule | Any = None,
        ckpt_path: Weights | str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        average: str | Sequence[str | PurePath] | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate on the test data; see `validate`."""
        source = one_source(dataloaders, datamodule)
        run = evaluate_all(self, "test", model, source, ckpt_path, average=average, verbose=verbose)
        return run.values.by_loader()

    def predict(
        self,
        model: TaskModule | None = None,
        dataloaders: DataModule | Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: Weights | str | Path | None = None,
        weights_only: bool | None = None,
        *,
        average: str | Sequence[str | PurePath] | None = None,
    ) -> list[Any] | None:
        """Predict; see `validate`. With `return_predictions=False` only hooks see the outputs, as `PredictionWriter`'s.

        Returns:
            What `predict_step` returned for each batch, in order; with several loaders a list of such lists. Every rank
            has those of all, then with tensors on the CPU: `predict_step` must return what can be pickled.
        """
        source = one_source(dataloaders, datamodule)
        keeps = return_predictions is not False
        run = evaluate_all(self, "predict", model, source, ckpt_path, average=average, keeps_outputs=keeps)
        if not keeps:
            return None
        return run.values.predictions[0] if len(run.values.predictions) == 1 else run.values.predictions

    def _use_config(self, seed: int, command: str) -> None:
        """Take over what the command line knows, which keeps the whole config itself.

        Args:
            seed: The seed with which everything was built.
            command: First words of a command that trains.
        """
        self.seed, self._given, self._command = seed, None, command

    def save_checkpoint(
        self, filepath: str | PurePath, *, info: Mapping[str, Any] | None = None, **unknown: Any
    ) -> None:
        """Write a checkpoint of the run in progress, exact in `on_step_checkpoint`.

        Collective: every rank must call this.

        Args:
            filepath: The directory to commit; an existing checkpoint is never overwritten.
            info: Plain data for listings of runs.
            unknown: What else Lightning's takes: an error that says what serves instead.

        Raises:
            CheckpointError: It could not be written; nothing that existed was touched.
        """
        refuse_unknown("save_checkpoint", unknown, INSTEAD_IN_SAVE)
        _ = self.optimizers  # only a training can be saved
        self.run.saves.save_once(as_place(filepath), info or {})
