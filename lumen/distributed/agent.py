"""Runs workers under torch's elastic agent, but lets them end by themselves after a stop request or a peer's error."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from lumen.distributed.cluster_environment import LOOPBACK
from lumen.distributed.process_groups import loopback_store
from lumen.internals.process_groups import never_restart, watch_workers

_GRACE_S = 300.0  # after a request: for the step in progress and a checkpoint
_PEERS_NOTICE_S = 5.0  # after a failure: the others lose the connection
_LAST_WORDS_S = 5.0  # after SIGTERM


def run_workers(
    workers: int, command: Sequence[str], folder: Path, requests: list[int], restarts: int = 0
) -> dict[int, ProcessFailure]:
    """Run Python in several processes of this host until all have ended.

    Args:
        workers: Number of processes to start.
        command: Arguments of the Python interpreter, such as `["train.py", "--lr", "0.1"]`.
        folder: Directory for the output of all ranks but 0, and for their error reports.
        requests: Numbers of signals to pass on to the workers; the caller's signal handler appends to it.
        restarts: How often the job was started again: its `TORCHELASTIC_RESTART_COUNT`.

    Returns:
        Each failed rank with its error; ranks that were ended because another had failed are left out.
    """
    store = loopback_store(LOOPBACK)  # The handler and the workers use it. Each life of a job has a new one.
    spec = WorkerSpec(
        role="lumen", local_world_size=workers, entrypoint=sys.executable, args=tuple(command),
        rdzv_handler=StaticTCPRendezvous(LOOPBACK, store.port, rank=0, world_size=1, run_id="lumen", timeout=60),
        max_restarts=restarts, monitor_interval=0.1, local_addr=LOOPBACK,
    )  # fmt: skip
    logs = DefaultLogsSpecs(str(folder), redirects=dict.fromkeys(range(1, workers), Std.ALL))
    watch = _Watch(requests)
    agent = LocalElasticAgent(spec, logs)
    watch_workers(agent, watch.look)
    never_restart(agent)
    return {rank: failure for rank, failure in agent.run().failures.items() if failure.pid not in watch.ended}


@final
class _Watch:
    """Passes signals on to the workers alone, not to processes that they have started.

    Attributes:
        ended: Process ids of the workers that were ended because others had failed.
    """

    def __init__(self, requests: list[int]) -> None:
        self._requests = requests
        self._passed_on = 0
        self._patient_until_s: float | None = None
        self.ended: set[int] = set()

    def look(self, worker_group: WorkerGroup) -> RunResult | None:
        """Pass on new signals; returns None once no worker runs, else what the agent is to say.

        The agent never looks while one runs: it would end the others the moment that it sees one fail.
        """
        running, failed = _look([worker.id for worker in worker_group.workers])
        while self._passed_on < len(self._requests):
            # SIGINT: a SIGTERM that follows another one may be that of who sends to all processes
            _send(running, (self._requests[0], signal.SIGINT, signal.SIGKILL)[min(self._passed_on, 2)])
            self._passed_on += 1
            self._patient_until_s = time.monotonic() + _GRACE_S
        for pid in failed:
            with suppress(ProcessLookupError):  # data workers of one that was killed would keep its connections open
                os.killpg(pid, signal.SIGKILL)
        if failed and self._patient_until_s is None:
            self._patient_until_s = time.monotonic() + _PEERS_NOTICE_S
        if running and (self._patient_until_s is None or time.monotonic() < self._patient_until_s):
            return RunResult(state=WorkerState.HEALTHY)
        self._end(running)
        return None

    def _end(self, pids: list[int]) -> None:
        self.ended.update(pids)
        _send(pids, signal.SIGTERM)
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while (running := _look(pids)[0]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def _look(pids: list[int]) -> tuple[list[int], list[int]]:
    """The processes that run and those that have failed, by pid; they are not reaped, which the agent does."""
    running, failed = [], []
    for pid in pids:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # collected
            continue
        if ended is None:
            running.append(pid)
        elif ended.si_code != os.CLD_EXITED or ended.si_status:
            failed.append(pid)
    return running, failed


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
