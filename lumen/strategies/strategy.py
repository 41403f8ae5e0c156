"""Strategy: the base of what places a task on devices, and lets processes compute a step together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import fill_all, move
from lumen.distributed.processes import ALONE, Processes
from lumen.errors import ConfigError
from lumen.internals.tensors import persistent_buffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Alike = Literal["gradient norm", "sum of the parameters' norms"]
SAME = 1e-5  # relative difference of norms that devices of different kinds may compute of the same numbers
_REDUCTIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}  # gloo has no mean


class Strategy(ABC):
    """On which devices a task lies, and how its processes compute a step together. Nobody asks which strategy it has.

    A subclass outside Lumen can be given to `Trainer(strategy=...)`; it needs no entry anywhere. It has to define
    `setup`, `call` and `gradient_sync`. Gradients are to be averaged over ranks, as torch's wrappers do: losses are
    weighted so that this average is the step's mean.
    """

    #: The processes of the run: who they are, and what of plain data they tell each other.
    processes: Processes = ALONE
    #: The device of this process.
    device: torch.device = torch.device("cpu")
    #: The device mesh of the run; None where there is no process group.
    device_mesh: DeviceMesh | None = None
    #: It can run on several processes: then the trainer sets its `processes` and `device`.
    spans_processes: bool = False
    #: `setup` shards parameters, and can do so while they are on the meta device.
    shards: bool = False

    @property
    def data_rank(self) -> int:
        """Number of the part of every step's data that this process reads, from 0.

        Processes with one data rank read the same batches and compute one gradient together, as in tensor parallelism.
        Gradients are averaged over data ranks. Metrics, predictions and weights count each data rank once.
        """
        return self.processes.rank

    @property
    def data_world_size(self) -> int:
        """Number of parts that every step's data is divided into; the number of processes is a multiple of it."""
        return self.processes.world_size

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters are between steps."""
        return self.device

    @property
    def numerics(self) -> dict[str, str | bool | None]:
        """Its settings that change what is computed, where they are not the default; by their names."""
        return {}

    def connect(self) -> None:
        """Open the process groups, unless that is done. Collective: every rank must call this. Before `setup`."""

    @abstractmethod
    def setup(self, task: nn.Module) -> None:
        """Place the task's parameters and buffers. Collective: every rank must call this. Before optimizers exist."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot train parameters as this strategy places them.

        Raises:
            ConfigError: The optimizer cannot; the message names one that can.
        """

    def communicates_in(self, part: Literal["forward", "backward", "evaluation"]) -> bool:
        """Whether ranks wait for each other there, so that none may leave one out; known from `setup` on.

        Args:
            part: A "forward" of training: a rank without a batch then runs one of another rank's. The "backward" of a
                step's last micro-batch. A forward of an "evaluation".
        """
        return part == "backward" and self.processes.world_size > 1

    @abstractmethod
    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task (`"training_step"`, ...) through whatever wraps it."""

    def begin_step(self) -> None:
        """Called before the first forward of an optimizer step. Collective: every rank must call this."""

    @abstractmethod
    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch's forward and backward; ranks communicate gradients only in the last."""

    def zero_loss(self) -> torch.Tensor | None:
        """A loss of 0 whose backward does this rank's part in that of the others, when it has no loss of its own.

        Returns:
            A scalar; None if only a forward with a real batch can do that. Here: one on which nothing depends, for a
            backward that does not communicate.
        """
        return torch.zeros((), device=self.device, requires_grad=True)

    def after_backward(self) -> None:
        """Called after the backward that communicates: check that all gradients have arrived."""

    def alike(self, grad_norm: torch.Tensor | None) -> dict[Alike, torch.Tensor]:
        """Numbers that all ranks must have alike after an update; here none.

        Args:
            grad_norm: The norm of the gradients before they were clipped; None: nothing was.

        Returns:
            Scalars on any device. Each is there on all ranks, or on none.
        """
        return {}

    def evaluation(self, *, inference_mode: bool) -> AbstractContextManager[Any]:
        """The context of an evaluation, in which there is no backward: under `torch.no_grad` already.

        Args:
            inference_mode: Under `torch.inference_mode` too; False where parameters are sharded. A strategy that calls
                `fully_shard` reshards all modules at the end: torch keeps the root gathered after a forward alone.
        """
        return torch.inference_mode() if inference_mode else torch.no_grad()

    def teardown(self) -> None:
        """Undo `setup`."""

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        self.processes.for_user().barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value of plain data, on every rank. Collective: every rank must call this.

        With several processes tensors arrive on the CPU.
        """
        return self.processes.for_user().broadcast(self._portable(value), source)

    def gather(self, value: T) -> list[T]:
        """Every rank's value of plain data, in rank order, on every rank. Collective: every rank must call this.

        With several processes tensors arrive on the CPU.
        """
        return self.processes.for_user().gather(self._portable(value))

    def _portable(self, value: T) -> T:
        """A tensor on the CPU instead: pickled on an accelerator, it would be unpickled on one that has its number."""
        if self.processes.world_size == 1 or self.device.type == "cpu":
            return value
        return move(value, torch.device("cpu"))  # type: ignore[no-any-return]

    def reduce(self, tensor: torch.Tensor, reduce_op: str = "sum", dst: int | None = None) -> torch.Tensor:
        """A tensor over ranks, element by element. Collective: every rank must call this, with equal arguments.

        Args:
            tensor: On the device of this process, of one shape and dtype on all ranks.
            reduce_op: "sum", "mean", "max", "min" or "prod".
            dst: The rank that gets it, while the others have their own tensor back; None: every rank gets it.

        Raises:
            ConfigError: There is no such operation or rank.
        """
        world = self.processes.world_size
        if reduce_op not in _REDUCTIONS or (dst is not None and dst not in range(world)):
            raise ConfigError(
                f"reduce: found reduce_op={reduce_op!r}, dst={dst!r}; reduce_op is one of {', '.join(_REDUCTIONS)}, "
                f"and dst a rank, 0 to {world - 1}, or None."
            )
        if world == 1:
            return tensor
        total, operation = tensor.detach().clone(), getattr(torch.distributed.ReduceOp, _REDUCTIONS[reduce_op])
        if dst is None:
            torch.distributed.all_reduce(total, operation)
        else:
            torch.distributed.reduce(total, dst, operation)
        if dst not in (None, self.processes.rank):
            return tensor
        return total / world if reduce_op == "mean" else total


def gather_values(strategy: Strategy, value: T) -> list[T]:
    """Return the value of the first process of each data rank, over Lumen's own group. Collective."""
    return by_data_rank(strategy.processes.gather((strategy.data_rank, strategy._portable(value))))


