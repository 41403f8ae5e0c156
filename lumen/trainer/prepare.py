"""What is done between the opening of a run and its loop: data, modules, parameters, optimizer, and what is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from torch import nn

from lumen.checkpoint import (
    Checkpoint,
    Weights,
    check_savable,
    compare,
    configured,
    groups_of,
    keeps_unknown_state,
    load_run,
    modes_of,
)
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.garbage import only_young_collected
from lumen.loop.evaluate import evaluate
from lumen.loop.fit import StopRequested
from lumen.loop.step_in_parts import check_halving
from lumen.random import Domain, make_key, seed_generators
from lumen.run.configure_optimizers import build_optimizers
from lumen.run.manual import ManualOptimization, check_plan
from lumen.run.open_loaders import open_evaluation_loaders, open_loaders
from lumen.run.run import Run
from lumen.run.schedule_checks import check_horizons
from lumen.task.data_module import DataModule
from lumen.task.given import check_task
from lumen.task.hooks import fitted, overrides
from lumen.task.materialize import DeferredInit
from lumen.task.task_module import TaskModule
from lumen.task.teacher import teachers_of
from lumen.trainer.open_run import checkpoints_of, opened

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


def prepare(
    run: Run,
    ckpt_path: Weights | str | Path | None = None,
    given: Callable[[], Any] | None = None,
    average: str | Sequence[str | PurePath] | None = None,
) -> Checkpoint | None:
    """Prepare the data, set up, place and load the model. Collective: every rank must call this.

    Args:
        run: Just opened, of any stage.
        ckpt_path: The parameters to evaluate with; None: those that the task has, or that the run begins with.
        given: What `fit` was given in place of the task's `configure_optimizers`, for searches in `setup`.
        average: What to evaluate in place of the checkpoint's parameters; None: these.

    Returns:
        The checkpoint that the run goes on from.
    """
    run.trainer._given_optimizers = given
    trainer, strategy, task, datamodule, stage = run.trainer, run.strategy, run.task, run.loaders.datamodule, run.stage
    if not (overrides(task, "configure_model") or overrides(task, "setup")):  # its modules are all there
        trainer.compilation.check(task)
    seed_generators(make_key(run.seed, Domain.INIT, 1))
    run.processes.once_per_node(partial(_prepare_data, datamodule, task, is_first=run.processes.node == 0))
    seed_generators(make_key(run.seed, Domain.INIT, 1))  # once more: only one process of a node has drawn there
    if datamodule is not None:
        fitted(datamodule, "setup")(stage)
    for hook in run.hooks.setup:
        hook(stage)
    seed_generators(make_key(run.seed, Domain.INIT, 2))
    layers = DeferredInit(task)
    layers.configure()
    run.precision.convert(task)
    if trainer.sync_batchnorm and run.processes.world_size > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(task)  # type: ignore[no-untyped-call]
    trainer.compilation.apply(task)
    if not strategy.shards:
        layers.materialize(run.seed, strategy.parameter_device)
    strategy.setup(task)
    if run.plan.halve_on_oom:
        check_halving(run)
    layers.materialize(run.seed, strategy.parameter_device)  # what the strategy has cut up
    home = trainer.run_directory or trainer.default_root_dir / str(trainer.name)
    found: Checkpoint | None = trainer.origin.fill(run, ckpt_path, home, checkpoints_of(trainer, home), average)
    return found


def prepare_training(run: Run, configure_optimizers: Callable[[], Any], checkpoint: Checkpoint | None) -> None:
    """Build the optimizer, open the loaders, and take over what a checkpoint holds. Collective.

    Args:
        run: Of `fit`; its model is placed and loaded.
        configure_optimizers: The task's, or what was given in its place.
        checkpoint: What the run goes on from; None: it begins anew.

    Raises:
        LumenError: Something does not fit: the optimizer to the task, a schedule to the run's length, the checkpoint to
            the configuration; or something cannot be saved.
    """
    trainer, task, optim = run.trainer, run.task, run.optim
    with only_young_collected():  # the first optimizer of a process makes torch import its compiler
        built = build_optimizers(task, configure_optimizers, run.precision)
    if not task.automatic_optimization:
        check_plan(task, run.plan)
    by_hand = partial(
        ManualOptimization, task, hooks=run.hooks, precision=run.precision, strategy=run.strategy, step=run.step
    )
    optim.take(*built, may_step=lambda: optim.is_updating or not run.log.in_train_step, by_hand=by_hand)
    for each in optim.optimizers:
        run.strategy.check_optimizer(each)
    optim.built_groups = groups_of(task, optim.optimizer)
    optim.configured, optim.built = configured(run), modes_of(task)
    origin = trainer.origin
    if checkpoint is not None:
        load_run(run, checkpoint, parts=origin.parts, continue_records=origin.stays and trainer.is_global_zero)
        run.progress.should_stop &= origin.stays  # a new run may go on where a callback ended the old one
    open_loaders(run)
    if run.plan.accumulates:
        run.strategy.gradient_sync(last=False)  # one that cannot says so now, not in the epoch that needs it first
    if checkpoint is not None:
        compare(run, checkpoint, origin.parts)
    optim.teachers = teachers_of(task)
    for teacher in optim.teachers:
        teacher.begin(task, lambda: trainer.estimated_stepping_batches)
    if not trainer.fast_dev_run:
        check_horizons(run)
    if trainer.enable_checkpointing:
        check_savable(run)  # what cannot be saved is found now, not after the first epoch
        run.saves.checks_update = keeps_unknown_state(optim.optimizer)


def _prepare_data(datamodule: DataModule | None, task: TaskModule, *, is_first: bool) -> None:
    for owner in (datamodule, task):
        if owner is not None and (is_first or owner.prepare_data_per_node):
            owner.prepare_data()


_STEPS = {"validate": "validation_step", "test": "test_step"}


def evaluate_all(
    trainer: Trainer,
    stage: str,
    model: TaskModule | None,
    data: Any,
    ckpt_path: Weights | str | Path | None,
    *,
    average: str | Sequence[str | PurePath] | None = None,
    keeps_outputs: bool = True,
    verbose: bool = True,
) -> Run:
    """Open a run of a stage, evaluate every loader of it, and close it. Collective: every rank must call this.

    Args:
        trainer: Not in a run.
        stage: "validate", "test" or "predict".
        model: None: that of the run before.
        data: A loader, several, or a data module; None: the task's, or those of the run before.
        ckpt_path: Parameters to load first.
        average: Averages to load in their place.
        keeps_outputs: Keep what `predict_step` returns.
        verbose: Let the progress bar show the values at the end.

    Returns:
        The run, with its values.
    """
    task, data, ckpt_path = _of_last_run(trainer, stage, model, data, ckpt_path)
    check_task(task, data)
    if (step := _STEPS.get(stage)) and not overrides(task, step):
        raise ConfigError(f"{type(task).__name__} has no {step}. Define `{step}(self, batch)`.")
    if average is not None and ckpt_path is None:
        raise ConfigError(
            f"{stage}: average={average!r} is of a checkpoint, and none is given. Set ckpt_path too, as in "
            "ckpt_path='last'; after fit with EMA or SWA the task itself holds the average."
        )
    with opened(trainer, stage, task, data, data) as run:
        run.checkpoint = prepare(run, ckpt_path, average=average)
        run.loaders.evaluation = open_evaluation_loaders(run, stage)
        run.calls.bind(run.loaders)
        run.values.keeps_predictions, run.values.are_shown = keeps_outputs, verbose
        if not evaluate(run, stage):
            raise StopRequested
    return run


def _of_last_run(
    trainer: Trainer, stage: str, task: TaskModule | None, data: Any, ckpt_path: Weights | str | Path | None
) -> tuple[TaskModule, Any, Weights | str | Path | None]:
    """What to evaluate, where a call leaves that to the run before it."""
    if task is not None:
        return task, data, ckpt_path
    if trainer._run is None:
        raise ConfigError(f"{stage}: there is no model, and no run before this one. Give one: {stage}(model, ...).")
    if data is None:
        data = trainer._run.loaders.datamodule
    best = trainer.checkpoint_callback
    if ckpt_path is None and best is not None and best.monitor is not None and best.best_model_path:
        ckpt_path = best.best_model_path
        _log.info("%s: with the best parameters of the run before, %s", stage, ckpt_path)
    return trainer._run.task, data, ckpt_path
