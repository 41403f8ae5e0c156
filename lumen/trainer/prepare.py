"""Phases of a run around its loop: checkpoint, data, model, optimizer, end of training, rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from lumen.callbacks.checkpoint_names import is_same_path
from lumen.checkpoint import PARTS, Checkpoint, Part, Weights, find_checkpoint, is_weights
from lumen.checkpoint.format import folder
from lumen.checkpoint.load.config_diff import warn_of_differences
from lumen.checkpoint.load.load_weights import load_weights
from lumen.checkpoint.load.restore import load_model_and_data, restore_run
from lumen.checkpoint.load.weights_source import as_weights, average_checkpoint, check_weights_path, choose_parts
from lumen.checkpoint.optimizer_state import get_group_names
from lumen.checkpoint.settings import get_configured_settings, get_modes
from lumen.console import logger as _log
from lumen.data.nested import fill_tensor
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointMismatch, ConfigError, TrainingError
from lumen.internals.garbage import collect_young_only
from lumen.loop.evaluate import evaluate
from lumen.loop.fit import StopRequested, run_sanity_check
from lumen.loop.step_in_parts import check_halving
from lumen.random import Domain, draw_seed, get_chosen_seed, make_key, seed_generators
from lumen.run.configure_optimizers import build_optimizers
from lumen.run.exact_reduction import check_exact_reduction
from lumen.run.manual import ManualOptimization, check_plan
from lumen.run.open_loaders import open_for_evaluation, open_loaders
from lumen.run.run import Run
from lumen.run.scheduler_config import check_horizons, make_horizon
from lumen.task.data_module import DataModule
from lumen.task.hooks import check_task, fit_to_signature, is_overridden
from lumen.task.materialize import DeferredInit
from lumen.task.task_module import TaskModule
from lumen.task.teacher import Place, find_places, find_teachers
from lumen.trainer.logs import log_status
from lumen.trainer.script_record import record_script
from lumen.trainer.session import log_hyperparameters, open_run
from lumen.trainer.status_messages import get_home, list_checkpoint_folders, log_end, log_setup, record_steps

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer

Source = Weights | str | Path | None  # of the parameters to evaluate
Averages = str | Sequence[str | PurePath] | None  # averages to evaluate in place of a checkpoint's parameters


@final
class RunOrigin:
    """Origin of a run: a checkpoint, weights, or neither. `Trainer` documents the arguments.

    Attributes:
        restarted: True if the run began in an earlier attempt of the same launch, and resumes.
        excluded: Ranges (from, to) of micro-batches that a run leaves out after a rollback; None without a rollback.
        unsaved: Buffers with `persistent=False`, with their values at the beginning of the run.

    Raises:
        ConfigError: Two of the arguments contradict each other.
    """

    def __init__(
        self, resume: str | Path | None, resume_parts: Iterable[Part] | None, init_from: Weights | str | Path | None
    ) -> None:
        self._resume = None if resume is None else str(resume)
        self._parts = choose_parts(resume_parts, self._resume)
        self.restarted = self._resumes_attempt = False
        self.excluded: list[list[int]] | None = None
        self.unsaved: list[tuple[Place, torch.Tensor]] = []
        self._weights = None if init_from is None else as_weights(init_from)
        if self._weights is not None and self._resume is not None and not self.keeps_directory:
            raise ConfigError(
                f"init_from and resume={self._resume} both set the parameters of a new run. Set one of them to null."
            )

    def for_checkpoint(self, ckpt_path: str | Path | None) -> RunOrigin:
        """Return the origin of one `fit`, which may have its own `ckpt_path`.

        Raises:
            ConfigError: The trainer's `resume` names a different checkpoint.
        """
        if ckpt_path is None:
            return copy(self)
        if self._resume not in (None, str(ckpt_path)):
            raise ConfigError(
                f"fit got ckpt_path={ckpt_path}, but the trainer has resume={self._resume}. Remove one of the two."
            )
        return RunOrigin(ckpt_path, None if self._parts == PARTS else self._parts, self._weights)

    def set_rollback(self, excluded: list[list[int]]) -> None:
        """Make the next run of the session begin at its newest checkpoint and leave out micro-batches."""
        self.restarted, self.excluded = True, excluded

    def for_trial(self) -> RunOrigin:
        """Return the origin of a trial run: the same initial weights, and no checkpoint."""
        return RunOrigin(None, None, self._weights)

    @property
    def keeps_directory(self) -> bool:
        """True if a resumed run stays in its directory. From "best" or a path a new run starts."""
        return self.restarted or self._resume in ("auto", "last")

    @property
    def continues_run(self) -> bool:
        """True if the run continues the run of its checkpoint; known after `find_checkpoint`."""
        return self._resumes_attempt or self._resume in ("auto", "last")

    @property
    def parts(self) -> frozenset[Part]:
        """Parts of the checkpoint that the run takes over."""
        return PARTS if self._resumes_attempt else self._parts

    def check_weights(self) -> None:
        """Check that the initial weights exist, before a directory is claimed.

        Raises:
            CheckpointError: The weights do not exist.
        """
        if self._weights is not None and not self.keeps_directory:
            check_weights_path(self._weights.path)

    def find_checkpoint(
        self, folders: Sequence[PurePath], earlier_folders: Sequence[PurePath], processes: Processes, *, writes: bool
    ) -> Checkpoint | None:
        """Find the checkpoint to resume, or return None. Collective: every rank must call this.

        Args:
            folders: The checkpoint folders of this run, with the best checkpoint's folder first.
            earlier_folders: The checkpoint folders of the earlier run of this name, in the same order.
            processes: The processes of the run.
            writes: True if the run writes there: Lumen then moves damaged checkpoints out of the way.

        Raises:
            CheckpointError: The requested checkpoint does not exist or is damaged.
            TrainingError: The checkpoint of a rollback was removed.
        """
        checkpoint = (
            find_checkpoint("auto", folders[0], processes, other_folders=folders[1:]) if self.restarted else None
        )
        if self.excluded is not None and checkpoint is None:
            raise TrainingError(
                f"cannot roll back: no checkpoint is left in {' and '.join(map(str, folders))}. While a run is active, "
                "do not remove its checkpoints."
            )
        self._resumes_attempt = checkpoint is not None
        if checkpoint is None and self._resume is not None:
            checkpoint = find_checkpoint(self._resume, earlier_folders[0], processes, other_folders=earlier_folders[1:])
        if checkpoint is not None:
            if writes and self.keeps_directory:
                newer = partial(folder.find_newer, checkpoint.path, folders)  # damaged ones that block names
                processes.run_on_rank_zero(lambda: [folder.set_aside_damaged(each) for each in newer()])
            _log.info("resuming from %s", checkpoint.path)
            if self._weights is not None:
                _log.info("ignoring init_from: parameters come from the resumed checkpoint")
        return checkpoint

    def choose_seed(self, checkpoint: Checkpoint | None, seed: int | None) -> int:
        """Return the seed: from the checkpoint, the argument or `seed_everything`, else a random seed.

        Raises:
            ConfigError: The argument, or the seed of `seed_everything`, differs from the checkpoint's seed.
            CheckpointMismatch: The checkpoint has weights only, without a run.
        """
        name = "seed_everything" if seed is None else "seed"
        seed = get_chosen_seed() if seed is None else seed
        if checkpoint is not None and "progress" in self.parts:
            if "seed" not in checkpoint.state:
                raise CheckpointMismatch(
                    f"{checkpoint.path} has tensors, but no run to resume. To start from its weights, use init_from."
                )
            saved = int(checkpoint.state["seed"])
            if seed not in (None, saved):
                raise ConfigError(
                    f"{name}: {seed} is not the seed {saved} of {checkpoint.path}. To resume, remove {name}."
                )
            return saved
        return draw_seed() if seed is None else seed

    def load_weights(self, trainer: Trainer, run: Run, ckpt_path: Source, average: Averages) -> Checkpoint | None:
        """Load the model from a checkpoint or weights, if the run has any.

        Args:
            trainer: The trainer of the run, which knows the folders of its checkpoints.
            run: The run, with its model built and placed.
            ckpt_path: The argument of an evaluation.
            average: The averages that an evaluation requests in place of the checkpoint's parameters.

        Returns:
            The checkpoint that was read, or None.
        """
        task, stage, checkpoint = run.task, run.stage, run.checkpoint
        folders = list_checkpoint_folders(trainer)
        weights = self._weights if stage == "fit" and checkpoint is None else None
        if ckpt_path is not None and run.processes.run_on_rank_zero(partial(is_weights, ckpt_path)):
            weights = as_weights(ckpt_path)
            if average is not None and weights.average is not None:
                raise ConfigError(
                    f"average={average!r} and average={weights.average!r} of ckpt_path were set. Remove one of the two."
                )
            if average is not None:
                weights = replace(weights, average=average if isinstance(average, str) else [*map(str, average)])
        elif ckpt_path is not None:
            where = "last" if ckpt_path == "auto" else str(ckpt_path)
            checkpoint = find_checkpoint(where, folders[0], run.processes, other_folders=folders[1:])
            _log.info("parameters from %s", checkpoint.path if checkpoint else None)
            checkpoint = None if checkpoint is None else average_checkpoint(checkpoint, average, run.processes)
        if checkpoint is not None:
            load_model_and_data(run, checkpoint, self.parts if stage == "fit" else PARTS)
            if stage != "fit":
                checkpoint.release()
        elif weights is not None:
            load_weights(task, weights, run.processes)
        elif stage != "fit" and not task._is_filled and any(True for _ in task.parameters()):
            source = get_home(trainer) if any(map(folder.find_newest_committed, folders)) else "a run"
            _log.warning(
                "%s uses the initial parameters of %s. For the parameters of %s, set ckpt_path: --ckpt_path best",
                stage, type(task).__name__, source,
            )  # fmt: skip
        if stage == "fit" or checkpoint is not None or weights is not None:
            task._mark_filled()
        return checkpoint


def prepare_run(
    trainer: Trainer, run: Run, ckpt_path: Source, average: Averages, configure_optimizers: Callable[[], Any] | None
) -> Checkpoint | None:
    """Prepare the data, set up the model, place it and load it. Collective: every rank must call this.

    Args:
        trainer: The trainer that has opened the run.
        run: A run of any stage that has just been opened.
        ckpt_path: Parameters to evaluate; None: the task's current parameters, or the initial parameters of the run.
        average: Averages to evaluate in place of the checkpoint's parameters, or None.
        configure_optimizers: The argument `configure_optimizers` of `fit`, which replaces the task's method. A search
            for a learning rate in `setup` needs the function.

    Returns:
        The checkpoint from which the run resumes, or None.
    """
    trainer._configure_optimizers = configure_optimizers
    strategy, task, datamodule, stage = run.strategy, run.task, run.loaders.datamodule, run.stage
    if not (is_overridden(task, "configure_model") or is_overridden(task, "setup")):  # all modules already exist
        trainer.compilation.check_task(task)
    seed_generators(make_key(run.seed, Domain.INIT, 1))
    run.processes.run_once_per_node(partial(_prepare_data, datamodule, task, is_first=run.processes.node == 0))
    seed_generators(make_key(run.seed, Domain.INIT, 1))  # again, because only one process per node has drawn numbers
    if datamodule is not None:
        fit_to_signature(datamodule, "setup")(stage)
    for hook in run.hooks.setup:
        hook(stage)
    seed_generators(make_key(run.seed, Domain.INIT, 2))
    layers = DeferredInit(task)
    layers.configure_model()
    run.precision.convert(task)
    if trainer.sync_batchnorm and run.processes.world_size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(task)  # type: ignore[no-untyped-call]
    trainer.compilation.compile_modules(task)
    if not strategy.shards:
        layers.materialize(run.seed, strategy.parameter_device)
    strategy.setup(task)
    if run.plan.halve_on_oom:
        check_halving(run)
    layers.materialize(run.seed, strategy.parameter_device)  # for parameters that the strategy has sharded
    return trainer.origin.load_weights(trainer, run, ckpt_path, average)


def _prepare_data(datamodule: DataModule | None, task: TaskModule, *, is_first: bool) -> None:
    for owner in (datamodule, task):
        if owner is not None and (is_first or owner.prepare_data_per_node):
            owner.prepare_data()


def begin_training(trainer: Trainer, run: Run, configure_optimizers: Callable[[], Any] | None) -> None:
    """Build and load all parts of training, up to the sanity check. Collective: every rank must call this.

    A finished run begins too, has nothing left to train, and ends immediately.

    Args:
        trainer: The trainer that has opened the run.
        run: A run of the stage "fit" that has just been opened.
        configure_optimizers: Function that replaces the task's `configure_optimizers`, or None.

    Raises:
        LumenError: The optimizer does not match the task, a schedule the run's length, or the checkpoint the
            configuration; or an object cannot be saved.
    """
    checkpoint = prepare_run(trainer, run, None, None, configure_optimizers)
    task, optim = run.task, run.optim
    with collect_young_only():  # the first optimizer of a process makes torch import its compiler
        built = build_optimizers(task, configure_optimizers or task.configure_optimizers, run.precision)
    if not task.automatic_optimization:
        check_plan(task, run.plan)
    make_manual = partial(ManualOptimization, task, run.hooks, run.precision, run.strategy, run.step)
    optim.set_optimizer(
        *built, is_exact=bool(run.strategy.is_exact), make_manual=make_manual,
        may_step=lambda: run.step.is_updating or not run.log.in_train_step,
    )  # fmt: skip
    for each in optim.optimizers:
        run.strategy.check_optimizer(each)
    check_exact_reduction(run)
    optim.record_built(get_group_names(task, optim.optimizer), get_configured_settings(run), get_modes(task))
    origin = trainer.origin
    if checkpoint is not None:
        restore_run(
            run, checkpoint, parts=origin.parts, continue_records=origin.continues_run and trainer.is_global_zero
        )
        if not origin.continues_run:  # a new run may continue after a callback ended the old run
            run.ending.request_stop(value=False)
    open_loaders(run)
    if run.plan.has_accumulation:
        run.strategy.gradient_sync(last=False)  # an unsupported strategy raises now, not in a later epoch
    if checkpoint is not None:
        warn_of_differences(run, checkpoint, origin.parts)
    optim.set_teachers(find_teachers(task))
    for teacher in optim.teachers:
        teacher.begin(task, lambda: trainer.estimated_stepping_batches)
    if not trainer.fast_dev_run:
        lengths = run.loaders.get_epoch_lengths()
        check_horizons(optim.schedulers, make_horizon(run.plan, lengths, resumed=run.checkpoint is not None))
    if run.saves.is_enabled:
        run.saves.check_first_save()  # raises now, not after the first epoch, if an object cannot be saved
    if origin.excluded is None:
        saved = find_places(run.task, buffers=True, persistent=True)
        found = find_places(run.task, buffers=True).items()
        origin.unsaved = [(place, place[0][place[1]].clone()) for name, place in found if name not in saved]
    else:
        run.progress.exclude_steps(origin.excluded)
        for (held, key), value in origin.unsaved:  # the values of a new process
            if (buffer := held.get(key)) is not None and buffer.shape == value.shape:
                fill_tensor(buffer, value)
            else:
                held[key] = value.clone()
    if checkpoint is not None and (reason := run.ending.limit_reached):
        log_status("nothing to do: %s is finished (%s, step %d)", checkpoint.path, reason, run.progress.step)
        run.records.goodput.stop_writing()
    trainer._started = True
    record_steps(run, trainer.run_directory)
    record_script(trainer, run)
    log_hyperparameters(run.records.loggers, run.task, run.loaders.datamodule)
    for logger in run.records.loggers:
        logger.log_graph(run.task)
    log_setup(run)
    for hook in run.hooks.on_fit_start:
        hook()
    if checkpoint is None and run.loaders.evaluation and run.plan.sanity_batches:
        run_sanity_check(run)


def end_training(trainer: Trainer, run: Run) -> None:
    """Call the last hooks, and log how the run ended."""
    for hook in run.hooks.on_fit_end:
        hook()
    run.saves.check_run_directory()
    if run.optim.manual is not None and run.checkpoint is None:
        run.optim.manual.warn_of_idle_optimizers()
    if skipped := run.precision.skipped_updates:
        _log.info("%s: %d updates were skipped, because their gradients overflowed", run.precision.name, skipped)
    log_end(trainer, run)


def remove_newer_checkpoints(trainer: Trainer, run: Run, excluded: list[int]) -> None:
    """Remove all checkpoints that include the micro-batches to leave out. The session's next run begins before these.

    Collective: every rank must call this.

    Args:
        trainer: The trainer in `fit`.
        run: The trainer's run, in which hooks of all ranks have requested the rollback.
        excluded: The range (from, to) of the run's micro-batches to leave out.

    Raises:
        StopRequested: A signal asked the run to stop meanwhile; the resumed run rolls back.
        TrainingError: No older checkpoint exists.
    """
    run.ending.vote_now()
    if run.ending.vote.stop_signal is not None:
        raise StopRequested
    progress, folders = run.progress, list_checkpoint_folders(trainer)
    run.saves.finish_save()
    run.processes.run_on_rank_zero(run.saves.wait_for_removals)  # A checkpoint in removal must not be chosen.
    newer = run.processes.run_on_rank_zero(partial(_find_newer, folders, excluded[0]))
    kept = None
    if trainer.run_directory is not None:
        kept = folder.open_newest_valid(
            folders[0], _log.warning, run.processes, sections=(), other_folders=folders[1:], excluded=newer
        )
    if kept is None:
        but = f", only {newer[0].name} and newer ones" if newer else ""
        raise TrainingError(
            f"cannot roll back from step {progress.step}: no checkpoint is from before micro-batch {excluded[0]}{but}. "
            "Let ModelCheckpoint save more often or keep more checkpoints (every_n_train_steps, keep_last). Or lower "
            "before of SpikeDetection, or raise its warmup."
        )
    run.processes.run_on_rank_zero(partial(folder.remove_checkpoints, newer))
    _log.warning(
        "rolling back from step %d to %s, to leave out micro-batches %d to %d of the run",
        progress.step, kept.path.name, excluded[0], excluded[1] - 1,
    )  # fmt: skip
    trainer.origin.set_rollback([*progress.left_out, excluded])
    trainer.strategy.connect()  # resets the timeouts to `startup_timeout_s`: the start may compile


def _find_newer(folders: Sequence[PurePath], micro_batches: int) -> list[PurePath]:
    """Return the checkpoints that include more than `micro_batches` micro-batches."""
    found = [path for each in folders for path in folder.find_checkpoints(each)]
    return [path for path in found if folder.read_info(path)["micro_batches"] > micro_batches]


def evaluate_loaders(
    trainer: Trainer,
    stage: str,
    model: TaskModule | None,
    data: Any,
    ckpt_path: Source,
    *,
    average: Averages,
    keeps_outputs: bool = True,
    verbose: bool = True,
) -> Run:
    """Open a run of a stage, evaluate all its loaders, and close it. Collective: every rank must call this.

    Args:
        trainer: The trainer, which is not in a run.
        stage: "validate", "test" or "predict".
        model: The task; None: the task of the previous run.
        data: A loader, several, or a data module; None: the task's loaders, or the data of the previous run.
        ckpt_path: Parameters to load first.
        average: Averages to load in place of the checkpoint's parameters.
        keeps_outputs: Keep the results of `predict_step`.
        verbose: Let the progress bar show the values at the end.

    Returns:
        The run, with its values.
    """
    task, data, ckpt_path = _get_last_run_inputs(trainer, stage, model, data, ckpt_path)
    check_task(task, data, ["predict_step"] * (stage == "predict"))
    if (step := {"validate": "validation_step", "test": "test_step"}.get(stage)) and not is_overridden(task, step):
        raise ConfigError(f"{type(task).__name__} has no {step}. Define `{step}(self, batch)`.")
    if average is not None and ckpt_path is None:
        raise ConfigError(
            f"{stage}: average={average!r} needs a checkpoint. Set ckpt_path too, as in ckpt_path='last'. After fit "
            "with EMA or SWA the task has the average: then remove average."
        )
    with open_run(trainer, stage, task, data, data) as run:
        run.evaluate_checkpoint(prepare_run(trainer, run, ckpt_path, average, None))
        open_for_evaluation(run, stage)
        run.values.configure_evaluation(keeps_predictions=keeps_outputs, are_shown=verbose)
        if not evaluate(run, stage):
            raise StopRequested
    return run


def _get_last_run_inputs(
    trainer: Trainer, stage: str, task: TaskModule | None, data: Any, ckpt_path: Source
) -> tuple[TaskModule, Any, Source]:
    """Return task, data and checkpoint of an evaluation; the previous run provides omitted ones."""
    if task is not None:
        return task, data, ckpt_path
    if trainer._run is None:
        raise ConfigError(f"{stage}: no model was passed, and this trainer has had no run. Call {stage}(model, ...).")
    if data is None:
        data = trainer._run.loaders.datamodule
    best, saves = trainer.checkpoint_callback, trainer.run_directory is not None
    if ckpt_path is None and saves and best is not None and best.monitor is not None and best.best_model_path:
        own, *_ = list_checkpoint_folders(trainer)
        is_own = best.dirpath is not None and is_same_path(best.dirpath, own)  # Another trainer may use `best` too.
        ckpt_path = best.best_model_path if is_own else "best"
        _log.info("%s: using the best parameters of the previous run, %s", stage, ckpt_path)
    return trainer._run.task, data, ckpt_path
