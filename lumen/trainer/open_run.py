"""Opening a run for a stage, closing it whatever happens, and going back to an earlier checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from lumen.callbacks import (
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    ThroughputMonitor,
    savers_of,
)
from lumen.callbacks.checkpoint_names import is_same
from lumen.checkpoint import Checkpoint, Saves, storage_of
from lumen.checkpoint.format.folder import find_checkpoints, newest_valid, read_info, remove_checkpoints
from lumen.console import logger as _log
from lumen.distributed.launch import relaunch
from lumen.distributed.restarts import needs_launcher
from lumen.errors import ConfigError, TrainingError
from lumen.internals.garbage import collected_every
from lumen.internals.stop_signals import LEFT
from lumen.loggers import Logger, with_own_record
from lumen.loop.fit import RolledBack, StopRequested
from lumen.metrics.torchmetrics_states import unshare_metrics
from lumen.precision import make_precision
from lumen.profilers import profiled
from lumen.run.anomalies import OperationFinder
from lumen.run.goodput import Goodput
from lumen.run.place import note_place
from lumen.run.run import Run
from lumen.strategies import check_data_ranks
from lumen.strategies.factory import unused_devices
from lumen.task.data_module import DataModule
from lumen.task.given import check_task
from lumen.task.hooks import check_hooks, fitted, misspelt_hooks, overridden_state_dicts
from lumen.task.task_module import TaskModule
from lumen.trainer import process_settings
from lumen.trainer.join_callbacks import join_callbacks
from lumen.trainer.logs import apart_from_others, console_log, log_file
from lumen.trainer.process_settings import turn
from lumen.trainer.run_directory import RunDirectory
from lumen.trainer.stop_request import interruption, limited, stop_signals
from lumen.trainer.telling import tell_failure, tell_place, tell_restart, tell_stop
from lumen.trainer.watch import debuggable, watched

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


@contextmanager
def opened(trainer: Trainer, stage: str, task: TaskModule, data: Any, val_loaders: Any) -> Iterator[Run]:
    """The context in which a trainer runs a stage.

    Args:
        trainer: Not in a run yet.
        stage: "fit", "validate", "test" or "predict".
        task: What it is run on.
        data: A data module, or a loader or several.
        val_loaders: Those of the validation, when `data` is the loader of `fit`.

    Raises:
        ConfigError: The trainer is in a run, or something cannot be run.
        KeyboardInterrupt: The run was asked to stop.
    """
    check_task(task, data)
    datamodule = data if isinstance(data, DataModule) else None
    if trainer._status == "running":
        raise ConfigError(f"this trainer is in a run; call {stage} after it, or use a second Trainer.")
    check_hooks(task, datamodule, [])
    replaced = join_callbacks(trainer, stage, task)
    check_hooks(task, datamodule, trainer.callbacks)
    trainer.name = type(task).__name__.lower() if trainer.name is None else trainer.name
    trainer._started = False
    if needs_launcher(trainer.processes, trainer.max_restarts if stage == "fit" else 0):
        relaunch(trainer.world_size, trainer.max_restarts)
    with ExitStack() as closing:
        closing.enter_context(turn(task, datamodule, trains=stage == "fit"))
        grace = closing.enter_context(limited(trainer.grace_s, saves=stage == "fit"))
        trainer._status, trainer._fn = "running", stage
        closing.push(partial(_note_end, trainer))
        closing.enter_context(
            process_settings.torch_settings(
                deterministic=trainer.deterministic,
                detect_anomaly=trainer.detect_anomaly,
                matmul_precision=trainer.matmul_precision,
                benchmark=trainer.benchmark,
            )
        )
        closing.enter_context(trainer.compilation)
        strategy, processes, first = trainer.strategy, trainer.processes, trainer.is_global_zero
        closing.enter_context(apart_from_others(has_files=False))
        closing.enter_context(console_log(trainer.log_settings, shown=first))
        if notice := unused_devices(strategy):
            _log.info(notice)
        if trainer.detect_anomaly and trainer.compilation.setting:
            _log.info("detect_anomaly looks at every operation: nothing is compiled in this run")
        if names := ", ".join(type(each).__name__ for each in replaced):
            _log.info("the callbacks of %s.configure_callbacks take the place of: %s", type(task).__name__, names)
        for notice in [*misspelt_hooks(task, datamodule, trainer.callbacks), *overridden_state_dicts(task)]:
            _log.warning(notice)
        closing.enter_context(processes.explained())
        strategy.connect()
        check_data_ranks(strategy)
        if strategy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(strategy.device)  # what `memory_mb` tells is of this run
        trainer.name = _agree_on_name_and_callbacks(trainer)
        if stage == "fit":
            processes.together(partial(_check_places, trainer))
        check_home, directory = _claim(trainer, closing) if stage == "fit" else (None, None)
        if directory is not None:
            _open_logs(trainer, directory, closing)
        goodput = Goodput(directory if first else None, lambda: run.step.counters.waited_s)
        loggers = with_own_record(trainer.loggers) if directory is not None and first else []
        checkpoint, own = None, list[PurePath]()
        if stage == "fit":
            of_name = trainer.default_root_dir / str(trainer.name)
            own, earlier = (checkpoints_of(trainer, place) for place in (directory or of_name, of_name))
            checkpoint = trainer.origin.find(own, earlier, processes, writes=directory is not None)
            tell_restart(trainer, checkpoint)
        seed = processes.on_rank_zero(partial(trainer.origin.seed_of, checkpoint, trainer.seed))
        precision = make_precision(trainer.precision)
        precision.setup(strategy.device)
        closing.callback(OperationFinder.lift, precision)
        given = None if datamodule is not None else (data, val_loaders)
        run = trainer._run = Run(trainer, stage, task, datamodule, given, precision, seed, loggers)
        if stage == "fit":
            trainer._counted = run.progress
        if directory is not None and first:
            run.records.goodput = goodput
            closing.callback(lambda: goodput.close(run.progress.step))
        closing.enter_context(debuggable(processes))
        watch = closing.enter_context(watched(run))
        log, records, ending = run.log, run.records, run.ending
        asks = run.hooks.may_stop_at_steps and processes.world_size > 1
        of_any = processes.sum(list(map(float, (records.is_logged, log.has_epoch_ends, log.has_metrics, asks))))
        records.is_logged, log.has_epoch_ends, log.has_metrics, ending.asks_each_step = (ranks > 0 for ranks in of_any)
        run.checkpoint, run.saves = checkpoint, Saves(run, check_home)
        task._run = run
        if datamodule is not None:
            datamodule._run = run
        if directory is not None and first:
            process_settings.write_environment(directory, strategy)
        if directory is not None:
            for logger in [*trainer.loggers, *loggers]:
                logger.run_directory = directory
            processes.on_rank_zero(partial(_open_loggers, trainer, loggers, directory, checkpoint, closing))
        closing.enter_context(stop_signals(run, grace, own))
        if trainer.gc_every_n_steps is not None:
            closing.enter_context(collected_every(trainer.gc_every_n_steps, run))
        closing.callback(strategy.teardown)
        closing.callback(_close, run)
        closing.callback(run.saves.close)
        for hook in reversed(run.hooks.teardown):
            closing.callback(hook, stage)
        if datamodule is not None:
            closing.callback(fitted(datamodule, "teardown"), stage)
        closing.callback(watch.set)  # what is done from there on may wait for a save as long as it takes
        try:
            with profiled(run, trainer.profiler, directory), rolling_back(run, own):
                yield run
        except StopRequested:
            _leave(trainer, run, directory)
        except BaseException as error:
            note_place(run, error)
            if run.processes.world_size == 1:
                with suppress(Exception):  # a device that has failed gives no values
                    run.records.write_row()
            for hook in run.hooks.on_exception:
                try:
                    hook(error)
                except Exception:  # the first failure is the one to show
                    _log.exception("on_exception failed too")
            raise


def _note_end(trainer: Trainer, kind: type[BaseException] | None, *_: Any) -> None:
    trainer._status = "finished" if kind is None else "interrupted"


def _close(run: Run) -> None:
    """End the loaders' workers; the task is again one without a run, whose `log` does nothing."""
    run.stage = ""
    run.optim.release()
    run.loaders.close()
    unshare_metrics(run.task)


