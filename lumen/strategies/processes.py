"""The processes of a run: who they are, and how they agree on plain data."""

from __future__ import annotations

import atexit
import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lumen import errors
from lumen.errors import ConfigError, LumenError, ProcessLost, ProcessStuck, TrainingError
from lumen.strategies.found import find
from lumen.strategies.stacks import Stacks

T = TypeVar("T")
TIMEOUT_S, STARTUP_TIMEOUT_S = 600.0, 1800.0
# What gloo, NCCL and the store say; none has an exception of its own for it.
_WAITED = re.compile(r"timed? ?out waiting|wait timeout|timeout caused pair closure|collective operation timeout", re.I)
_LOST = re.compile(
    r"gloo.*(connection (closed|reset) by peer|connection refused|broken pipe|socket closed)|"
    r"remote process exited|(nccl communicator|process group) was aborted|failed to (send|recv)",
    re.I | re.S,
)


@final
class _Groups:
    """The process groups of this process: opened once, used by every run, closed when Python exits."""

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self.is_ours = not dist.is_initialized()
        self._failed = False
        timeout = timedelta(seconds=processes.startup_timeout_s)
        if self.is_ours:
            import_module("torch._dynamo")  # later it would keep the default group for ever, and so gloo's threads
            where: dict[str, Any] = {"store": dist.HashStore()}  # type: ignore[attr-defined]
            if processes.world_size > 1:
                where = {"init_method": processes.address}
            # a parameter that is kept on the CPU needs a backend too
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=processes.rank, world_size=processes.world_size, timeout=timeout,
                device_id=device if device.type == "cuda" else None, **where,
            )  # fmt: skip
        self.default: Any = dist.group.WORLD
        self.control: Any = None
        self.stacks: Stacks | None = None
        if processes.world_size > 1:
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.stacks = Stacks(processes.rank, lambda value: _gather(value, self.control))
        atexit.register(self.close)

    def set_timeout(self, timeout_s: float) -> None:
        """How long the next collectives wait; a default group of the user's own keeps its time."""
        for group in (self.control, self.default if self.is_ours else None):
            if group is not None:
                c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def failed(self) -> None:
        """The others are somewhere else: leave without waiting for them."""
        self._failed = True

    def close(self) -> None:
        """Close what was opened."""
        atexit.unregister(self.close)
        if self.stacks is not None:
            self.stacks.close()
        if dist.is_initialized() and dist.group.WORLD is self.default:
            if not self.is_ours:
                if self.control is not None:
                    dist.destroy_process_group(self.control)
            elif self._failed and dist.get_backend() != "gloo":
                c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        self.default = self.control = None
        gc.collect()  # gloo's threads end with the last reference
        _wait_for_gloo()


def _wait_for_gloo(limit_s: float = 1.0) -> None:
    """Wait until threads of gloo rest that stay because a model keeps its group.

    One that drops its last tensor after Python's end ends the process with SIGABRT.
    """
    deadline_s = time.monotonic() + limit_s
    busy = True
    while busy and time.monotonic() < deadline_s:
        time.sleep(0.01)  # it may want Python now
        stats = [path.read_text() for path in Path("/proc/self/task").glob("*/stat")]
        busy = any("(pt_gloo" in stat and ") S " not in stat for stat in stats)


_groups: _Groups | None = None


