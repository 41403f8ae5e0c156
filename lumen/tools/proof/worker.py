"""Processes of variants, which run and record one rank each, and the pool that starts them."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist

from lumen.callbacks import Callback
from lumen.distributed.cluster_environment import get_loopback_variables
from lumen.distributed.process_location import Frame
from lumen.distributed.processes import Processes
from lumen.distributed.restarts import describe_exit
from lumen.errors import LumenError
from lumen.internals.atomic_files import replace_file
from lumen.internals.interpreters import SAFE_PATH, SearchPath, protect_search_path
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.tools.proof.observer import RowCollector, VariantObserver
from lumen.tools.proof.outcome import Outcome
from lumen.tools.proof.outside_calls import watch_outside_calls
from lumen.tools.proof.variants import Moment, Variant, VariantSize
from lumen.trainer.trainer import Trainer

PREFIX = "lumen-verify-"  # prefix of the temporary directory of all runs
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", SAFE_PATH)


@final
class BuiltTraining(NamedTuple):
    """Objects built from the user's settings.

    Attributes:
        task: The task to train.
        data: The data module, or None if the task has the loaders.
        trainer: The trainer with the changed arguments.
        configure_optimizers: Function used instead of the task's method, or None for the task's.
    """

    task: TaskModule
    data: DataModule | None
    trainer: Trainer
    configure_optimizers: Callable[[], Any] | None


class TrainingBuilder(Protocol):
    """Function that builds new objects. `change` maps the user's trainer arguments to the arguments to use.

    Subprocesses call the function and pass the seed for the global generators.
    """

    def __call__(self, change: Callable[[dict[str, Any]], dict[str, Any]], seed: int) -> BuiltTraining: ...  # noqa: D102


@final
class KillCallback(Callback):
    """Callback that kills its process with SIGKILL in the middle of a training step, a validation or a save.

    Args:
        moment: The moment of the kill: training, validation or save.
        step: Number of completed steps for training. For a validation or save, the one after step `step + 1`.
    """

    may_stop_at_steps = False

    def __init__(self, moment: Moment, step: int) -> None:
        self._moment, self._step = moment, step
        if moment == "save":
            self._name = f"step-{step + 1:08d}."
            sys.addaudithook(self._on_audit_event)

    def _on_audit_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Kill the process when it opens the manifest: only the manifest is missing, so the save is incomplete."""
        if event == "open" and self._name in str(arguments[0]) and "manifest" in str(arguments[0]):
            _kill_process()

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Kill the process between the backward and the update."""
        if self._moment == "training" and trainer.global_step == self._step:
            _kill_process()

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Kill the process after the first validation batch."""
        if self._moment == "validation" and trainer.global_step == self._step + 1:
            _kill_process()


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_in_process(
    path: SearchPath,
    make: TrainingBuilder,
    variant: Variant,
    size: VariantSize,
    precision: str | None,
    folder: str,
    rank: int,
) -> None:
    """Run a variant in this process, write `rank-N.json`, and end the process."""
    place = Path(folder)
    _prepare_process(place, rank, variant, size)
    outcome, failure = Outcome(), None
    try:
        if variant.world > 1:
            store = dist.FileStore(str(place / "store"), variant.world)  # type: ignore[attr-defined]
            backend = "cpu:gloo,cuda:nccl" if size.accelerator == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=variant.world, timeout=timedelta(seconds=2 * size.limit_s)
            )
        run_variant(make, variant, size, precision, place, outcome)
    except BaseException as error:
        failure = describe_error(error)
    answer = {"outcome": vars(outcome), "failure": failure}
    with replace_file(place / f"rank-{rank}.json") as temporary:
        temporary.write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    with suppress(Exception):
        Processes.find().close()
    os._exit(0)  # Python's shutdown would take longer than the run.