def checkpoints_of(trainer: Trainer, run_directory: Path) -> list[PurePath]:
    """Where the checkpoints of a run lie, first those of the callback that says which is best."""
    default = run_directory / "checkpoints"
    folders = [saver.given_dirpath or default for saver in savers_of(trainer.callbacks)] or [default]
    return [each for number, each in enumerate(folders) if not any(is_same(each, one) for one in folders[:number])]


def _agree_on_name_and_callbacks(trainer: Trainer) -> str | None:
    """Rank 0's name of the run. Collective.

    Raises:
        ConfigError: Callbacks differ between ranks. Those that a run has by itself, which ask nothing of other ranks,
            may.
    """
    shown = (ThroughputMonitor, ModelSummary, ProgressBar)
    acting = [(type(each).__qualname__, each.state_key) for each in trainer.callbacks if not isinstance(each, shown)]
    (name, first), *others = trainer.processes.gather((trainer.name, acting))
    for rank, (_, callbacks) in enumerate(others, 1):
        if callbacks != first:
            raise ConfigError(
                f"callbacks differ between ranks: rank 0 has {_in_words(first)}; rank {rank} has "
                f"{_in_words(callbacks)}. What callbacks agree on all ranks agree on, in one order: give every rank "
                "the same ones in the same order. One that acts on a single rank can ask trainer.is_global_zero."
            )
    return name


