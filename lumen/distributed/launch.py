"""Launcher of local workers under torch's elastic agent; its command-line arguments are WORKERS RESTARTS COMMAND."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lumen.console import in_notebook, stderr, stdout
from lumen.distributed.cluster_environment import get_loopback_variables
from lumen.distributed.restarts import NOTES_VARIABLE, RESTART_VARIABLE, JobAttempts, describe_exit, find_first_failure
from lumen.distributed.worker import LAUNCHER
from lumen.errors import HUNG, ConfigError, ProcessLost, ProcessStuck
from lumen.internals.garbage import collect_young_only
from lumen.internals.hydra import get_start_directory, repeat_words
from lumen.internals.interpreters import make_python_command
from lumen.internals.stop_signals import SIGNALS, STOP_EXIT_CODES, get_exit_code, is_same_request, should_obey

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_TAIL_LINES = 20
_FOLDER_PREFIX, _LOCK_NAME = "lumen-launch-", "launcher"


def relaunch(workers: int, max_restarts: int = 0) -> NoReturn:
    """Replace this process by a launcher that runs the same program in several workers.

    This function never returns, so only processes that train run the rest of the program.

    Args:
        workers: Number of processes to start.
        max_restarts: Maximum number of restarts of a failed job.

    Raises:
        ConfigError: The program cannot be started again, as in a notebook.
    """
    words = repeat_words()
    os.chdir(get_start_directory())
    if reason := _explain_no_launch():
        needs = f"{workers} devices need one process each, which runs" if workers > 1 else "max_restarts needs to run"
        instead = "devices: 1" if workers > 1 else "max_restarts: 0"
        raise ConfigError(
            f"{needs} this program from its beginning, but {reason}. Run a script instead, use `lumen fit` or "
            f"`torchrun --nproc-per-node {workers} SCRIPT`, or set {instead}."
        )
    stdout.flush()
    stderr.flush()
    command = make_python_command(__name__, str(workers), str(max_restarts), *words)
    os.execv(command[0], command)


def _explain_no_launch() -> str | None:
    if in_notebook or "ipykernel" in sys.modules:
        return "this is a notebook"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "this is an interactive session"
    if "pytest" in sys.modules:
        return "pytest runs the program"
    if sys.argv[0] in ("", "-"):
        return "the program was read from the standard input"
    if sys.argv[0] != "-c" and not os.path.exists(sys.argv[0]):
        return f"{sys.argv[0]} is not in {os.getcwd()}: the working directory has changed since the start"
    return None


def launch(workers: int, command: Sequence[str], max_restarts: int = 0) -> int:
    """Run Python in several workers on this host and wait for them.

    Rank 0 uses the terminal. The output of the other ranks goes to files, which are kept if the job fails. The first
    error of all workers is printed last. The first stop signal lets the workers finish their step and save. A second
    signal ends each worker immediately, except for a save in progress. A third signal kills the workers.

    Args:
        workers: Number of processes to start.
        command: Arguments of the Python interpreter, such as `["train.py", "--lr", "0.1"]`.
        max_restarts: Maximum number of restarts of a failed job, as in `Trainer`.

    Returns:
        The exit code: the code of the first failed worker, 70 for a hung job, or the code of the signal that stopped
        the job.
    """
    with collect_young_only():
        from lumen.distributed.agent import run_workers  # the import takes a second

    with _make_output_folder() as folder, _set_environment(workers), _collect_signals() as requests:
        attempts, refusal = JobAttempts(max_restarts, folder), None
        while failures := run_workers(workers, command, attempts.begin_attempt(), requests, attempts.attempt):
            if requests or (refusal := attempts.find_restart_refusal(failures)) is not None:
                break
    code, text = _report_failures(failures, requests, folder) if failures else (0, None)
    if refusal:
        text = "\n".join([refusal, *([] if text is None else [text])])
    if text is None or str(folder) not in text:
        shutil.rmtree(folder)
    if text is not None:
        print(text.rstrip("\n"), file=stderr)
    return code


@contextmanager
def _make_output_folder() -> Iterator[Path]:
    """Context with a folder for the output of the workers; folders of killed launchers are removed.

    A running launcher holds a lock in its folder. The kept folder of a failed job has no lock file.
    """
    for other in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError), (other / _LOCK_NAME).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    with (folder / "draft").open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(folder / "draft", folder / _LOCK_NAME)
        yield folder
        (folder / _LOCK_NAME).unlink()


@contextmanager
def _set_environment(workers: int) -> Iterator[None]:
    """Context that sets the environment variables for the agent and the workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = {
        LAUNCHER: str(os.getpid()),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # Sets of strings have the same order in all workers.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // workers))),
        **get_loopback_variables(),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # `_collect_signals` handles the other signals
    }
    before = {name: os.environ.pop(name, None) for name in (*settings, NOTES_VARIABLE, RESTART_VARIABLE)}
    os.environ.update(settings)
    agent_log = logging.getLogger("torch.distributed.elastic")
    level = agent_log.level
    agent_log.setLevel(logging.CRITICAL)  # the launcher prints the error itself
    try:
        yield
    finally:
        agent_log.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Context in which the numbers of stop signals are appended to the yielded list, without other effects."""
    numbers: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield numbers
        return
    first_s = 0.0

    def record_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if not numbers:
            first_s = time.monotonic()
        elif is_same_request(numbers[0], number, time.monotonic() - first_s):
            return
        numbers.append(number)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGQUIT)}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN and should_obey(number, before[number]):
            signal.signal(number, record_signal)
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report_failures(
    failures: Mapping[int, ProcessFailure], requests: list[int], folder: Path
) -> tuple[int, str | None]:
    """Return the exit code of a failed job, and the text to print."""
    rank, report = find_first_failure(failures)
    code = failures[rank].exitcode
    if report is not None:
        text = report["text"]
        if report["kind"] == ProcessLost.__name__:
            text += "\nA different rank had already ended without an error: look for code that exits on one rank only."
        if report["kind"] != ConfigError.__name__:
            text = f"rank {rank} failed; the output of the ranks above 0 is in {folder}\n{text}"
        return HUNG if report["kind"] == ProcessStuck.__name__ else max(code, 1), text  # negative after a signal
    if requests:
        return get_exit_code(requests[0]), None
    if code in STOP_EXIT_CODES or -code in SIGNALS:
        return code if code > 0 else get_exit_code(-code), None
    if rank == 0 and code > 0:
        return code, None
    exit_text = describe_exit(code)
    texts = [path.read_text(errors="replace") for path in folder.rglob(f"{rank}/std*.log")]
    lines = [line for text in texts for line in text.splitlines()[-_TAIL_LINES:]]
    output = "\n".join([f"rank {rank} {exit_text}; the output of the ranks above 0 is in {folder}", *lines])
    hint = " If nobody sent the signal, the system may have run out of memory." if code == -signal.SIGKILL else ""
    return code if code > 0 else 128 - code, f"{output}\nerror: rank {rank} {exit_text}.{hint}"


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[3:], int(sys.argv[2])))