@final
class Processes:
    """The processes of a run, as one of them sees it.

    Values are exchanged over a gloo group of their own, which never waits for an accelerator.

    Args:
        rank: Number of this process in the run.
        world_size: Processes of the run.
        local_rank: Number of this process on its node.
        local_world_size: Processes on this node.
        node: Number of this node.
        nodes: Nodes of the run.
        started_by: `torchrun`, `SLURM` or `you`; None: nobody has started the others yet, or there are none.
        address: Where they meet, as a URL for `torch.distributed`.

    Attributes:
        timeout_s: How long a process waits for the others once training has begun.
        startup_timeout_s: How long it waits until then.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        local_world_size: int = 1,
        node: int = 0,
        nodes: int = 1,
        started_by: str | None = None,
        address: str = "env://",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.local_world_size = local_world_size
        self.node = node
        self.nodes = nodes
        self.started_by = started_by
        self.address = address
        self.timeout_s = TIMEOUT_S
        self.startup_timeout_s = STARTUP_TIMEOUT_S
        self._groups: _Groups | None = None

    @staticmethod
    def found() -> Processes:
        """The processes that a process group or the environment describes; one alone if nothing does.

        Raises:
            ConfigError: The environment says something that cannot be.
        """
        found = find()
        processes = Processes(
            found.rank, found.world_size, found.local_rank, found.local_world_size, found.node, found.nodes, found.by,
            found.address,
        )  # fmt: skip
        opened_here = _groups is not None and _groups.is_ours and dist.is_initialized()
        there = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() and not opened_here else None
        if there not in (None, (found.rank, found.world_size)):
            rank, world = dist.get_rank(), dist.get_world_size()
            return Processes(rank, world, rank, world, started_by="you")
        return processes

    @property
    def are_missing(self) -> bool:
        """The others have yet to be started."""
        return self.world_size > 1 and self.started_by is None

    def connect(
        self, device: torch.device, *, timeout_s: float = TIMEOUT_S, startup_timeout_s: float = STARTUP_TIMEOUT_S
    ) -> None:
        """Open the process groups, unless that is done. Collective: every rank must call this.

        A default group that exists is used, and left open.

        Args:
            device: Of this process.
            timeout_s: How long a process waits for the others once training has begun, > 0.
            startup_timeout_s: How long it waits until then, > 0.

        Raises:
            TrainingError: Not all processes came.
        """
        global _groups
        self.timeout_s, self.startup_timeout_s = timeout_s, startup_timeout_s
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if _groups is None or not dist.is_initialized() or dist.group.WORLD is not _groups.default:
            try:
                _groups = _Groups(self, device)
            except (RuntimeError, ValueError) as error:
                raise TrainingError(
                    f"rank {self.rank}: the {self.world_size} processes did not come together within "
                    f"{startup_timeout_s:g} s: {error}. Are all of them started, and can they reach MASTER_ADDR?"
                ) from error
        self._groups = _groups
        self._groups.set_timeout(startup_timeout_s)

    def begin_training(self) -> None:
        """The first step is done: from now on nobody is waited for longer than `timeout_s`."""
        if self._groups is not None:
            self._groups.set_timeout(self.timeout_s)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """The context of a run: whoever waits in vain says where the other processes of its host stand.

        Raises:
            ProcessStuck: Another process did not take part in time.
            ProcessLost: Another process has ended.
        """
        try:
            yield
        except LumenError:
            raise
        except Exception as error:
            if self._groups is not None and self.world_size > 1:
                self._groups.failed()
                self._explain(error, self._groups)
            raise

    def _explain(self, error: Exception, groups: _Groups) -> None:
        if isinstance(error, RuntimeError) and _WAITED.search(str(error)) and groups.stacks is not None:
            here = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            raise ProcessStuck(
                f"rank {self.rank} waited for the other processes longer than timeout_s allows "
                f"({self.timeout_s:g} s, {self.startup_timeout_s:g} s until the first step is done).\n"
                f"rank {self.rank} waits here, {error}:\n{here}\n{groups.stacks.collect()}\n"
                "Find the process that does something else. If that only takes long, set a longer timeout_s: "
                "strategy: {class_path: lumen.DDP, init_args: {timeout_s: 3600}}."
            ) from None
        if isinstance(error, RuntimeError) and _LOST.search(str(error)):
            raise ProcessLost(f"rank {self.rank} lost another process of the run: see why that one ended.") from error

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        if self.world_size > 1:
            self.sum([0.0])

    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value of plain data. Collective: every rank must call this."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, source, group=self._control)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value of plain data, in rank order. Collective: every rank must call this."""
        return [value] if self.world_size == 1 else _gather(value, self._control)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sums over ranks, in float64. Collective: every rank must call this."""
        return self.begin_sum(numbers)()

    def begin_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin `sum`; what is returned waits for it. Collective: every rank must call this."""
        if self.world_size == 1:
            return lambda: list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(totals, group=self._control, async_op=True)

        def finish() -> list[float]:
            work.wait()
            return totals.tolist()

        return finish

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """What rank 0 gets from calling a function; its error is raised on every rank. Collective."""
        if self.world_size == 1:
            return function()
        answer: Any = None
        caught: Exception | None = None
        if self.rank == 0:
            try:
                answer = function()
            except Exception as error:  # told to the others by name: what was raised may not travel
                caught = error
        failed = None if caught is None else (type(caught).__name__, str(caught))
        answer, failed = self.broadcast((answer, failed))
        if caught is not None:
            raise caught
        if failed is not None:
            raise _told(0, failed)
        return answer  # type: ignore[no-any-return]

    def together(self, function: Callable[[], T]) -> T:
        """What this rank gets from calling a function; an error of any rank is raised on all. Collective."""
        if self.world_size == 1:
            return function()
        caught: Exception | None = None
        try:
            answer = function()
        except Exception as error:
            caught = error
        failures = self.gather(None if caught is None else (type(caught).__name__, str(caught)))
        if caught is not None:
            raise caught
        for rank, failed in enumerate(failures):
            if failed is not None:
                raise _told(rank, failed)
        return answer

    def once_per_node(self, function: Callable[[], T]) -> T:
        """What the first process of this node gets from a function; its error is raised on every rank. Collective."""
        mine = self.together(lambda: function() if self.local_rank == 0 else None)
        answers = self.gather((self.node, self.local_rank, mine))
        return next(answer for node, rank, answer in answers if (node, rank) == (self.node, 0))  # type: ignore[return-value]

    def close(self) -> None:
        """Close the process groups that `connect` opened; this happens by itself when Python exits."""
        global _groups
        if _groups is not None:
            _groups.close()
        self._groups = _groups = None

    @property
    def _control(self) -> Any:
        if self._groups is None:
            raise ConfigError("the processes are not connected yet: this can be called from `setup` on.")
        return self._groups.control


def _gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _told(rank: int, failed: tuple[str, str]) -> Exception:
    """The error of another rank, of which the name and the message are known."""
    name, message = failed
    kind = getattr(errors, name, None)
    return kind(message) if kind else ProcessLost(f"rank {rank} failed: {name}: {message}")