def _in_words(callbacks: Iterable[tuple[str, str]]) -> str:
    return ", ".join(key if key.startswith(kind) else f"{kind} ({key})" for kind, key in callbacks) or "none"


def _check_places(trainer: Trainer) -> None:
    """Every process writes its share of a checkpoint itself."""
    given = [each.given_dirpath for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]
    given += [each.dirpath for each in trainer.callbacks if isinstance(each, OnExceptionCheckpoint)]
    for place in given:
        if place is not None:
            storage_of(place).check_writable(place)


def _claim(trainer: Trainer, closing: ExitStack) -> tuple[Callable[[], None] | None, Path | None]:
    """The run's directory, if it writes anything; held by the first process until the end.

    Returns:
        On the first process what finds out whether it is still there, and where it is.
    """
    origin, processes = trainer.origin, trainer.processes
    origin.restarted = False
    launchers = {each for each in processes.gather(processes.launcher) if each is not None}

    held: list[RunDirectory] = []

    def claim() -> tuple[Path | None, bool]:
        origin.check()
        if trainer.fast_dev_run or not (trainer.loggers or trainer.enable_checkpointing):
            return None, False
        root, name = trainer.default_root_dir, str(trainer.name)
        if origin.rolled_back is not None:
            directory = closing.enter_context(RunDirectory.claim_again(origin.rolled_back[0]))
        else:
            directory = closing.enter_context(RunDirectory.claim(root, name, reuse=origin.stays, launchers=launchers))
        held.append(directory)
        if not (origin.stays or directory.restarted):
            closing.callback(_give_back_if_unused, trainer, directory.path)
        return directory.path, directory.restarted

    trainer.run_directory, origin.restarted = processes.on_rank_zero(claim)
    return (held[0].check if held else None), trainer.run_directory


def _open_logs(trainer: Trainer, directory: Path, closing: ExitStack) -> None:
    """`run.log` is the first process's; with several each has a file of its own beside it, by when the run began."""
    processes = trainer.processes
    closing.enter_context(apart_from_others(has_files=True))
    if processes.is_global_zero:
        closing.enter_context(log_file(directory / "run.log", trainer.log_settings))
    if processes.world_size > 1:
        began = processes.broadcast(f"{datetime.now():%Y%m%d-%H%M%S}")
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        closing.enter_context(log_file(directory / "logs" / f"{began}-rank{processes.rank}.log", trainer.log_settings))
        processes.barrier()  # all are open before anything can fail and give the directory back
    tell_place(directory)
    closing.enter_context(_failure_recorded(trainer, directory))
    closing.enter_context(processes.explained())  # what is recorded is what is raised


