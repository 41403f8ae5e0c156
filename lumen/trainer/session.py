"""Session: a run from opening to close, in phases. Each phase releases what it acquired, however the run ends.

`open_run` enters the phases in this order, and exits them in reverse order. If a phase fails, Lumen exits the phases
before it. A run that rolls back exits the phases from `make_run` on. `fit` enters these phases again for a new run, and
keeps the lock of the thread, the directory and the logs.

| phase | acquires | releases |
|---|---|---|
| `wait_for_turn` | the lock that allows one run at a time in a process | the lock, for the next thread |
| `limit_grace` | a thread that ends the process in time after a signal | the thread |
| `note_status` | the trainer's state "running" | "finished" or "interrupted" |
| `switch_torch` | torch's global settings, the compiler's limit of recompilations | previous values of both |
| `show_messages` | handlers of loggers, for the terminal | the handlers |
| `connect_processes` | the processes of the run, which agree on its name | nothing: groups stay; explains a failure |
| `claim_directory` | the run directory and its lock, in `fit` | the lock; the directory of a `fit` that never started |
| `write_logs` | `run.log` and the log of each rank | the files, with the failure in them |
| `make_run` | the checkpoint to resume, the seed, the parts | the record of time; `detect_anomaly` |
| `watch_progress` | the thread that ends a hanging job; debuggers of several ranks | both |
| `open_loggers` | the loggers, after ranks agree on flags of logging | each logger, with the status of the run |
| `catch_signals` | handlers of the signals that request a stop | previous handlers |
| `collect_garbage` | Python's garbage collection, every n steps | previous setting |
| `attach_task` | task and data module, which know the run now | workers; pending saves, strategy; calls `teardown` |
| `report_end` | nothing | nothing: calls `on_exception`, and logs how to resume |
| `profile` | the profiler's timers around the parts of the run | the timers, with a report |
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing as closed, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from lumen import callbacks
from lumen.callbacks.checkpoint_names import choose_folder, locate_folder
from lumen.checkpoint import CheckpointSaver, get_storage
from lumen.console import logger as _log
from lumen.distributed.launch import relaunch
from lumen.distributed.restarts import is_restarted, needs_launcher
from lumen.errors import ConfigError, RunDirectoryError
from lumen.internals.garbage import GarbageCollector
from lumen.internals.hydra import describe_job
from lumen.internals.stop_signals import STOP_EXIT_CODES
from lumen.loggers import Logger, add_csv_logger
from lumen.loop.fit import StopRequested
from lumen.precision import make_precision
from lumen.profilers import profile_run
from lumen.run.anomalies import OperationFinder
from lumen.run.error_notes import note_place
from lumen.run.goodput import Goodput
from lumen.run.run import Run
from lumen.strategies import check_data_ranks, set_reduction
from lumen.strategies.factory import describe_unused_devices
from lumen.task.data_module import DataModule
from lumen.task.hooks import (
    Hooks,
    check_hooks,
    describe_misspelt_hooks,
    describe_overridden_state_dicts,
    fit_to_signature,
    is_overridden,
)
from lumen.task.hyperparameters import get_logged_hparams
from lumen.task.task_module import TaskModule
from lumen.trainer.hang_watch import handle_debuggers, watch_run
from lumen.trainer.logs import log_status, log_to_console, log_to_file, separate_nested_runs
from lumen.trainer.process_settings import set_torch_switches, take_process_turn, write_environment
from lumen.trainer.run_directory import RunDirectory, create_directory
from lumen.trainer.status_messages import list_checkpoint_folders, log_failure, log_restart, log_stop
from lumen.trainer.stop_request import GracePeriod, handle_stop_signals, make_interruption

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


#: Arguments of a trainer that change results, and that no part of the run stores.
_SWITCHES = ("matmul_precision", "benchmark", "deterministic", "sync_batchnorm")


@final
class Session:
    """Sequence of phases that opens, uses and closes a run; each phase sets attributes that later phases need.

    Args:
        trainer: The trainer that opens the run; not in a run yet.
        stage: "fit", "validate", "test" or "predict".
        task: The task of the run.
        data: A data module, or a loader or several.
        val_loaders: Loaders of the validation, when `data` is the loader of `fit`.

    Attributes:
        datamodule: The data module; None if loaders were passed.
        trains: True if the stage is "fit".
        replaced: Callbacks of the trainer that the task's callbacks have replaced.
        grace: The thread that ends the process in time after a signal.
        directory: The run directory; None without a run directory, as in evaluations.
        home: The directory of the run that `resume` means by "auto", "last" and "best".
        record: The directory of the loggers' record: the run directory, or that of an evaluation; None without records.
        resumes_record: True if the evaluation continues an earlier record.
        check_home: Function that checks on rank 0 if the directory still exists; None elsewhere.
        loggers: Loggers of this process, including the logger of `metrics.csv`.
        run: The open run.
        watch: Event that ends the watch over the run, if set.
    """

    grace: GracePeriod
    home: Path
    run: Run
    watch: threading.Event

    def __init__(self, trainer: Trainer, stage: str, task: TaskModule, data: Any, val_loaders: Any) -> None:
        self.trainer, self.stage, self.task = trainer, stage, task
        self.datamodule = data if isinstance(data, DataModule) else None
        self.user_loaders = None if self.datamodule is not None else (data, val_loaders)
        self.trains = stage == "fit"
        self.replaced: list[callbacks.Callback] = []
        self.directory: Path | None = None
        self.record: Path | None = None
        self.resumes_record = False
        self.check_home: Callable[[], None] | None = None
        self.loggers: list[Logger] = []

    def check_and_launch(self) -> None:
        """Check the hooks, add the task's callbacks, and start other processes if they are missing.

        Raises:
            ConfigError: The trainer is in a run, or a setting or hook cannot work.
        """
        trainer, task = self.trainer, self.task
        if trainer._status == "running":
            raise ConfigError(f"this trainer is in a run. Call {self.stage} after the run, or use a second Trainer.")
        check_hooks(task, self.datamodule, [])
        self.replaced = join_callbacks(trainer, self.stage, task)
        check_hooks(task, self.datamodule, trainer.callbacks)
        if not trainer._has_given_name:
            trainer.name = type(task).__name__.lower()
        trainer._started = False
        if needs_launcher(trainer.processes, trainer.max_restarts if self.trains else 0):
            relaunch(trainer.world_size, trainer.max_restarts)

    @contextmanager
    def open_session(self) -> Iterator[None]:
        """Enter the phases of the session, after `check_and_launch`; within this context `open_run` opens the runs."""
        with ExitStack() as entered:
            for phase in PHASES:
                entered.enter_context(phase(self))
            yield

    @contextmanager
    def open_run(self) -> Iterator[Run]:
        """Open a run within the context.

        Raises:
            KeyboardInterrupt: A signal asked the run to stop.
        """
        with ExitStack() as entered:
            for phase in PHASES_OF_RUN:
                entered.enter_context(phase(self))
            yield self.run


def join_callbacks(trainer: Trainer, stage: str, task: TaskModule) -> list[callbacks.Callback]:
    """Add the task's callbacks to the trainer for good, before anything reads the trainer's callbacks.

    An evaluation after `fit` keeps the `ModelCheckpoint` of `fit`, which knows the best checkpoint.

    Returns:
        The callbacks of the trainer that the task's callbacks replaced.

    Raises:
        ConfigError: The task returned other objects than callbacks, or its callbacks contradict the trainer's settings.
    """
    replaced: list[callbacks.Callback] = []
    if trainer._asks_task and is_overridden(task, "configure_callbacks"):
        where = f"{type(task).__name__}.configure_callbacks"
        with task._opened_by(trainer):
            added = callbacks.as_callback_list(where, task.configure_callbacks())
        saving = any(isinstance(each, callbacks.ModelCheckpoint) for each in added)
        if saving and stage == "fit" and not (trainer.enable_checkpointing or trainer.fast_dev_run):
            raise ConfigError(
                f"enable_checkpointing is False, but {where} returned a ModelCheckpoint. Remove one of the two."
            )
        if not trainer.enable_checkpointing or (stage != "fit" and trainer.run_directory is not None):
            added = [each for each in added if not isinstance(each, callbacks.ModelCheckpoint)]
        trainer.callbacks, replaced = callbacks.merge_callbacks(trainer.callbacks, added)
    if trainer._asks_task and stage == "fit" and not (trainer.loggers or trainer.fast_dev_run):
        callbacks.check_loggers(trainer.callbacks)
    trainer.plan = callbacks.apply_accumulation_schedule(
        trainer.plan, trainer.callbacks, replaced
    )  # the user may have added one
    return replaced


@contextmanager
def open_run(trainer: Trainer, stage: str, task: TaskModule, data: Any, val_loaders: Any) -> Iterator[Run]:
    """Run a stage within the context: a session with one run.

    Raises:
        ConfigError: The trainer is in a run, or a setting or hook cannot work.
        KeyboardInterrupt: A signal asked the run to stop.
    """
    session = Session(trainer, stage, task, data, val_loaders)
    session.check_and_launch()
    with session.open_session(), session.open_run() as run:
        yield run


def wait_for_turn(session: Session) -> AbstractContextManager[Any]:
    """Wait until no other thread of this process has a run."""
    trainer = session.trainer
    return take_process_turn(session.task, session.datamodule, trainer.strategy, trainer.loggers, trains=session.trains)


@contextmanager
def limit_grace(session: Session) -> Iterator[None]:
    """Start the thread that limits the time from a signal to the end of the process."""
    with closed(GracePeriod(session.trainer.grace_s, saves=session.trains)) as session.grace:
        yield


@contextmanager
def note_status(session: Session) -> Iterator[None]:
    """Set the trainer's state to "running", and afterwards to "finished" or "interrupted"."""
    trainer = session.trainer
    trainer._status, trainer._fn = "running", session.stage
    try:
        yield
    except BaseException:
        trainer._status = "interrupted"
        raise
    trainer._status = "finished"


