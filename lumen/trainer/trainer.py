"""`Trainer`: holds the settings, opens runs, and calls the training and evaluation loops."""

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
    apply_accumulation_schedule,
    choose_callbacks,
)
from lumen.checkpoint import Part, Weights, as_path_or_url, treat_malformed_as_damaged
from lumen.errors import ConfigError
from lumen.errors.arguments import (
    check_arguments,
    check_at_least,
    check_positive,
    expand_path,
    refuse_unknown_arguments,
)
from lumen.errors.lightning_names import INSTEAD, INSTEAD_IN_SAVE, NEUTRAL
from lumen.loggers import DEFAULT_ROOT, Logger, LoggerName, as_loggers, choose_place
from lumen.loop.fit import train_run
from lumen.precision import Precision, make_precision
from lumen.profilers import Profiler, make_profiler
from lumen.random import check_seed
from lumen.run.open_loaders import choose_source
from lumen.run.plan import (
    Duration,
    Plan,
    parse_accumulation,
    parse_batch_limit,
    parse_count_limit,
    parse_duration_s,
    parse_validation_interval,
)
from lumen.run.run import Run
from lumen.strategies import Strategy, make_strategy, set_reduction
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.hooks import check_training
from lumen.task.task_module import TaskModule
from lumen.trainer.logs import LogSettings
from lumen.trainer.prepare import RunOrigin, begin_training, end_training, evaluate_loaders, remove_newer_checkpoints
from lumen.trainer.run_view import RunView
from lumen.trainer.script_record import read_environment_defaults
from lumen.trainer.session import Session