@contextmanager
def _failure_recorded(trainer: Trainer, directory: Path) -> Iterator[None]:
    """Write what a run fails by, with its traceback, into the logs of each process that it ends."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if _is_by_signal(error):
            raise
        step, folders = trainer.run.progress.step if trainer._started else 0, checkpoints_of(trainer, directory)
        tell_failure(error, step, trainer, directory, folders, stays=_stays(trainer))
        raise


def _give_back_if_unused(trainer: Trainer, directory: Path) -> None:
    """Leave nothing behind of a run that failed before its training began: its name stays free."""
    if not _stays(trainer):
        shutil.rmtree(directory, ignore_errors=True)  # the failure is what is to be seen


def _stays(trainer: Trainer) -> bool:
    """Whether the run's directory is kept: training has begun, or it did in an earlier part of the run."""
    return trainer._started or trainer.origin.stays


def _open_loggers(
    trainer: Trainer, loggers: Iterable[Logger], directory: Path, checkpoint: Checkpoint | None, closing: ExitStack
) -> None:
    for logger in loggers:
        logger.open(directory, resumed=trainer.origin.stays and _has_record(checkpoint, logger.state_key))
        closing.push(partial(_finalize, logger))


def _finalize(logger: Logger, kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Tell a logger that the run has ended, and how."""
    if error is None:
        logger.finalize("success")
    else:
        logger.finalize("interrupted" if _is_by_signal(error) else "failed")


def _is_by_signal(error: BaseException) -> bool:
    """Whether a run ends because it was asked to."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in LEFT)


def _has_record(checkpoint: Checkpoint | None, logger: str) -> bool:
    """Whether a checkpoint says how far a logger's record goes; without that nothing of it can be told apart."""
    return checkpoint is not None and logger in checkpoint.state["loggers"]


def _leave(trainer: Trainer, run: Run, directory: Path | None) -> None:
    """Say how to go on, and end as the signal asks."""
    number = run.ending.vote.stop_signal
    leaving = interruption(number)
    for hook in run.hooks.on_exception:
        hook(leaving)
    tell_stop(run, number, directory, checkpoints_of(trainer, directory) if directory is not None else [])
    raise leaving from None


@contextmanager
def rolling_back(run: Run, folders: Sequence[PurePath]) -> Iterator[None]:
    """The context of a training that may ask to go back: the trainer's origin is then where it is to begin again.

    Args:
        run: The run in training.
        folders: Where its checkpoints lie, that with the best one first.

    Raises:
        StopRequested: The run was asked to leave meanwhile; when it goes on, it will come here again.
        TrainingError: There is no checkpoint from before what is to be left out.
    """
    try:
        yield
        return
    except RolledBack as asked:
        left_out = asked.left_out
    run.ending.agree()
    if run.ending.vote.stop_signal is not None:
        raise StopRequested
    trainer, progress = run.trainer, run.progress
    run.saves.settle()
    newer = run.processes.on_rank_zero(partial(_newer, folders, left_out[0]))
    kept = None
    if trainer.run_directory is not None:
        kept = newest_valid(folders[0], _log.warning, run.processes, sections=(), beside=folders[1:], without=newer)
    if kept is None:
        but = f", only {newer[0].name} and newer ones" if newer else ""
        raise TrainingError(
            f"the run is to go back from step {progress.step} to before its micro-batch {left_out[0]}, and there is no "
            f"checkpoint from then{but}. Let ModelCheckpoint save more often or keep more (every_n_train_steps, "
            "keep_last), leave out fewer steps before a spike, or look for spikes only once a checkpoint is old enough "
            "(SpikeDetection: before, warmup)."
        )
    run.processes.on_rank_zero(partial(remove_checkpoints, newer))
    _log.warning(
        "going back from step %d to %s, to leave out the micro-batches %d to %d of the run",
        progress.step, kept.path.name, left_out[0], left_out[1] - 1,
    )  # fmt: skip
    trainer.origin = trainer.origin.back(trainer.run_directory, [*progress.left_out, left_out])


def _newer(folders: Sequence[PurePath], micro_batches: int) -> list[PurePath]:
    """The checkpoints of more than so many micro-batches."""
    found = [path for folder in folders for path in find_checkpoints(folder)]
    return [path for path in found if read_info(path)["micro_batches"] > micro_batches]