def _prepare_process(place: Path, rank: int, variant: Variant, size: VariantSize) -> None:
    """Redirect the output to a file of the rank, and remove the launcher's environment variables."""
    output = os.open(place / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    for name in [*os.environ]:
        if name in _LAUNCHER_VARIABLES or name.startswith(("SLURM_", "TORCHELASTIC_", "LUMEN_")):
            del os.environ[name]
    os.environ.update(get_loopback_variables())
    torch.set_num_threads(size.threads)
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # for dataloader workers
    stacks = open(place / f"rank-{rank}.stacks", "w", encoding="utf-8")  # noqa: SIM115  # open until the process ends
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # it may crash on threads that run


def run_variant(
    make: TrainingBuilder, variant: Variant, size: VariantSize, precision: str | None, place: Path, outcome: Outcome
) -> None:
    """Run a variant in this process, and record what it computes. Collective: every rank must call this.

    Args:
        make: Function that builds task, data and trainer.
        variant: The variant to run.
        size: Numbers of steps and batches.
        precision: The precision of variants that are not exact, or None for the user's.
        place: An existing directory for the run.
        outcome: The record to add to.
    """
    observer = VariantObserver(outcome, size.save_every, modules=not variant.compiles and variant.strategy != "mesh")

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        added: list[Callback] = [] if variant.evaluates else [observer]
        if variant.kill is not None:
            added.append(KillCallback(variant.kill, size.save_every * 2 - 1))
        callbacks = [*variant.choose_callbacks(arguments.get("callbacks"), size), *added]
        changed = variant.get_changes(size, place, arguments, precision)
        return {
            **arguments,
            **changed,
            "callbacks": callbacks,
            "logger": False if variant.evaluates else [RowCollector(outcome)],
        }

    built = make(change, size.seed)
    task, data, trainer = built.task, built.data, built.trainer
    outcome.by_hand, outcome.is_exact = not task.automatic_optimization, bool(trainer.strategy.is_exact)
    if outcome.by_hand:
        trainer._change_settings(accumulate={0: 1}, limits={**trainer.plan.limits, "train": size.epoch_steps})
    if not variant.evaluates:
        observer.record_tensors(task, "built")
    observer.watch_hooks(task, trainer.callbacks)
    variant.adapt_loaders(task, data)
    if variant.evaluates:
        for number, values in enumerate(trainer.validate(task, data, ckpt_path=variant.resume)):
            outcome.values |= {f"{name}, loader {number}" if number else name: value for name, value in values.items()}
    else:
        with watch_outside_calls(observer.note_outside_call) if variant.fresh else nullcontext():
            trainer.fit(task, data, configure_optimizers=built.configure_optimizers)


def describe_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain data: class, message, line of user code, traceback, and whether it is a LumenError."""
    frames = [Frame(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    place = next(
        (f"{each.file}:{each.line}, in {each.function}" for each in reversed(frames) if each.is_in_user_code), ""
    )
    if notes := getattr(error, "__notes__", None):  # These notes name a temporary run that is deleted.
        notes[:] = [note for note in notes if PREFIX not in note]
    text, kind = "".join(traceback.format_exception(error)), type(error).__name__
    ours = str(isinstance(error, LumenError))
    return {"kind": kind, "message": str(error) or kind, "place": place, "text": text, "ours": ours}


PRELOAD_VARIABLE = "LUMEN_PRELOAD"
"""Environment variable with a file of modules to preload; a command line has no room for thousands of names."""

_POLL_INTERVAL_S, _PATIENCE_S = 0.02, 5.0


@final
@dataclass
class VariantResult:
    """Result of a variant.

    Attributes:
        variant: The variant that was run.
        folder: The directory of the variant's run.
        outcomes: The outcomes of the ranks that wrote one, in rank order.
        failure: The error of the first rank that failed (kind, message, place, text, ours), or None.
        seconds: Duration of the run in seconds.
        killed: True if the process killed itself as planned.
    """

    variant: Variant
    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)
    failure: dict[str, str] | None = None
    seconds: float = 0.0
    killed: bool = False

    @property
    def outcome(self) -> Outcome:
        """Outcome of rank 0."""
        return self.outcomes[0]


@final
class VariantPool:
    """Pool that runs variants in a limited number of processes at a time.

    Args:
        make: Function that builds task, data and trainer.
        size: Numbers of steps and batches of each variant.
        folder: A directory for all variants.
        slots: The most processes at a time, at least 2.
        preload: Names of library modules to import once, in the fork server of all processes.
    """

    def __init__(
        self, make: TrainingBuilder, size: VariantSize, folder: Path, slots: int, preload: Sequence[str]
    ) -> None:
        self._make, self._size, self._folder = make, size, folder
        self._slot_lock, self._free_slots = threading.Lock(), threading.Semaphore(max(slots, 2))
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["lumen.tools.proof.preload"])
        self._spawns = multiprocessing.get_context("spawn")
        preload_file = folder / "preload.txt"
        preload_file.write_text("\n".join(preload), encoding="utf-8")
        os.environ[PRELOAD_VARIABLE] = str(preload_file)
        with protect_search_path():
            ensure_running()
        del os.environ[PRELOAD_VARIABLE]
        self._starting = threading.Lock()
        self._alive: list[BaseProcess] = []

    def run_variant(self, variant: Variant, precision: str | None, *, resumes: bool = False) -> VariantResult:
        """Run a variant. Several threads may call this at once.

        Args:
            variant: The variant to run.
            precision: The precision of variants that are not exact, or None for the user's.
            resumes: True to resume in the folder of the killed run.
        """
        folder = self._folder / variant.name
        folder.mkdir(exist_ok=resumes)
        for old in (*folder.glob("rank-*.json"), *folder.glob("store*")):
            old.unlink()
        with self._slot_lock:  # One variant at a time takes slots, to avoid a deadlock.
            for _ in range(variant.world):
                self._free_slots.acquire()
        try:
            began_s = time.monotonic()
            processes = self._start_processes(variant, precision, folder)
            failure = self._wait_for_end(processes, folder)
            result = VariantResult(variant, folder, failure=failure, seconds=time.monotonic() - began_s)
        finally:
            self._free_slots.release(variant.world)
        codes = [process.exitcode for process in processes]
        result.killed = variant.kill is not None and codes == [-signal.SIGKILL]
        answers = [_read_outcome(folder, rank) for rank in range(variant.world)]
        result.outcomes = [Outcome.from_json(answer["outcome"]) for answer in answers if answer]
        failures = [answer["failure"] for answer in answers if answer and answer["failure"]]
        lost = [each for each in failures if each["kind"] in ("ProcessLost", "ProcessStuck", "RuntimeError")]
        first = [each for each in failures if each not in lost] or lost
        if failure is None and first:
            result.failure = first[0]
        elif failure is None and not result.killed and not all(answers):
            result.failure = _make_silent_failure(codes, answers, folder)
        return result

    def close(self) -> None:
        """Kill the processes that are still running."""
        for process in self._alive:
            if process.is_alive():
                process.kill()
                process.join()

    def _start_processes(self, variant: Variant, precision: str | None, folder: Path) -> list[BaseProcess]:
        path = SearchPath()
        with self._starting, protect_search_path():  # The fork server is not thread-safe.
            processes: list[BaseProcess] = []
            for rank in range(variant.world):
                arguments = (path, self._make, variant, self._size, precision, str(folder), rank)
                context = self._spawns if variant.fresh else self._forks
                processes.append(context.Process(target=run_in_process, args=arguments, daemon=False))  # for workers
                processes[-1].start()
            self._alive += processes
        return processes

    def _wait_for_end(self, processes: Sequence[BaseProcess], folder: Path) -> dict[str, str] | None:
        """Wait until all processes end. Return a failure with their stacks if they hang, else None."""
        deadline_s = time.monotonic() + self._size.limit_s
        is_short = False
        while any(process.is_alive() for process in processes):
            ended = [_read_outcome(folder, rank) for rank, process in enumerate(processes) if not process.is_alive()]
            if not is_short and not all(answer and not answer["failure"] for answer in ended):  # may block others
                deadline_s, is_short = min(deadline_s, time.monotonic() + _PATIENCE_S), True
            if time.monotonic() > deadline_s:
                return self._end(processes, folder, hung=not is_short)
            time.sleep(_POLL_INTERVAL_S)
        return None

    def _end(self, processes: Sequence[BaseProcess], folder: Path, *, hung: bool) -> dict[str, str] | None:
        for process in processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        for process in processes:
            process.kill()
            process.join()
        if not hung:
            return None
        stacks = [f"rank {rank}:\n{(folder / f'rank-{rank}.stacks').read_text()}" for rank in range(len(processes))]
        text = f"not done after {self._size.limit_s:.0f} s: a process hangs, or only one rank calls a collective."
        return _make_failure("process hangs", text, "\n".join(stacks))


def _make_silent_failure(codes: Sequence[int | None], answers: Sequence[object], folder: Path) -> dict[str, str]:
    """Return the failure of a variant whose processes ended without an answer, with the end of their output."""
    silent = [(rank, code or 0) for rank, (code, answer) in enumerate(zip(codes, answers, strict=True)) if not answer]
    # The pool kills a rank that waits for one that has ended, so a rank that ended in a different way is the cause.
    rank, code = min(silent, key=lambda each: each[1] == -signal.SIGKILL)
    log = folder / f"rank-{rank}.log"
    output = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return _make_failure("process ended", f"rank {rank} {describe_exit(code)} before the end of its run.", output)


def _make_failure(kind: str, message: str, output: str) -> dict[str, str]:
    return {"kind": kind, "message": message, "place": "", "text": f"{output.strip()}\n{message}", "ours": "False"}


def _read_outcome(folder: Path, rank: int) -> dict[str, dict[str, str]] | None:
    with suppress(FileNotFoundError):
        answer: dict[str, dict[str, str]] = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
        return answer
    return None


def list_libraries() -> list[str]:
    """Return the imported modules of Lumen and installed packages. User modules, which may draw, are left out."""
    found = ((name, getattr(module, "__file__", None) or "") for name, module in list(sys.modules.items()))
    return [name for name, file in found if "site-packages" in file or name.partition(".")[0] == "lumen"]