@contextmanager
def switch_torch(session: Session) -> Iterator[None]:
    """Set torch's global settings from the trainer's arguments."""
    trainer = session.trainer
    with set_torch_switches(
        deterministic=trainer.deterministic, detect_anomaly=trainer.detect_anomaly,
        matmul_precision=trainer.matmul_precision, benchmark=trainer.benchmark,
    ), trainer.compilation:  # fmt: skip
        yield


@contextmanager
def show_messages(session: Session) -> Iterator[None]:
    """Show messages in the terminal, and log notices and warnings about the arguments."""
    trainer, task = session.trainer, session.task
    with separate_nested_runs(has_files=False), log_to_console(trainer.log_settings, shown=trainer.is_global_zero):
        if notice := describe_unused_devices(trainer.strategy):
            _log.info(notice)
        if trainer.detect_anomaly and trainer.compilation.setting:
            _log.info("detect_anomaly checks every operation, so Lumen compiles no module in this run")
        if names := ", ".join(type(each).__name__ for each in session.replaced):
            _log.info("the callbacks of %s.configure_callbacks replace: %s", type(task).__name__, names)
        for notice in [
            *describe_misspelt_hooks(task, session.datamodule, trainer.callbacks),
            *describe_overridden_state_dicts(task),
        ]:
            _log.warning(notice)
        yield


