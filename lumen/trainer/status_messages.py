"""Messages of a run: its setup, its end, its failure or restart, and the command to resume it.

The messages of progress and validations are in `lumen/callbacks/progress_bar.py`.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import torch

from lumen.callbacks import EarlyStopping, ModelCheckpoint, get_checkpoint_callbacks
from lumen.callbacks.checkpoint_names import is_same_path, locate_folder
from lumen.callbacks.display import format_number
from lumen.callbacks.early_stopping import find_monitor
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.format.folder import find_newest_committed, read_info
from lumen.checkpoint.format.storage import MANIFEST
from lumen.console import in_notebook, logger as _log
from lumen.distributed.restarts import can_be_restarted, get_restart, make_step_recorder
from lumen.distributed.worker import is_worker, report_steps_with
from lumen.errors import LumenError
from lumen.errors.arguments import suggest_names
from lumen.internals.hydra import has_trainer_group, repeat_words
from lumen.internals.stop_signals import REQUEUE_EXIT_CODE
from lumen.run.exact_reduction import describe_numerics
from lumen.run.goodput import goodput
from lumen.run.run import Run
from lumen.run.scheduler_config import can_move_further
from lumen.strategies import Strategy
from lumen.task.hooks import collect_texts
from lumen.trainer.logs import log_status

if TYPE_CHECKING:
    from lumen.trainer.trainer import Trainer


_MIN_REPORTED_S = 60.0
_EQUAL_SHARE = 0.85  # val_los is similar to val_loss; _loss, as in f"{stage}_loss", is not


def format_resume_command(run_directory: Path, command: str, beyond: tuple[str, int | str] | None = None) -> str:
    """Return the command that resumes a run; for a script or notebook, the line of code.

    Args:
        run_directory: The run's directory.
        command: First words of a command line for the run, such as `lumen fit`; empty without a command line.
        beyond: The limit that the run has reached, with a larger value to train further; None: keep the limits.
    """
    if not in_notebook and command and (config := run_directory / "config.yaml").exists():
        further = f" --trainer.{beyond[0]} {beyond[1]}" if beyond else ""
        return f"{command} --config {shlex.quote(str(config))} --trainer.resume auto{further}"
    if has_trainer_group():
        limit = [f"++trainer.{beyond[0]}={json.dumps(beyond[1])}"] if beyond else []
        return shlex.join([Path(sys.executable).name, *repeat_words("++trainer.resume=auto", *limit)])
    further = f", {beyond[0]}={json.dumps(beyond[1])}" if beyond else ""
    name = json.dumps(run_directory.name, ensure_ascii=False)
    trainer = f'Trainer(..., name={name}, resume="auto"{further})'
    if in_notebook or beyond:
        return f"{trainer}.fit(...)"
    script = shlex.join([Path(sys.executable).name, *repeat_words()])
    return f"{script}   # with {trainer}"


def log_setup(run: Run) -> None:
    """Log in one line the devices, strategy, precision, step size and seed of a run; unknown facts are omitted."""
    if run.processes.is_global_zero:
        strategy = run.strategy
        how = [strategy.__class__.__name__] * strategy.spans_processes
        exact = ", ".join(f"{name} {value}" for name, value in describe_numerics(strategy).items())
        pieces = [
            _describe_devices(strategy), *how, run.precision.name, *_describe_step_size(run), f"seed {run.seed}",
            *filter(None, [exact]),
        ]  # fmt: skip
        _log.info("%s", " · ".join(pieces))


def _describe_devices(strategy: Strategy) -> str:
    """Describe the devices of a run."""
    processes, device = strategy.processes, strategy.device
    world, nodes = processes.world_size, processes.nodes
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    if world == 1:
        threads = torch.get_num_threads()
        return f"{device_name}, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else device_name
    if device.type == "cuda" and nodes == 1 and torch.cuda.device_count() >= world:
        names = Counter(map(torch.cuda.get_device_name, range(world)))
        return ", ".join(f"{count} x {name}" for name, count in names.items())
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{world} processes{where}{' on' if device.type == 'cpu' else ', rank 0 on'} {device_name}"


def _describe_step_size(run: Run) -> Iterator[str]:
    """Yield the number of samples per step, if all steps have the same number."""
    adapter, processes = run.loaders.train, run.processes.world_size
    size = None if adapter is None else adapter.get_batching().get("batch_size")
    if adapter is None or size is None or len(run.plan.accumulate) > 1:
        return
    accumulate, rest = divmod(adapter.per_step, processes)
    factors = [f"accumulate {accumulate}"] * (accumulate > 1) + [f"{processes} processes"] * (processes > 1)
    factors = [f"{adapter.per_step} micro-batches"] if rest else factors
    yield f"global batch {size * adapter.per_step}" + (f" = {' x '.join([str(size), *factors])}" if factors else "")


def log_end(trainer: Trainer, run: Run) -> None:
    """Log why a run is over, its best value, and commands to use it further.

    Args:
        trainer: The trainer of the run.
        run: A run of `fit` whose last hook has been called.
    """
    why, progress = run.ending.limit_reached, run.progress
    log_status("finished: %s at step %d, epoch %d", why, progress.step, progress.epochs_begun)
    _log_idle_monitors(run)
    run.records.goodput.write_line(progress.step)
    directory = trainer.run_directory
    if directory is None or not trainer.is_global_zero:
        return
    with suppress(FileNotFoundError):  # the time is not measured, or could not be written
        if run.records.goodput.is_enabled and (spent := goodput(directory)).wall_s >= _MIN_REPORTED_S:
            _log.info("%s", spent)
    for line in _iterate_next_steps(trainer, run, directory):
        _log.info("%s", line)


def _log_idle_monitors(run: Run) -> None:
    """Log monitors that never had a value because the run was too short. In a longer run this is an error."""
    waiting: dict[str, list[str]] = {}
    for each in run.hooks.callbacks:
        if isinstance(each, EarlyStopping | ModelCheckpoint) and each.monitor not in (
            None,
            *run.values.newest,
            *ModelCheckpoint.COUNTS,
        ):
            waiting.setdefault(str(each.monitor), []).append(type(each).__name__)
    if not waiting or not (missing := " and ".join(run.values.pending_stages)):
        return
    named = collect_texts([run.task, *run.hooks.callbacks])
    for name, who in waiting.items():
        suggestion = suggest_names(name, named, cutoff=_EQUAL_SHARE)
        unknown = suggestion or f" The code of {type(run.task).__name__} never names it."
        suggestion = "" if name in named else unknown
        text = "%s had no value: the run ended before its first %s. %s took no action.%s"
        _log.info(text, name, missing, " and ".join(dict.fromkeys(who)), suggestion)


def _iterate_next_steps(trainer: Trainer, run: Run, directory: Path) -> Iterator[str]:
    saver, found, newest = trainer.checkpoint_callback, find_monitor(trainer), _find_newest(trainer)
    best = f"{found.name} {format_number(found.best, 4)}" if found is not None and found.best is not None else ""
    saved = None if newest is None else str(newest)
    if best and saver is not None and saver.monitor is not None:
        saved = saver.best_model_path
        yield f"best: {best} in {saved}"
    elif best or saved is not None:
        yield "; ".join([f"best: {best}"] * bool(best) + [f"newest checkpoint: {saved}"] * (saved is not None))
    if newest is not None and (limit := _suggest_longer_limit(run)) is not None:
        yield f"longer: {format_resume_command(directory, trainer._command, limit)}"
    shell = "!" if in_notebook else ""
    if trainer.loggers:
        yield f"curves: {shell}lumen report {shlex.quote(str(directory))}"
    if saved is not None:
        words = ["lumen", "export", saved, "--output", f"{directory.name}.safetensors"]
        yield f"weights: {shell}{shlex.join(words)}"


def _suggest_longer_limit(run: Run) -> tuple[str, int | str] | None:
    """Return the limit that ended a run, with twice its value; None if the run cannot be resumed beyond a limit."""
    plan, progress = run.plan, run.progress
    if progress.should_stop or not can_move_further(run.optim.schedulers):
        return None
    if plan.max_steps is not None and progress.step >= plan.max_steps > 0:
        return "max_steps", 2 * plan.max_steps
    if plan.max_epochs is not None and progress.epoch >= plan.max_epochs > 0:
        return "max_epochs", 2 * plan.max_epochs
    if plan.max_time_s is not None and progress.elapsed_s >= plan.max_time_s > 0:
        twice = timedelta(seconds=2 * round(plan.max_time_s))
        hours, rest = divmod(twice.seconds, 3600)
        return "max_time", f"{twice.days:02}:{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return None


def log_stop(trainer: Trainer, run: Run, number: int | None, reason: str = "") -> None:
    """Log which signal stopped a run, at which step, its newest checkpoint, and how to resume it.

    Args:
        trainer: The trainer of the run.
        run: The run, at the end of a step unless its time limit has passed.
        number: The signal that asked the run to stop.
        reason: The reason to end the run within a step, such as "not done within grace_s=8"; "" at the end of a step.
    """
    by = f"by {signal.Signals(number or signal.SIGINT).name}{reason and ', '}{reason}"
    at = f"stopped at step {run.progress.step} {by}"
    if trainer.state.fn != "fit":
        log_status("%s stopped %s", trainer.state.fn, by)
    elif (home := trainer.run_directory) is None or (newest := _find_newest(trainer)) is None:
        log_status("%s; no checkpoint was saved", at)
    else:
        requeue_note = f"; exit code {REQUEUE_EXIT_CODE}: requeue the job" if number == signal.SIGUSR1 else ""
        command = format_resume_command(home, trainer._command)
        log_status("%s; newest checkpoint: %s%s. Resume with:\n  %s", at, newest.name, requeue_note, command)
    if number in (signal.SIGTERM, signal.SIGUSR1):
        run.records.goodput.note_preemption(run.progress.step)


def log_failure(error: BaseException, step: int, trainer: Trainer, directory: Path, *, stays: bool) -> None:
    """Log the error that ends a run, and add notes to it: where the logs are, and how to resume.

    Args:
        error: The error; Python shows its notes below the traceback.
        step: The number of steps completed before the failure.
        trainer: The trainer of the run.
        directory: The run directory.
        stays: True if the directory is kept.
    """
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    log_status("failed: %s (after step %d)", first_line, step, error=error)
    if not stays:
        return
    several = f"The tracebacks of all ranks are in {directory / 'logs'}."
    error.add_note(several if trainer.world_size > 1 else f"The log of the run is {directory / 'run.log'}.")
    if (newest := _find_newest(trainer)) is not None:
        command = format_resume_command(directory, trainer._command)
        error.add_note(f"The newest checkpoint is {newest}. Resume with:\n  {command}")


def get_home(trainer: Trainer) -> Path:
    """Return the run directory; for a run that writes nothing, the directory that it would have."""
    return trainer.run_directory or trainer.default_root_dir / str(trainer.name)


def list_checkpoint_folders(trainer: Trainer, home: Path | None = None) -> list[PurePath]:
    """Return the checkpoint folders of a run: first that of the callback that decides the best, last the default one.

    Args:
        trainer: The trainer of the run.
        home: The run's directory. Default: the directory of the trainer's own run.
    """
    home = home or get_home(trainer)
    folders = [locate_folder(home, each.given_dirpath) for each in get_checkpoint_callbacks(trainer.callbacks)]
    folders.append(locate_folder(home, None))  # The run may have been started without `dirpath`.
    return [each for number, each in enumerate(folders) if not any(is_same_path(each, one) for one in folders[:number])]


def _find_newest(trainer: Trainer) -> PurePath | None:
    """Return the newest checkpoint of a trainer's run, or None."""
    with suppress(LumenError, OSError):  # an unreachable store must not hide why the run ends
        saved = [path for path in map(find_newest_committed, list_checkpoint_folders(trainer)) if path is not None]
        if len(saved) > 1:
            saved.sort(key=lambda path: read_info(path)["micro_batches"])
        return saved[-1] if saved else None
    return None


