"""Groups of real processes: one for each number of processes, started once for many tests."""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import numpy
import pytest

LIMIT_S = 150


class Group:
    """Real processes with a gloo group that run functions of test modules in parallel.

    A function that fails, dies or exceeds its time ends the processes; the next call starts new ones.
    """

    def __init__(self, world):
        self.world = world
        self._folder = None

    def run(self, function, *args, limit_s=LIMIT_S, **options):
        """Call `function(*args, **options)` on every rank and return what each returned, in rank order."""
        if self._folder is None:
            self._start()
        name = f"{function.__module__}.{getattr(function, '__qualname__', function)}"
        for pipe in self._pipes:
            pipe.send((function, args, options))
        results, failures = [], []
        deadline_s = time.monotonic() + limit_s
        for rank in range(self.world):
            failed, answer = self._answer(rank, max(deadline_s - time.monotonic(), 0))
            results.append(answer)
            if failed:
                failures.append(f"--- rank {rank} of {self.world} in {name} (limit {limit_s} s): {answer}")
                deadline_s = min(deadline_s, time.monotonic() + 5)  # the other ranks wait for this one
        if failures:
            self.end()
            pytest.fail("\n".join(failures), pytrace=False)
        return results

    def _answer(self, rank, limit_s):
        """Return whether a rank failed, and its result or its location."""
        pipe, process, stacks = self._pipes[rank], self._processes[rank], self._folder / f"stacks-{rank}"
        try:
            if pipe.poll(limit_s):
                return pipe.recv()
        except (EOFError, ConnectionError):
            process.join(5)
            return True, f"it died, exit code {process.exitcode}:\n{stacks.read_text()}"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return True, f"it is not done, and stands here:\n{stacks.read_text()}"

    def _start(self):
        self._folder = Path(tempfile.mkdtemp(prefix="lumen-group-"))
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world, self._folder, theirs), daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.end)  # at exit of pytest, before multiprocessing waits for ever
        for rank, pipe in enumerate(self._pipes):
            if not _is_ready(pipe):
                self.end()
                pytest.fail(f"process {rank} of {self.world} did not start", pytrace=False)

    def end(self):
        if self._folder is None:
            return
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        shutil.rmtree(self._folder)
        self._folder = None


def _work(rank, world, folder, pipe):
    """Run the requested functions in a process of a group until its pipe is closed."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    with open(folder / f"stacks-{rank}", "w") as stacks:
        os.dup2(stacks.fileno(), sys.stderr.fileno())
        faulthandler.enable(stacks)
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # of all threads, with the frames of C++
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)  # it may crash on threads that run
        pipe.send("ready")
        imported = 0
        while True:
            try:
                function, args, options = pipe.recv()
            except EOFError:
                break
            if imported < len(sys.modules):
                imported = len(sys.modules)
                gc.collect()
                gc.freeze()  # as in `tests/conftest.py`
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    answer = False, function(*args, **options)
            except BaseException:
                answer = True, traceback.format_exc()
            pipe.send(answer)
            sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # after hundreds of tests, the shutdown of Python would take a second


def _end_with_the_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


@pytest.fixture(scope="session")
def group():
    """Return the groups: `group(2).run(function, *args, **options)` returns the results of two processes."""
    made = {}

    def get(world):
        return made.setdefault(world, Group(world))

    yield get
    for each in made.values():
        each.end()


def _is_ready(pipe):
    try:
        return pipe.poll(LIMIT_S) and pipe.recv() == "ready"
    except EOFError:
        return False


def run_on_ranks(group, world, function, *args, **options):
    """Return the result of all ranks, which must be equal."""
    results = group(world).run(function, *args, **options)
    for each in results[1:]:
        assert_equal(each, results[0], 0.0)
    return results[0]


def catch_message(error, function, *args, **options):
    """Return the message of the error that a call raises."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    return str(caught.value)


def assert_equal(ours, theirs, tolerance=1e-12):
    """Compare arrays and numbers by name."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert numpy.abs(numpy.subtract(value, theirs[name])).max(initial=0.0) <= tolerance, name