@contextmanager
def connect_processes(session: Session) -> Iterator[None]:
    """Connect the processes of the run. Collective: every rank must call this."""
    trainer = session.trainer
    strategy, processes = trainer.strategy, trainer.processes
    with processes.explain_lost_ranks():
        set_reduction(strategy, trainer.reduction)  # another trainer may have used the strategy since
        strategy.connect()
        check_data_ranks(strategy)
        if strategy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(strategy.device)  # `memory_mb` is the peak of this run
        trainer.name = _share_run_name(trainer)
        if session.trains:
            processes.run_on_all(partial(_check_checkpoint_places, trainer))
        yield


@contextmanager
def claim_directory(session: Session) -> Iterator[None]:
    """Claim and lock the run directory on the first process, if a run writes files. Collective."""
    trainer, origin, processes = session.trainer, session.trainer.origin, session.trainer.processes
    if not session.trains:
        with ExitStack() as closing:
            if session.stage != "predict":
                session.record = processes.run_on_rank_zero(partial(_claim_record, session, closing))
                if trainer.run_directory is None:
                    trainer._evaluation_directory = session.record
            yield
        return
    launchers = {each for each in processes.all_gather(processes.launcher) if each is not None}

    savers, previous = trainer.checkpoint_callbacks, trainer.run_directory
    session.home = _choose_home(trainer)

    def claim() -> tuple[Path | None, bool, list[PurePath]]:
        if not is_restarted():  # A restarted run resumes from its own checkpoint, so the weights may be gone.
            origin.check_weights()
        if trainer.fast_dev_run or not (trainer.loggers or trainer.enable_checkpointing):
            return None, False, []
        root, name, home = trainer.default_root_dir, str(trainer.name), session.home.name
        directory = closing.enter_context(
            RunDirectory.claim(root, name, reuse=origin.keeps_directory, home=home, launchers=launchers)
        )
        session.check_home = directory.check_claim
        if not (origin.keeps_directory or directory.restarted):
            closing.callback(_remove_unused_directory, trainer, directory.path)
            if is_restarted():
                origin.check_weights()
            for given in {each.given_dirpath for each in savers if each.given_dirpath is not None}:
                choose_folder(directory.path, given, _is_running)
        folders = [locate_folder(directory.path, each.given_dirpath) for each in savers]
        return directory.path, directory.restarted, folders

    with ExitStack() as closing:
        closing.callback(_forget_unused_directory, trainer, previous)
        trainer.run_directory, origin.restarted, folders = processes.run_on_rank_zero(claim)
        for each, folder in zip(savers, folders, strict=False):
            each.use_folder(folder)
        session.directory = session.record = trainer.run_directory
        yield