@final
class Trainer(RunView):
    """Trainer that fits, evaluates and predicts with a task.

    Args:
        max_epochs: Epochs to train. `fit` requires `max_epochs`, `max_steps` or `max_time`, and ends at the first
            limit.
        max_steps: Optimizer updates to make.
        max_time: Training time of the run, summed over its first start and all resumes: "DD:HH:MM:SS", a timedelta,
            or a dictionary of timedelta's keywords.
        min_epochs: Epochs before a callback may stop the run.
        min_steps: Optimizer updates before a callback may stop the run.
        accelerator: `auto` (CUDA, else MPS, else CPU), `cpu`, `cuda` or `mps`.
        devices: Number of devices per node, with one process each. Default: the number of processes that torchrun or
            SLURM started, else 1. `auto`: all accelerators. Lumen starts the processes unless torchrun or SLURM did.
        num_nodes: Number of nodes. Default: the number of nodes on which torchrun or SLURM started processes, else 1.
        strategy: `auto` (DDP if there are several processes), `single`, `ddp`, `fsdp`, `mesh`, or a `Strategy`.
        precision: `fp32`; `bf16` or `fp16` (autocast); `bf16-true` or `fp64` (parameters and batches); or a
            `Precision`.
        matmul_precision: Precision of float32 matrix products. Default: torch's current setting. Otherwise `highest`,
            `high` (TF32 on CUDA) or `medium`.
        benchmark: Let cuDNN time its algorithms and use the fastest; repeated runs then differ by rounding. Default:
            torch's current setting.
        compile: Modules to compile with `torch.compile`. False: none. True: the task's `forward` and its direct child
            modules. Class names: every module of these classes. A dictionary: options of `torch.compile` (mode,
            dynamic, fullgraph, backend, options); its extra key `blocks` lists class names.
        global_batch_size: Samples per optimizer step on any hardware. Lumen computes the number of micro-batches from
            the loader's batch size.
        accumulate_grad_batches: Micro-batches per step, without `global_batch_size`; `{4: 8}`: 8 from epoch 4 on.
        reduction: `exact`: sum the gradients of a step in the order of micro-batches, so that a run is bitwise
            identical on any number of processes (docs/concepts/same-bits.md). Default: the fastest order.
        gradient_clip_val: Largest gradient norm, or largest gradient element. Default, and 0: no clipping.
        gradient_clip_algorithm: `norm` or `value`.
        val_check_interval: Interval between validations: a float is a fraction of an epoch, an int counts optimizer
            steps, a string ("00:00:15:00") or timedelta is a duration.
        check_val_every_n_epoch: Validate in every n-th epoch only. None: 1, with a `val_check_interval` in steps or
            time.
        num_sanity_val_steps: Validation batches to run before training; -1: all.
        limit_train_batches: Number or fraction of the batches per training epoch. Default: all.
        limit_val_batches: Number or fraction of the validation batches; 0: no validation. Default: all.
        limit_test_batches: Number or fraction of the test batches. Default: all.
        limit_predict_batches: Number or fraction of the prediction batches. Default: all.
        overfit_batches: Number or fraction of the training batches that every epoch repeats; 0: off. Validations use
            the same number of batches. A model that cannot memorize these batches has a defect.
        reload_dataloaders_every_n_epochs: Number of epochs after which Lumen requests new loaders; 0: never.
        fast_dev_run: Run this many batches (True: 1) of training and validation, and write nothing. False: off.
        log_every_n_steps: Optimizer steps between two written values. Lumen also writes the last step of a run.
        callbacks: A list of callbacks, or a dictionary from names to callbacks; a config refers to a callback by its
            name. Lumen ignores None entries.
        logger: True: `metrics.csv` and `system.csv` in the run directory. Names (`tensorboard`, `wandb`, `mlflow`,
            `aim`) or objects: these loggers in addition. False or an empty list: no logger and no CSV files.
        default_root_dir: Directory in which Lumen creates run directories.
        name: Name of the run. Default: the config file's stem, else the task's class name.
        resume: None: start a new run directory `name`, `name-2`, ... "auto": resume from the newest valid checkpoint of
            `name`, or start `name`. "last": the same, but a checkpoint must exist. "best": start a new run
            directory from the best checkpoint of `name`. A path: start a new run directory from that checkpoint or run.
            In a second `fit` of the same trainer, these settings mean the previous run of the trainer.
        resume_parts: Parts of the checkpoint that a new run takes over from "best" or a path. Default: all parts.
            `model`: parameters, buffers and additions of `on_save_checkpoint`; if left out, the task keeps the
            parameters that it was built with. `optimizer`: optimizer state and loss scale of fp16; if left out, the
            optimizer has no state. `schedulers`: scheduler state and learning rates; if left out, new schedulers are
            advanced to the step at which the new run begins (a scheduler with a monitor has no history). `progress`:
            step, epoch, time,
            states of callbacks, and seed; if left out, the run begins at step 0 of epoch 0. `data`, which needs
            `progress`: the position in the epoch, the values logged in the epoch, and the data module's state; if left
            out, the epoch restarts.
        init_from: Initial parameters and buffers of a new run: the path or URL of a checkpoint, a run or safetensors
            files, or a `Weights`, which renames and omits names. A resumed run ignores this argument.
        max_restarts: If a process of `fit` fails, the launcher restarts all processes from the newest checkpoint, at
            most this many times. No restart follows if the same error of the task recurs at the same step. Under
            torchrun, set its `--max-restarts` instead.
        grace_s: Seconds after the first signal until the process ends, even if no checkpoint was saved. Default: no
            limit in `fit`, 30 s in evaluations.
        seed: Seed of all random numbers, 0 to 2**63 - 1. Default: the seed of `seed_everything`, else a random seed
            that Lumen records. A resumed run uses the checkpoint's seed.
        deterministic: Use deterministic algorithms only. An operation without such an algorithm is an error, or with
            `warn` a warning.
        detect_anomaly: Find the operation that made a loss NaN or infinite, or whose backward made a NaN; slow.
        sync_batchnorm: Convert each BatchNorm to `torch.nn.SyncBatchNorm`, which sees the batches of all processes and
            needs CUDA.
        profiler: `simple`: a table of the time in each hook, step and loader; `advanced`: in each function; `torch`:
            traces; or a `Profiler`.
        inference_mode: Evaluate under `torch.inference_mode`; False: under `torch.no_grad`. Hooks that start or end an
            evaluation, such as `on_validation_start`, always run under `torch.no_grad`.
        halve_on_oom: If a micro-batch does not fit into memory, run it again as two halves, with the same gradient; not
            under FSDP.
        gc_every_n_steps: Let Python collect garbage (reference cycles) only after every n-th optimizer step, or in an
            evaluation after every n-th batch. All processes then pause at the same time. Default: Python chooses the
            times.
        enable_progress_bar: Show progress: a bar in a terminal, plain lines elsewhere.
        enable_checkpointing: Save checkpoints in `fit`.
        enable_model_summary: Print a table of the model at the start.
        log_level: Lowest level of `run.log` and the terminal, for Lumen and your own loggers: DEBUG, INFO, WARNING or
            ERROR. Messages of libraries appear from WARNING on. A dictionary sets the level of each logger: `{root:
            INFO, urllib3: DEBUG, mypackage.data: ERROR}`. At every level, `run.log` contains the start and end of the
            run, and the traceback of a failure.
        log_format: Format of all lines in `run.log`, as for `logging.Formatter`: `[%(asctime)s][%(name)s] %(message)s`.
    """

    INSTEAD, NEUTRAL, NONE_IS_DEFAULT = INSTEAD, NEUTRAL, True
    _arguments: dict[str, Any] | None  # arguments as plain data; None if the command line keeps the config

    @read_environment_defaults
    @check_arguments
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
        strategy: Strategy | str = "auto",
        precision: str | int | Precision | type[Precision] = "fp32",
        matmul_precision: Literal["highest", "high", "medium"] | None = None,
        benchmark: bool | None = None,
        compile: bool | str | list[str] | dict[str, Any] | None = False,
        global_batch_size: int | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        reduction: Literal["exact"] | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        val_check_interval: int | float | Duration = 1.0,
        check_val_every_n_epoch: int | None = 1,
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
        default_root_dir: str | Path = DEFAULT_ROOT,
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
                "global_batch_size and accumulate_grad_batches both set the size of a step. Set only one of them."
            )
        if check_val_every_n_epoch is None and isinstance(val_check_interval, float):
            raise ConfigError(
                f"check_val_every_n_epoch is None, but val_check_interval is {val_check_interval}, a fraction of an "
                "epoch. Remove check_val_every_n_epoch, or set val_check_interval to a number of steps."
            )
        check_at_least(
            1, check_val_every_n_epoch=check_val_every_n_epoch, log_every_n_steps=log_every_n_steps,
            global_batch_size=global_batch_size, gc_every_n_steps=gc_every_n_steps,
        )  # fmt: skip
        check_at_least(
            0, min_epochs=min_epochs, min_steps=min_steps, fast_dev_run=fast_dev_run,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs, max_restarts=max_restarts,
        )  # fmt: skip
        check_at_least(-1, num_sanity_val_steps=num_sanity_val_steps)
        check_at_least(0, gradient_clip_val=gradient_clip_val)
        check_positive(grace_s=grace_s)
        gradient_clip_val = gradient_clip_val or None
        self.strategy = make_strategy(strategy, accelerator, devices, num_nodes)
        set_reduction(self.strategy, reduction)
        self.reduction, self.precision = reduction, precision
        make_precision(precision).check(self.strategy.device, self.strategy.parameter_device)
        self.matmul_precision, self.benchmark = matmul_precision, benchmark
        self.compilation = Compilation(compile)
        self.fast_dev_run, self.max_restarts = int(fast_dev_run), 0 if fast_dev_run else max_restarts
        self.origin = self._origin = RunOrigin(resume, resume_parts, init_from)
        self.seed = None if seed is None else check_seed("seed", seed)
        self.deterministic, self.detect_anomaly, self.sync_batchnorm = deterministic, detect_anomaly, sync_batchnorm
        if sync_batchnorm and self.world_size > 1 and self.strategy.device.type == "cpu":
            raise ConfigError(
                f"sync_batchnorm: torch.nn.SyncBatchNorm needs CUDA, but the {self.world_size} processes run on the "
                "CPU. Remove sync_batchnorm, or use a norm that does not depend on the batch, such as GroupNorm."
            )
        self.profiler = make_profiler(profiler)
        self.gc_every_n_steps, self.grace_s = gc_every_n_steps, grace_s
        self.log_settings = LogSettings(log_level, log_format)
        self.plan = Plan(
            max_steps=parse_count_limit("max_steps", max_steps), max_epochs=parse_count_limit("max_epochs", max_epochs),
            max_time_s=None if max_time is None else parse_duration_s("max_time", max_time),
            min_steps=min_steps, min_epochs=min_epochs,
            clip_norm=gradient_clip_val if gradient_clip_algorithm == "norm" else None,
            clip_value=gradient_clip_val if gradient_clip_algorithm == "value" else None,
            val_every_n_epochs=check_val_every_n_epoch or 1, sanity_batches=num_sanity_val_steps,
            limits={
                "train": parse_batch_limit("limit_train_batches", limit_train_batches),
                "validate": parse_batch_limit("limit_val_batches", limit_val_batches),
                "test": parse_batch_limit("limit_test_batches", limit_test_batches),
                "predict": parse_batch_limit("limit_predict_batches", limit_predict_batches),
            },
            log_every_n_steps=log_every_n_steps, inference_mode=inference_mode, halve_on_oom=halve_on_oom,
            accumulate=parse_accumulation("accumulate_grad_batches", accumulate_grad_batches),
            global_batch_size=global_batch_size, reload_every_n_epochs=reload_dataloaders_every_n_epochs,
            **parse_validation_interval(val_check_interval),
        )  # fmt: skip
        if overfit_batches:
            self.plan = self.plan.with_overfitting(overfit_batches)
        if self.fast_dev_run:
            self.plan, logger = self.plan.as_fast_dev_run(self.fast_dev_run), False
        self.loggers, self._has_user_loggers = as_loggers(logger), not isinstance(logger, bool)
        self.default_root_dir, self.name = choose_place(self.loggers, expand_path(default_root_dir), name)
        self._has_given_name = self.name is not None
        defaults: dict[type[Callback], bool] = {
            ThroughputMonitor: bool(self.loggers),
            ModelSummary: enable_model_summary,
            ProgressBar: enable_progress_bar,
        }
        self.callbacks = choose_callbacks(callbacks, defaults, checkpointing=enable_checkpointing)
        self.plan = apply_accumulation_schedule(self.plan, self.callbacks)
        self.enable_checkpointing = enable_checkpointing and not self.fast_dev_run
        if self.fast_dev_run:
            self.callbacks = [callback for callback in self.callbacks if not isinstance(callback, ModelCheckpoint)]
        self.run_directory: Path | None = None
        self._run: Run | None = None
        self._status, self._fn = "initializing", None
        self._started, self._asks_task = False, True

    def _disable_side_effects(self, callbacks: list[Callback], log_level: str, **plan: Any) -> None:
        """Turn off files, logs, profiler and restarts for the next run, which a search or a tool discards.

        Args:
            callbacks: The callbacks of the run, in place of the trainer's.
            log_level: The lowest level that is shown.
            **plan: Fields of the plan that differ.
        """
        self.callbacks, self.loggers, self.profiler = callbacks, [], make_profiler(None)
        self.enable_checkpointing, self.max_restarts, self._asks_task = False, 0, False
        self.log_settings = LogSettings(log_level)
        self._change_settings(**plan)

    def _change_settings(self, callbacks: Iterable[Callback] = (), **plan: Any) -> None:
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
            train_dataloaders: A training loader, several, or a data module; None if the task provides its loaders.
            val_dataloaders: A validation loader or several, in addition to training loaders.
            datamodule: A data module, in place of loaders.
            ckpt_path: Replaces the trainer's `resume` for this call; the same values.
            weights_only: Accepted for compatibility with Lightning; Lumen never unpickles a checkpoint.
            configure_optimizers: Function that replaces the task's `configure_optimizers`.

        Raises:
            LumenError: A setting, the data, a checkpoint or the training is wrong; see the classes in `lumen.errors`.
            KeyboardInterrupt: A signal asked the run to stop; Lumen has saved a checkpoint and printed the resuming
                command.
        """
        check_training(model, train_dataloaders, has_optimizer=configure_optimizers is not None)
        task, data = model, choose_source(train_dataloaders, datamodule, val_dataloaders)
        origin = self._origin.for_checkpoint(ckpt_path)
        if self.plan.max_steps is None and self.plan.max_epochs is None and self.plan.max_time_s is None:
            raise ConfigError("the length of the training is not set. Set one of max_epochs, max_steps and max_time.")
        session = Session(self, "fit", task, data, val_dataloaders)
        session.check_and_launch()
        self.origin, is_over = origin, False
        with session.open_session():
            while not is_over:
                with session.open_run() as run, treat_malformed_as_damaged(run.checkpoint):
                    begin_training(self, run, configure_optimizers)
                    excluded = train_run(run)
                    is_over = excluded is None
                    if excluded is None:
                        end_training(self, run)
                    else:
                        remove_newer_checkpoints(self, run, excluded)

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
            model: The task to evaluate. Default: the task of the previous run, with its data unless data is given. If
                that run had a `ModelCheckpoint` with a monitor, and you give neither `model` nor `ckpt_path`, Lumen
                loads the best checkpoint of the run.
            dataloaders: A loader, several, or a data module; None if the task provides its loaders.
            ckpt_path: Parameters to load first: "best" or "last" of the run, or any value of `init_from`. Default: the
                task's current parameters, with a warning if they were never trained or loaded.
            verbose: Let the progress bar show the values at the end.
            datamodule: A data module, in place of loaders.
            weights_only: Accepted for compatibility with Lightning; Lumen never unpickles a checkpoint.
            average: Weights to evaluate: "parameters" (the trained ones) or an average, such as "last:5"; see
                `load_from_checkpoint`. The task keeps these weights afterwards.

        Returns:
            One dictionary of logged values per loader, equal on every rank.
        """
        source = choose_source(dataloaders, datamodule)
        run = evaluate_loaders(self, "validate", model, source, ckpt_path, average=average, verbose=verbose)
        return run.values.list_by_loader()

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
        """Evaluate on the test data, with the arguments and the result of `validate`."""
        source = choose_source(dataloaders, datamodule)
        run = evaluate_loaders(self, "test", model, source, ckpt_path, average=average, verbose=verbose)
        return run.values.list_by_loader()

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
        """Predict for each batch, with the arguments of `validate`.

        With `return_predictions=False` only hooks receive the outputs, such as the hooks of `PredictionWriter`.

        Returns:
            The results of `predict_step` for each batch, in order; with several loaders a list of such lists. With
            several processes every rank has the results of all ranks, with tensors on the CPU, so these results must be
            picklable.
        """
        source = choose_source(dataloaders, datamodule)
        keeps = return_predictions is not False
        run = evaluate_loaders(self, "predict", model, source, ckpt_path, average=average, keeps_outputs=keeps)
        if not keeps:
            return None
        return run.values.predictions[0] if len(run.values.predictions) == 1 else run.values.predictions

    def _use_config(self, seed: int, command: str) -> None:
        """Set values that the command line provides; the command line itself writes the config.

        Args:
            seed: The seed with which the command line built all objects.
            command: First words of a command that trains.
        """
        self.seed, self._arguments, self._command = seed, None, command

    def save_checkpoint(
        self, filepath: str | PurePath, *, info: Mapping[str, Any] | None = None, **unknown: Any
    ) -> None:
        """Write a checkpoint of the run in progress.

        Only a checkpoint that is written in `on_step_checkpoint` resumes exactly.

        Collective: every rank must call this.

        Args:
            filepath: The checkpoint directory to create. Lumen never overwrites an existing checkpoint.
            info: Plain data, stored with the checkpoint, for listings of runs.
            unknown: Other arguments of Lightning's method; each raises an error that names the replacement.

        Raises:
            CheckpointError: The checkpoint could not be written; existing files are unchanged.
        """
        refuse_unknown_arguments("save_checkpoint", unknown, INSTEAD_IN_SAVE)
        if not self.optimizers:
            raise ConfigError("save_checkpoint: there is no training to save. Call save_checkpoint during fit.")
        self.run.saves.save_once(as_path_or_url(filepath), info or {})