def by_data_rank(values: Sequence[tuple[int, T]]) -> list[T]:
    """Return one value of each data rank, in their order.

    Args:
        values: The data rank and the value of each process.
    """
    first = dict(reversed(values))
    return [first[rank] for rank in sorted(first)]


def check_data_ranks(strategy: Strategy) -> None:
    """Refuse data ranks that do not divide the data evenly among the processes. Collective: every rank must call this.

    Raises:
        ConfigError: A data rank is missing, or has more processes than another one. It is raised on every rank.
    """
    found, world = strategy.processes.gather(strategy.data_rank), strategy.data_world_size
    if sorted(found) != sorted([*range(world)] * (len(found) // world)):
        raise ConfigError(
            f"{type(strategy).__name__}: data_world_size is {world}, and the data ranks of the {len(found)} processes "
            f"are {found}. Return each of 0 to {world - 1} on equally many processes."
        )


def sync_buffers(strategy: Strategy, task: nn.Module) -> None:
    """Set the persistent buffers of a task to those of rank 0. Collective: every rank must call this.

    Each rank has updated buffers such as BatchNorm's statistics by its own batches, but one model is evaluated.
    """
    if strategy.processes.world_size == 1:
        return
    buffers = [buffer for buffer in persistent_buffers(task) if buffer.device.type == strategy.device.type]
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same = [buffer for buffer in buffers if buffer.dtype == dtype]
        joined = torch.cat([buffer.reshape(-1) for buffer in same])
        sizes = [buffer.numel() for buffer in same]
        with strategy.processes.waiting():
            torch.distributed.broadcast(joined, 0)
        with torch.no_grad():
            split = torch.split(joined, sizes)
            fill_all(same, [values.view_as(buffer) for buffer, values in zip(same, split, strict=True)])