def _is_running(directory: Path) -> bool:
    """Return True if a live process holds a run directory, or if this user may not know."""
    try:
        return RunDirectory.read_live_holder(directory) is not None
    except RunDirectoryError:
        return True


def _claim_record(session: Session, closing: ExitStack) -> Path | None:
    """Return the directory in which an evaluation writes to the user's loggers: that of `fit`, or a new one."""
    trainer = session.trainer
    if not (trainer.loggers and trainer._has_user_loggers):
        return None
    session.resumes_record = trainer.log_dir is not None
    if trainer.run_directory is None:
        made = trainer._evaluation_directory or create_directory(trainer.default_root_dir, f"{trainer.name}-eval")
        made.mkdir(exist_ok=True)
        closing.callback(_remove_if_empty, made)
        return made
    try:
        closing.enter_context(RunDirectory.claim_again(trainer.run_directory))
    except RunDirectoryError as error:
        _log.warning("the loggers get no values of this %s: %s", session.stage, error)
        return None
    return trainer.run_directory


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


@contextmanager
def write_logs(session: Session) -> Iterator[None]:
    """Open `run.log` on the first process; with several processes also a log per rank, named after the start time.

    Each process logs the failure that ends a run, with its traceback.
    """
    trainer, directory, processes = session.trainer, session.directory, session.trainer.processes
    if directory is None:
        yield
        return
    with ExitStack() as closing:
        closing.enter_context(separate_nested_runs(has_files=True))
        if processes.is_global_zero:
            closing.enter_context(log_to_file(directory / "run.log", trainer.log_settings))
        if processes.world_size > 1:
            began = processes.broadcast(f"{datetime.now():%Y%m%d-%H%M%S}")
            (directory / "logs").mkdir(parents=True, exist_ok=True)
            file = directory / "logs" / f"{began}-rank{processes.rank}.log"
            closing.enter_context(log_to_file(file, trainer.log_settings))
            processes.barrier()  # All files are open before a failure can remove the directory.
        log_status("the run is in %s", directory)
        try:
            with processes.explain_lost_ranks():  # `run.log` then names the error that is raised.
                yield
        except (Exception, SystemExit) as error:
            if not _is_stop_by_signal(error):
                step = session.run.progress.step if trainer._started else 0
                log_failure(error, step, trainer, directory, stays=_is_directory_kept(trainer))
            raise


