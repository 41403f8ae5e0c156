"""Jobs of several processes that die: started like a user's, or forked from a process that has imported torch."""

import atexit
import faulthandler
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tests.helpers import ROOT

LIMIT_S = 90  # limit of a job
PATIENCE_S = 30  # also for ranks that have lost a peer: the agents of torch and SLURM have less
IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class End(NamedTuple):
    """End of a job.

    Attributes:
        code: Exit code of a killed or failed process, or of its launcher; 0 for success.
        took_s: Seconds from the first process that ended until none was left.
        output: Output of all processes.
    """

    code: int
    took_s: float
    output: str


class Nursery:
    """Process that has imported torch and forks ranks: a fork starts at once, a new Python takes seconds."""

    def __init__(self, *modules):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, modules))
        self._process.start()
        theirs.close()
        atexit.register(self.close)  # at exit of pytest

    def start(self, directory, module, options):
        """Start `module.main(**options)` in a directory, on `options["devices"]` ranks."""
        self._pipe.send((directory, module, options))
        return ForkedJob(directory, self._pipe)

    def close(self):
        atexit.unregister(self.close)
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class ForkedJob:
    """Ranks without a parent that waits for them, only their peers."""

    def __init__(self, directory, pipe):
        self._directory, self._pipe = directory, pipe
        self.pids = dict(enumerate(pipe.recv()))

    def wait(self):
        assert self._pipe.poll(LIMIT_S + PATIENCE_S), "the job does not end"
        code, took_s = self._pipe.recv()
        return End(code, took_s + wait_until_gone(self._directory), read_output(self._directory))


class ScriptJob:
    """Job started like a user's; all its processes work in its directory too."""

    def __init__(self, directory, *words):
        self._directory = Path(directory)
        for file in self._directory.glob("rank-*"):
            file.unlink()
        self._temporary = tempfile.mkdtemp(prefix="job-")
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": self._temporary}
        with open(self._directory / "output", "w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *words], cwd=directory, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def pids(self):
        """Return the pids of the ranks that train by rank, and their launchers under None."""
        names = [file.name.split("-") for file in self._directory.glob("rank-*")]
        return {int(rank): int(pid) for _, rank, pid in names} | {None: self._process.pid}

    def wait(self):
        first_s, deadline_s = None, time.monotonic() + LIMIT_S
        while self._process.poll() is None:
            if first_s is None and not all(map(is_alive, self.pids.values())):
                first_s = time.monotonic()
            if time.monotonic() > deadline_s:
                end_processes(self._directory)
                raise AssertionError(f"the job does not end: {read_output(self._directory)}")
            time.sleep(0.02)
        took_s = 0.0 if first_s is None else time.monotonic() - first_s
        took_s += wait_until_gone(self._directory)
        shutil.rmtree(self._temporary)
        return End(self._process.returncode, took_s, read_output(self._directory))


def start_script(directory, module, options):
    return ScriptJob(directory, "-m", module, json.dumps(options))


def start_torchrun(directory, module, options):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(options["devices"]), "--master-port"]
    return ScriptJob(directory, *words, str(find_free_port()), "-m", module, json.dumps(options))


def read_output(directory):
    return "".join(path.read_text() for path in sorted(Path(directory).glob("output*")))


def wait_until_gone(directory):
    """Return the seconds until no process works in a directory; end a remaining process and raise an error."""
    began_s = time.monotonic()
    while left := find_processes(directory):
        if time.monotonic() > began_s + PATIENCE_S:
            end_processes(directory)
            raise AssertionError(f"left behind: {left}\n{read_output(directory)}")
        time.sleep(0.02)
    return time.monotonic() - began_s


def find_processes(directory):
    """Return processes that work in a directory, by their id."""
    here, found = os.path.realpath(directory), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "cwd") == here and is_alive(int(folder.name)):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def is_alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_processes(directory):
    for pid in find_processes(directory):
        os.kill(pid, signal.SIGKILL)


def find_free_port():
    """Return a port that no socket uses, below the ports that Linux gives to sockets which choose none."""
    while True:
        with socket.socket() as place, suppress(OSError):
            place.bind(("127.0.0.1", port := random.SystemRandom().randrange(12_000, 32_000)))
            return port


def wait_until_received(pid, number):
    """Wait until a process has begun to handle a signal: a second one would merge with a pending one."""
    pending = 1 << number - 1
    while int(re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1], 16) & pending:
        time.sleep(0.01)


# ---------------------------------------------------------------------- processes of the nursery


def _serve(pipe, modules):
    for name in (*IMPORTS, *modules):
        import_module(name)
    context = multiprocessing.get_context("fork")
    while True:
        try:
            directory, module, options = pipe.recv()
        except EOFError:
            return
        world, port = options.get("devices", 1), find_free_port()
        ranks = [
            context.Process(target=_be_rank, args=(directory, module, options, rank, world, port))
            for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        pipe.send([rank.pid for rank in ranks])
        pipe.send(_attend(ranks))


def _attend(ranks):
    """Wait until all have ended; return the code of a killed or failed one, and the time that the others took."""
    first_s, swept = None, set()
    while len(swept) < len(ranks):
        for rank in ranks:
            if rank.exitcode is not None and rank not in swept:
                swept.add(rank)
                first_s = first_s or time.monotonic()
                with suppress(ProcessLookupError):  # files and connections that a killed rank has left
                    os.killpg(rank.pid, signal.SIGKILL)
            elif first_s is not None and time.monotonic() > first_s + PATIENCE_S:
                rank.kill()
        time.sleep(0.005)
    return min((rank.exitcode for rank in ranks if rank.exitcode), default=0), time.monotonic() - first_s


def _be_rank(directory, module, options, rank, world, port):
    os.setsid()
    os.chdir(directory)
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    if world > 1:
        os.environ |= dict(zip(OF_RANKS, map(str, (rank, world, rank, world, "127.0.0.1", port)), strict=True))
    try:
        sys.modules[module].main(**options)
        atexit._run_exitfuncs()  # like a Python that was not forked
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