def record_steps(run: Run, directory: Path | None) -> None:
    """Write down the first step and each later step of a training, for a launcher that may restart it."""
    if can_be_restarted() and directory is not None:
        progress = run.progress
        report_steps_with(lambda: progress.step)
        note = make_step_recorder(run.processes.rank, directory, progress.step)
        run.hooks.add_last_call("on_step_end", lambda: note(progress.step))


def log_restart(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Log in one line that the run was restarted: the reason, the step, and the lost steps and time."""
    if not trainer.is_global_zero:
        return
    if trainer.max_restarts and not is_worker():
        log_status("ignoring max_restarts=%d: %s started this run, and restarts it by its own settings",
                   trainer.max_restarts, trainer.processes.started_by)  # fmt: skip
    restart, expected = get_restart(), (None, str(trainer.run_directory))
    if restart is None or trainer.origin.excluded is not None or restart.directory not in expected:
        return
    step, since_s = 0, restart.began_s
    if checkpoint is not None:
        step = int(checkpoint.state["progress"]["step"])
        with suppress(OSError):  # the checkpoint is in an object store
            since_s = max(since_s, Path(checkpoint.path, MANIFEST).stat().st_mtime)
    lost = max(restart.reached - step, 0)
    log_status(
        "restart %d of %d: %s; resuming from step %d; lost: %d step%s, %.1f s",
        restart.number, restart.max_restarts, restart.reason, step, lost, "" if lost == 1 else "s",
        time.time() - since_s,
    )  # fmt: skip