@contextmanager
def make_run(session: Session) -> Iterator[None]:
    """Find the checkpoint to resume and the seed, and create the parts of the run. Collective."""
    trainer, directory, processes = session.trainer, session.directory, session.trainer.processes
    origin, checkpoint = trainer.origin, None
    writes = directory is not None and processes.is_global_zero
    measured, restarted = directory if writes else None, origin.restarted and origin.excluded is None
    goodput = Goodput(measured, lambda: session.run.step.counters.waited_s, restarted=restarted)
    if session.record is not None and processes.is_global_zero:
        session.loggers = add_csv_logger(trainer.loggers) if session.trains else trainer.loggers
    if session.trains:
        earlier = processes.run_on_rank_zero(partial(list_checkpoint_folders, trainer, session.home))
        checkpoint = origin.find_checkpoint(
            list_checkpoint_folders(trainer), earlier, processes, writes=directory is not None
        )
        log_restart(trainer, checkpoint)
    seed = processes.run_on_rank_zero(partial(origin.choose_seed, checkpoint, trainer.seed))
    precision = make_precision(trainer.precision)
    precision.setup(trainer.strategy.device)
    with ExitStack() as closing:
        closing.callback(OperationFinder.remove_from, precision)
        run = session.run = trainer._run = Run(
            session.stage, session.task, session.datamodule, session.user_loaders, strategy=trainer.strategy,
            plan=trainer.plan, precision=precision, hooks=Hooks(session.task, trainer.callbacks, trainer),
            compilation=trainer.compilation, seed=seed, loggers=session.loggers, goodput=goodput, checkpoint=checkpoint,
            trained=None if session.trains else trainer._shown_progress,
            make_saves=partial(
                CheckpointSaver, check_run_directory=session.check_home, is_enabled=trainer.enable_checkpointing,
                continues_run=origin.continues_run,
                numerics={name: getattr(trainer, name) for name in _SWITCHES},
            ),
        )  # fmt: skip
        if session.trains:
            trainer._shown_progress = run.progress
        if writes:
            closing.callback(lambda: goodput.close(run.progress.step))
        yield


@contextmanager
def watch_progress(session: Session) -> Iterator[None]:
    """Watch for a hang, and let `breakpoint()` open its prompt on only one of several ranks."""
    with (
        handle_debuggers(session.run),
        watch_run(session.run, session.trainer.run_directory) as session.watch,
    ):
        yield


@contextmanager
def open_loggers(session: Session) -> Iterator[None]:
    """Open the loggers on the first process, for a run with a record. Collective: every rank must call this."""
    trainer, run, directory = session.trainer, session.run, session.record
    run.sync_logging_flags()
    with ExitStack() as closing:
        if directory is not None:
            if trainer.is_global_zero and session.trains:
                write_environment(directory, trainer.strategy)
            for logger in [*trainer.loggers, *session.loggers]:
                logger.run_directory, logger.progress = directory, run.records.progress
            trainer.processes.run_on_rank_zero(partial(_open_loggers, session, directory, closing))
        yield


