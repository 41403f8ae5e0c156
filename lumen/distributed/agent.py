"""Workers under torch's elastic agent, which end gracefully after a stop request or another worker's error."""

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
from lumen.distributed.process_groups import open_loopback_store
from lumen.internals.process_groups import call_before_poll, disable_restarts

_GRACE_S = 300.0  # time after a stop request, for the step in progress and a checkpoint
_PEER_ERROR_GRACE_S = 5.0  # time after a failure, in which the other workers lose the connection
_FINAL_OUTPUT_S = 5.0  # time after SIGTERM


def run_workers(
    workers: int, command: Sequence[str], folder: Path, requests: list[int], restarts: int = 0
) -> dict[int, ProcessFailure]:
    """Run Python in several processes of this host until all have ended.

    Args:
        workers: Number of processes to start.
        command: Arguments of the Python interpreter, such as `["train.py", "--lr", "0.1"]`.
        folder: Directory for the output of all ranks except 0, and for their error reports.
        requests: Numbers of signals to pass on to the workers; the caller's signal handler appends to this list.
        restarts: Number of restarts of the job so far: its `TORCHELASTIC_RESTART_COUNT`.

    Returns:
        Each failed rank with its error; ranks that were ended because of another failure are omitted.
    """
    store = open_loopback_store(LOOPBACK)  # for the handler and the workers; each restart opens a new store
    spec = WorkerSpec(
        role="lumen", local_world_size=workers, entrypoint=sys.executable, args=tuple(command),
        rdzv_handler=StaticTCPRendezvous(LOOPBACK, store.port, rank=0, world_size=1, run_id="lumen", timeout=60),
        max_restarts=restarts, monitor_interval=0.1, local_addr=LOOPBACK,
    )  # fmt: skip
    logs = DefaultLogsSpecs(str(folder), redirects=dict.fromkeys(range(1, workers), Std.ALL))
    watch = _AgentWatch(requests)
    agent = LocalElasticAgent(spec, logs)
    call_before_poll(agent, watch.monitor_workers)
    disable_restarts(agent)
    return {rank: failure for rank, failure in agent.run().failures.items() if failure.pid not in watch.ended}


@final
class _AgentWatch:
    """Watch that passes signals on to the workers, but not to processes that the workers have started.

    Attributes:
        ended: Process ids of the workers that were ended because of another worker's failure.
    """

    def __init__(self, requests: list[int]) -> None:
        self._requests = requests
        self._forwarded_count = 0
        self._wait_until_s: float | None = None
        self.ended: set[int] = set()

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult | None:
        """Pass on new signals; return the result that the agent reports, or None once no worker runs.

        The agent itself does not check running workers: it would end all workers as soon as one fails.
        """
        running, failed = _find_running_and_failed([worker.id for worker in worker_group.workers])
        while self._forwarded_count < len(self._requests):
            # The second signal is SIGINT: a second SIGTERM may come from a program that signals all processes.
            _send_signal(running, (self._requests[0], signal.SIGINT, signal.SIGKILL)[min(self._forwarded_count, 2)])
            self._forwarded_count += 1
            self._wait_until_s = time.monotonic() + _GRACE_S
        for pid in failed:
            with suppress(ProcessLookupError):  # data workers of a killed worker would keep its connections open
                os.killpg(pid, signal.SIGKILL)
        if failed and self._wait_until_s is None:
            self._wait_until_s = time.monotonic() + _PEER_ERROR_GRACE_S
        if running and (self._wait_until_s is None or time.monotonic() < self._wait_until_s):
            return RunResult(state=WorkerState.HEALTHY)
        self._end_workers(running)
        return None

    def _end_workers(self, pids: list[int]) -> None:
        self.ended.update(pids)
        _send_signal(pids, signal.SIGTERM)
        deadline_s = time.monotonic() + _FINAL_OUTPUT_S
        while (running := _find_running_and_failed(pids)[0]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def _find_running_and_failed(pids: list[int]) -> tuple[list[int], list[int]]:
    """Return the pids of running and of failed processes, without reaping them, because the agent does that."""
    running, failed = [], []
    for pid in pids:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # already reaped
            continue
        if ended is None:
            running.append(pid)
        elif ended.si_code != os.CLD_EXITED or ended.si_status:
            failed.append(pid)
    return running, failed


def _send_signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
