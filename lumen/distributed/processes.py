"""Processes of a run: ranks, collectives on plain data, and propagation of an error from one process to all."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from socket import gethostname
from time import monotonic
from typing import Any, Literal, TypeVar, final

import torch
import torch.distributed as dist

from lumen import errors
from lumen.distributed.cluster_environment import find_cluster_process
from lumen.distributed.process_groups import ProcessGroups, all_gather_values
from lumen.distributed.stack_dump import StackDumper
from lumen.distributed.worker import end_with_parent
from lumen.errors import ConfigError, LumenError, ProcessLost, ProcessStuck
from lumen.internals.process_groups import check_group_names

T = TypeVar("T")
U = TypeVar("U")
RemoteFailure = tuple[str, str]
TIMEOUT_S, STARTUP_TIMEOUT_S = 600.0, 1800.0
# Messages of gloo, NCCL and the store, which raise no specific exception classes.
_TIMED_OUT_PATTERN = re.compile(
    r"timed? ?out waiting|wait timeout|timeout caused pair closure|collective operation timeout", re.I
)
_CONNECTION_LOST_PATTERN = re.compile(
    r"gloo.*(connection (closed|reset) by peer|connection refused|broken pipe|socket closed)|"
    r"remote process exited|(nccl communicator|process group) was aborted|failed to (send|recv)",
    re.I | re.S,
)


_groups: ProcessGroups | None = None


@final
@dataclass(eq=False)
class Processes:
    """Processes of a run, as seen by one of them.

    Plain data is exchanged over separate gloo groups, so the exchange never waits for an accelerator.

    Args:
        rank: Rank of this process in the run, from 0.
        world_size: Number of processes in the run.
        local_rank: Rank of this process on its node, from 0.
        local_world_size: Number of processes on this node.
        node: Rank of this node, from 0.
        nodes: Number of nodes in the run.
        started_by: `torchrun`, `SLURM` or `you`; None: there are no other processes, or they are not started yet.
        address: URL for `torch.distributed` at which the processes meet.
        launcher: Identifier of the program that started this process and may restart it; None: no restart.

    Attributes:
        timeout_s: Maximum time after the first step that a process waits for the others, or that a step makes no
            progress.
        startup_timeout_s: Maximum time before the end of the first step; `trainer/hang_watch.py` has the details.
        waited_s: Seconds that this process has waited in `broadcast`, `all_gather`, `all_reduce_sum` and methods that
            use them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    started_by: str | None = None
    address: str = "env://"
    launcher: str | None = None
    timeout_s: float = field(default=TIMEOUT_S, init=False)
    startup_timeout_s: float = field(default=STARTUP_TIMEOUT_S, init=False)
    waited_s: float = field(default=0.0, init=False)
    _current_timeout_s: float = field(default=0.0, init=False)
    _groups: ProcessGroups | None = field(default=None, init=False)
    _group: Literal["control", "thread_group", "default"] = field(default="control", init=False)

    @staticmethod
    def find() -> Processes:
        """Return the processes that a process group or the environment describes; otherwise only this process.

        Raises:
            ConfigError: An environment variable is missing or is not a number, or a rank is not below its size.
        """
        found = find_cluster_process()
        has_user_group = dist.is_initialized() and (_groups is None or not _groups.owns_default)
        group = (dist.get_rank(), dist.get_world_size()) if has_user_group else None
        if group not in (None, (found.rank, found.world_size)):
            rank, world = dist.get_rank(), dist.get_world_size()
            return Processes(rank, world, rank, world, started_by="you", launcher=found.launcher)
        return Processes(**vars(found))

    @property
    def is_global_zero(self) -> bool:
        """True in the one process that writes logs and prints messages."""
        return self.rank == 0

    @property
    def must_be_started(self) -> bool:
        """True if the other processes are not started yet."""
        return self.world_size > 1 and self.started_by is None

    def set_timeouts(self, timeout_s: float, startup_timeout_s: float) -> None:
        """Set how long a process waits for the others, in seconds (> 0): after the first step, and until it is done."""
        self.timeout_s, self.startup_timeout_s = timeout_s, startup_timeout_s

    def connect(
        self, device: torch.device, *, timeout_s: float = TIMEOUT_S, startup_timeout_s: float = STARTUP_TIMEOUT_S
    ) -> None:
        """Open the process groups, unless they are open. Collective: every rank must call this.

        An existing default group is used, and `close` leaves it open.

        Args:
            device: The device of this process, which determines the backends.
            timeout_s: Maximum wait for the other processes after the first step, in seconds, > 0.
            startup_timeout_s: Maximum wait until the first step is done, in seconds, > 0.

        Raises:
            ProcessStuck: Some processes did not arrive in time.
            ConfigError: The installed version of torch lacks a feature that process groups need.
        """
        global _groups
        self.set_timeouts(timeout_s, startup_timeout_s)
        if self.started_by == "torchrun" and self.launcher is not None:
            end_with_parent()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if _groups is None or not dist.is_initialized() or dist.group.WORLD is not _groups.default:
            began_s = monotonic()
            check_group_names()
            try:
                _groups = ProcessGroups(self, device)
            except (RuntimeError, ValueError) as error:
                raise ProcessStuck(
                    f"rank {self.rank}: the {self.world_size} processes did not all connect within "
                    f"{monotonic() - began_s:.0f} s (limit {startup_timeout_s:g} s): {error}. Check that all processes "
                    "are started and can reach MASTER_ADDR."
                ) from error
        self._groups = _groups
        self._groups.set_timeout(startup_timeout_s)

    def include(self, groups: Sequence[Any]) -> None:
        """Give groups of some of the ranks the timeouts of the other groups; call this after `connect`."""
        for group in groups:
            self._open_groups.include(group)
        self._open_groups.set_timeout(self.startup_timeout_s)

    def begin_training(self) -> None:
        """Note that the first step is done: the timeout is now `timeout_s`."""
        if self._groups is not None:
            self._current_timeout_s = self.timeout_s
            self._groups.set_timeout(self.timeout_s)

    def extend_timeout(self, seconds: float) -> None:
        """Raise the timeout of collectives to `seconds`, unless the current timeout is longer.

        Any thread may call this, but only after `begin_training`, which sets the timeout.
        """
        if self._groups is not None and seconds > self._current_timeout_s:
            self._current_timeout_s = seconds
            self._groups.set_timeout(seconds)

    @property
    def gradient_group(self) -> Any:
        """The process group for gradients; None is torch's default group.

        On the CPU, the group of plain data is used, because two gloo groups together are slower than one.
        """
        is_cpu = self._groups is not None and self._groups.device.type == "cpu"
        return self._control if is_cpu and self.world_size > 1 else None

    @property
    def stacks(self) -> StackDumper | None:
        """The access to the stacks of this host's processes; None if the run has one process."""
        return None if self._groups is None else self._groups.stacks

    def get_host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return gethostname() if self.stacks is None else self.stacks.get_host(rank)

    @contextmanager
    def explain_lost_ranks(self) -> Iterator[None]:
        """Context of a run in which the error of a waiting rank includes the stacks of the other ranks of its host.

        Raises:
            ProcessStuck: Another process did not take part in a collective in time.
            ProcessLost: Another process of the run has ended.
        """
        try:
            yield
        except BaseException as error:
            if self._groups is not None and self.world_size > 1:
                self._groups.note_failure()
                if isinstance(error, Exception) and not isinstance(error, LumenError):
                    self._explain_error(error, self._groups)
            raise

    def _explain_error(self, error: Exception, groups: ProcessGroups) -> None:
        if isinstance(error, RuntimeError) and _TIMED_OUT_PATTERN.search(str(error)) and groups.stacks is not None:
            stack = "".join(traceback.format_tb(error.__traceback__)).rstrip()
            raise ProcessStuck(
                f"rank {self.rank} waited for the other processes longer than timeout_s allows ({self.timeout_s:g} s, "
                f"{self.startup_timeout_s:g} s until the first step is done).\nrank {self.rank} waits here, "
                f"{error}:\n{stack}\n{groups.stacks.collect_stacks()}\nFind the process that does something else. If "
                "that process is only slow, set a longer timeout_s: strategy: {class_path: lumen.DDP, init_args: "
                "{timeout_s: 3600}}."
            ) from None
        if isinstance(error, RuntimeError) and _CONNECTION_LOST_PATTERN.search(str(error)):
            raise ProcessLost(
                f"rank {self.rank} lost another process of the run: look for the error of that process."
            ) from error

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        if self.world_size > 1:
            self.all_reduce_sum([0.0])

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return rank `source`'s value of plain data. Collective: every rank must call this."""
        if self.world_size == 1:
            return value
        box = [value]
        with self.count_wait():
            dist.broadcast_object_list(box, source, group=self._control)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value of plain data, in rank order. Collective: every rank must call this."""
        if self.world_size == 1:
            return [value]
        with self.count_wait():
            return all_gather_values(value, self._control)

    def gather_on_rank_zero(self, value: T) -> list[T]:
        """Return every rank's value of plain data, in rank order, on rank 0; an empty list elsewhere. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values or None, group=self._control, group_dst=0)
        return values

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over ranks, in float64. Collective: every rank must call this."""
        return self.start_sum(numbers)()

    def start_sum(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Begin `all_reduce_sum`; the returned function waits for the result. Collective: every rank must call this."""
        if self.world_size == 1:
            return lambda: list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float64)
        return self._make_finish(dist.all_reduce(totals, group=self._control, async_op=True), totals)

    def start_all_gather(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Begin to gather numbers in float64. The returned function waits and returns the numbers in rank order.

        Collective: every rank must call this with the same count of numbers.
        """
        if self.world_size == 1:
            return lambda: [list(numbers)]
        tensor = torch.tensor(numbers, dtype=torch.float64)
        gathered = tensor.new_empty(self.world_size, len(numbers))
        return self._make_finish(dist.all_gather([*gathered], tensor, group=self._control, async_op=True), gathered)

    def _make_finish(self, work: Any, numbers: torch.Tensor) -> Callable[[], Any]:
        def finish() -> Any:
            with self.count_wait():
                work.wait()
            return numbers.tolist()

        return finish

    @contextmanager
    def count_wait(self) -> Iterator[None]:
        """Context of a wait for other processes, which `waited_s` counts."""
        began_s = monotonic()
        try:
            yield
        finally:
            self.waited_s += monotonic() - began_s

    def run_on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; return its result, or raise its error, on every rank. Collective."""
        if self.world_size == 1:
            return function()
        result, caught = call_and_catch(function) if self.rank == 0 else (None, None)
        result, failed = self.broadcast((result, describe_failure(caught)))
        raise_first_failure([failed], caught)
        return result  # type: ignore[return-value]

    def run_and_conclude(self, function: Callable[[], T], conclusion: Callable[[Callable[[], list[T]]], U]) -> U:
        """Combine every rank's result on rank 0; an error of any rank is raised on all. Collective.

        Args:
            function: Function called on every rank; its result is sent to rank 0.
            conclusion: Function called on rank 0 with a function that returns the results in rank order, or raises the
                error of the first failed rank. The return value of `conclusion` is returned on every rank.
        """
        if self.world_size == 1:
            return conclusion(lambda: [function()])
        result, caught = call_and_catch(function)
        own_result: Any = result, describe_failure(caught)
        gathered = self.gather_on_rank_zero(own_result)

        def get_results() -> list[T]:
            raise_first_failure([failed for _, failed in gathered], caught)
            return [result for result, _ in gathered]

        try:
            return self.run_on_rank_zero(partial(conclusion, get_results))
        except Exception as error:
            if caught is not None and str(error) == str(make_remote_error(self.rank, own_result[1])):
                raise caught from None  # `caught` has the traceback
            raise

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Call a function on every rank and return its result; an error of any rank is raised on all. Collective."""
        if self.world_size == 1:
            return function()
        result, caught = call_and_catch(function)
        raise_first_failure(self.all_gather(describe_failure(caught)), caught)
        return result  # type: ignore[return-value]

    def run_once_per_node(self, function: Callable[[], T]) -> T:
        """Call a function on the first process of each node, and return its result on the node. Collective.

        An error of any process is raised on all.
        """
        own_result = self.run_on_all(lambda: function() if self.local_rank == 0 else None)
        results = self.all_gather((self.node, self.local_rank, own_result))
        return next(result for node, rank, result in results if (node, rank) == (self.node, 0))  # type: ignore[return-value]

    def close(self) -> None:
        """Close the process groups that `connect` opened; Lumen also closes them when Python exits."""
        global _groups
        if _groups is not None:
            _groups.close()
        self._groups = _groups = None

    def for_thread(self) -> Processes:
        """Return the same processes with separate process groups, for use in a thread. Collective."""
        processes = copy(self)
        processes._group = "thread_group"
        if self.world_size > 1:
            processes._open_groups.open_thread_group()
        return processes

    def for_user(self) -> Processes:
        """Return the same processes over torch's default group.

        A user's collective that some ranks skip therefore never matches one of Lumen's.
        """
        processes = copy(self)
        processes._group = "default"
        return processes

    @property
    def _open_groups(self) -> ProcessGroups:
        if self._groups is None or self._groups.control is None:
            raise ConfigError(
                "the processes are not connected yet: collectives can be called from the hook `setup` on."
            )
        return self._groups

    @property
    def _control(self) -> Any:
        return getattr(self._open_groups, self._group)


SINGLE_PROCESS = Processes()
"""This process without others; it is never connected."""


def call_and_catch(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a function and None, or None and the exception that the function raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def describe_failure(caught: Exception | None) -> RemoteFailure | None:
    """Return class name and message of an exception for other ranks, because the exception may not be picklable."""
    return None if caught is None else (type(caught).__name__, str(caught))


def raise_first_failure(failures: Sequence[RemoteFailure | None], caught: Exception | None) -> None:
    """Raise the error of the first failed rank, if any; a Lumen error has the same class on every rank.

    Args:
        failures: Results of `describe_failure` on each rank, in rank order.
        caught: The exception of this rank, or None.
    """
    for rank, failed in enumerate(failures):
        if failed is not None:
            local = describe_failure(caught)
            if caught is not None and (failed == local or not (_is_lumen_error(failed) or _is_lumen_error(local))):
                raise caught
            raise make_remote_error(rank, failed) from caught


def _is_lumen_error(failure: RemoteFailure | None) -> bool:
    return failure is not None and hasattr(errors, failure[0])


def make_remote_error(rank: int, failed: RemoteFailure) -> Exception:
    """Return the error to raise for the failure of another rank, given by class name and message."""
    name, message = failed
    kind = getattr(errors, name, None)
    return kind(message) if kind else ProcessLost(f"rank {rank} failed: {name}: {message}")