def _open_loggers(session: Session, directory: Path, closing: ExitStack) -> None:
    checkpoint = session.run.checkpoint if session.trains and session.trainer.origin.continues_run else None
    known = () if checkpoint is None else checkpoint.state["loggers"]
    for logger in session.loggers:  # Without a state the length of its record is unknown.
        logger.note_state(has_ended=False)
        logger.open(directory, resumed=session.resumes_record or logger.state_key in known)
        closing.push(partial(_finalize_logger, logger))
    if not (session.trains or session.resumes_record):
        log_hyperparameters(session.loggers, session.task, session.datamodule)


def log_hyperparameters(loggers: Iterable[Logger], task: TaskModule, datamodule: DataModule | None) -> None:
    """Pass the hyperparameters of the task and the data module to the loggers."""
    owners = {"model": task, "data": datamodule}
    hyperparameters = {name: get_logged_hparams(owner) for name, owner in owners.items() if owner is not None}
    for logger in loggers:
        logger.log_hyperparams(hyperparameters)


def catch_signals(session: Session) -> AbstractContextManager[Any]:
    """Let the first signal finish the step, save and end the run."""
    return handle_stop_signals(session.trainer, session.run, session.grace)


def collect_garbage(session: Session) -> AbstractContextManager[Any]:
    """Collect garbage only at every n-th step, if the trainer's argument requests this."""
    every = session.trainer.gc_every_n_steps
    return nullcontext() if every is None else closed(GarbageCollector(every, session.run))


@contextmanager
def attach_task(session: Session) -> Iterator[None]:
    """Attach task and data module to the run; afterwards call `teardown` and close the parts of the run."""
    run, task, datamodule = session.run, session.task, session.datamodule
    with ExitStack() as closing:  # ExitStack calls the last callback first, and all callbacks after errors too.
        closing.enter_context(callbacks.attach_callbacks(session.trainer.callbacks, task))
        closing.callback(run.strategy.teardown)
        closing.callback(run.close)
        closing.callback(run.saves.close)
        for hook in reversed(run.hooks.teardown):
            closing.callback(hook, session.stage)
        if datamodule is not None:
            closing.callback(fit_to_signature(datamodule, "teardown"), session.stage)
        closing.callback(session.watch.set)  # From here on the run may wait for a save without a limit.
        task._attach(run, session.trainer)
        if datamodule is not None:
            datamodule._attach(run, session.trainer)
        yield


@contextmanager
def report_end(session: Session) -> Iterator[None]:
    """Call `on_exception` of a run that fails or is asked to stop, and log how to resume it."""
    run = session.run
    try:
        yield
    except StopRequested:
        _leave_run(session)
    except BaseException as error:
        note_place(run, error)
        if run.processes.world_size == 1:
            with suppress(Exception):  # values cannot be read from a failed device
                run.records.write_pending_row()
        for hook in run.hooks.on_exception:
            try:
                hook(error)
            except Exception:  # the user needs the first failure
                _log.exception("on_exception failed too")
        raise


def _leave_run(session: Session) -> None:
    """Log how to resume, and end the process as the signal requires."""
    run = session.run
    number = run.ending.vote.stop_signal
    interruption = make_interruption(number)
    for hook in run.hooks.on_exception:
        hook(interruption)
    log_stop(session.trainer, run, number)
    raise interruption from None


def profile(session: Session) -> AbstractContextManager[Any]:
    """Time the parts of the run, if the trainer has a profiler."""
    return profile_run(session.run, session.trainer.profiler, session.directory)


Phases: TypeAlias = tuple[Callable[[Session], AbstractContextManager[Any]], ...]
PHASES: Phases = (
    wait_for_turn, limit_grace, note_status, switch_torch, show_messages, connect_processes, claim_directory,
    write_logs,
)  # fmt: skip
PHASES_OF_RUN: Phases = (
    make_run, watch_progress, open_loggers, catch_signals, collect_garbage, attach_task, report_end, profile,
)  # fmt: skip


def _share_run_name(trainer: Trainer) -> str | None:
    """Return rank 0's name of the run. Collective.

    Raises:
        ConfigError: Callbacks differ between ranks. Bars, summaries and throughput may differ: they never communicate.
            Or Hydra gave the ranks different overrides or output directories.
    """
    shown = (callbacks.ThroughputMonitor, callbacks.ModelSummary, callbacks.ProgressBar)
    acting = [(type(each).__qualname__, each.state_key) for each in trainer.callbacks if not isinstance(each, shown)]
    (name, first, job), *others = trainer.processes.all_gather((trainer.name, acting, describe_job()))
    for rank, (_, found, other_job) in enumerate(others, 1):
        if job != other_job:
            here, there = (
                [each for each in one if each not in two] for one, two in ((job, other_job), (other_job, job))
            )
            raise ConfigError(
                f"Hydra's settings differ between ranks: {' '.join(here)} on rank 0, {' '.join(there)} on rank {rank}. "
                "Under torchrun or SLURM, set hydra.run.dir=PATH. A sweeper must draw the same values on every rank: "
                "set its seed, and no storage."
            )
        if found != first:
            raise ConfigError(
                f"callbacks differ between ranks: rank 0 has {_describe_arguments(first)}; rank {rank} has "
                f"{_describe_arguments(found)}. Pass the same callbacks in the same order on every rank, because their "
                "collectives must match. A callback for a single rank can check trainer.is_global_zero."
            )
    return name


def _describe_arguments(acting: Iterable[tuple[str, str]]) -> str:
    return ", ".join(key if key.startswith(kind) else f"{kind} ({key})" for kind, key in acting) or "none"


def _check_checkpoint_places(trainer: Trainer) -> None:
    """Raise if this process cannot write where callbacks save: every process writes its own part of a checkpoint."""
    places = [each.given_dirpath for each in trainer.callbacks if isinstance(each, callbacks.ModelCheckpoint)]
    places += [each.dirpath for each in trainer.callbacks if isinstance(each, callbacks.OnExceptionCheckpoint)]
    for place in places:
        if place is not None:
            get_storage(place).check_writable(place)


def _choose_home(trainer: Trainer) -> Path:
    """Return the directory of the run that a setting such as "last" means: this trainer's previous run, if any."""
    home, previous = trainer.default_root_dir / str(trainer.name), trainer.run_directory
    if previous is None or previous.parent != home.parent:
        return home
    return previous if re.fullmatch(re.escape(home.name) + "-[0-9]+", previous.name) else home


def _remove_unused_directory(trainer: Trainer, directory: Path) -> None:
    """Remove the directory of a run that failed before its training began, so that its name stays free."""
    if not _is_directory_kept(trainer):
        shutil.rmtree(directory, ignore_errors=True)  # the user needs to see the failure, not this error


def _forget_unused_directory(trainer: Trainer, previous: Path | None) -> None:
    """Let the trainer name the directory of its previous run again, if this run's directory is removed."""
    if not _is_directory_kept(trainer):
        trainer.run_directory = previous


def _is_directory_kept(trainer: Trainer) -> bool:
    """Return True if the run directory is kept: training began in this part of the run or in an earlier one."""
    return trainer._started or trainer.origin.keeps_directory


def _finalize_logger(logger: Logger, kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Finalize a logger with the status of the run: "success", "interrupted" or "failed"."""
    logger.finalize("success" if error is None else "interrupted" if _is_stop_by_signal(error) else "failed")
    logger.note_state(has_ended=True)


def _is_stop_by_signal(error: BaseException) -> bool:
    """Return True if the error ends a run that was asked to stop."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in STOP_EXIT_CODES)
