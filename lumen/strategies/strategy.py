"""Strategy: the base class that places a task on devices and coordinates its processes in each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import fill_tensors, move_batch
from lumen.distributed.context import Context
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import ConfigError
from lumen.errors.arguments import LightningAttributeErrors
from lumen.errors.lightning_names import ATTRIBUTES_OF_STRATEGY, INSTEAD_OF_SETTING
from lumen.errors.renamed import RenamedMembers
from lumen.internals.tensors import list_persistent_buffers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
RankInvariant = Literal["gradient norm", "sum of the parameters' norms"]
NORM_TOLERANCE = 1e-5  # relative difference allowed between norms of equal numbers on different kinds of devices
_REDUCTIONS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}  # gloo has no mean


#: New names of members, by the names of earlier versions.
_RENAMED = {
    "alike": "collect_rank_invariants",
    "communicates_in": "has_collectives_in",
    "gather": "all_gather",
    "zero_loss": "make_zero_loss",
}


class Strategy(RenamedMembers, LightningAttributeErrors, ABC, renamed=_RENAMED):
    """Base class that places a task on devices and coordinates its processes in each step.

    No other code checks the type of the strategy. A subclass outside Lumen can be given to `Trainer(strategy=...)` and
    needs no registration. It has to define `setup`, `call` and `gradient_sync`. A subclass averages gradients over
    ranks, as torch's wrappers do: Lumen weights losses so that this average is the step's mean.
    """

    ATTRIBUTES = ATTRIBUTES_OF_STRATEGY
    #: The processes of the run, which also exchange plain data.
    processes: Processes = SINGLE_PROCESS
    #: The device of this process.
    device: torch.device = torch.device("cpu")
    #: The device mesh of the run; None without a process group.
    device_mesh: DeviceMesh | None = None
    #: The processes that read the same training batches, each for a part of every sequence; None without such parts.
    #: They have successive data ranks.
    context: Context | None = None
    #: True if the strategy can run on several processes: then the trainer sets `processes` and `device`.
    spans_processes: bool = False
    #: True if `setup` shards parameters, and can do so while the parameters are on the meta device.
    shards: bool = False
    #: True if gradients are summed over data ranks in the order of micro-batches, not averaged. `Trainer` sets it for
    #: `reduction="exact"`. None: the strategy does not support that.
    is_exact: bool | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set an attribute that a run never reads.

        Raises:
            ConfigError: The name is an attribute of Lightning's strategies only.
        """
        if name in INSTEAD_OF_SETTING:
            raise ConfigError(f"{type(self).__name__}.{name} cannot be set. {INSTEAD_OF_SETTING[name]}")
        super().__setattr__(name, value)

    @property
    def data_rank(self) -> int:
        """Number of the part of every step's data that this process reads, from 0.

        Processes with equal data ranks read the same batches and compute one gradient together, as in tensor
        parallelism. Gradients are averaged over data ranks. Metrics, predictions and weights count each data rank once.
        """
        return self.processes.rank

    @property
    def data_world_size(self) -> int:
        """Number of parts into which every step's data is divided; the number of processes is a multiple of it."""
        return self.processes.world_size

    @property
    def root_device(self) -> torch.device:
        """Same as `device`, under Lightning's name."""
        return self.device

    @property
    def parameter_device(self) -> torch.device:
        """Device of the parameters between steps."""
        return self.device

    @property
    def numerics(self) -> dict[str, str | bool | None]:
        """Settings of the strategy that change the computed values and differ from the default, by name."""
        return {}

    def connect(self) -> None:
        """Open the process groups, unless they are open. Collective: every rank must call this, before `setup`."""

    @abstractmethod
    def setup(self, task: nn.Module) -> None:
        """Place the task's parameters and buffers. Collective: every rank must call this, before optimizers exist."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot train parameters placed by this strategy.

        Raises:
            ConfigError: The optimizer cannot train the parameters; the message names an alternative.
        """

    def has_collectives_in(self, part: Literal["forward", "backward", "evaluation"]) -> bool:
        """Return True if ranks wait for each other there, so that no rank may skip the part. Known after `setup`.

        Args:
            part: The part of a step. "forward": a forward of training; if True, a rank without a batch runs a batch of
                another rank. "backward": the backward of a step's last micro-batch. "evaluation": a forward of an
                evaluation.
        """
        return part == "backward" and self.processes.world_size > 1

    @abstractmethod
    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task (`"training_step"`, ...) through the wrapper of this strategy."""

    def begin_step(self) -> None:
        """Prepare for the first forward of an optimizer step. Collective: every rank must call this."""

    @abstractmethod
    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context for a micro-batch's forward and backward.

        Ranks communicate gradients only in the last backward of a step; with exact sums in each.
        """

    def make_zero_loss(self) -> torch.Tensor | None:
        """Return a loss of 0 whose backward takes part in the gradient collectives of the other ranks.

        A rank without its own loss runs this backward.

        Returns:
            A scalar; None if only a forward with a real batch can take part. The base class returns a scalar that
            depends on no parameter, for a backward without communication.
        """
        return torch.zeros((), device=self.device, requires_grad=True)

    def after_backward(self) -> None:
        """Check that all gradients have arrived, after the backward that communicates."""

    def collect_rank_invariants(self, grad_norm: torch.Tensor | None) -> dict[RankInvariant, torch.Tensor]:
        """Return the numbers that must be equal on all ranks after an update; the base class returns no numbers.

        Args:
            grad_norm: The norm of the gradients before clipping; None without clipping.

        Returns:
            Scalars on any device. Each scalar exists on all ranks, or on no rank.
        """
        return {}

    def evaluation(self, *, inference_mode: bool) -> AbstractContextManager[Any]:
        """Return the context of an evaluation, which has no backward; `torch.no_grad` is already active.

        Args:
            inference_mode: True to enter `torch.inference_mode` too; False if parameters are sharded. A strategy that
                calls `fully_shard` reshards all modules at the end, because torch keeps the root gathered after a
                forward without a backward.
        """
        return torch.inference_mode() if inference_mode else torch.no_grad()

    def teardown(self) -> None:
        """Undo `setup`."""

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        self.processes.for_user().barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return rank `source`'s value of plain data on every rank. Collective: every rank must call this.

        With several processes, tensors arrive on the CPU.
        """
        return self.processes.for_user().broadcast(self._as_portable(value), source)

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. Collective: every rank must call this.

        The values are plain data. With several processes, tensors arrive on the CPU.
        """
        return self.processes.for_user().all_gather(self._as_portable(value))

    def _as_portable(self, value: T) -> T:
        """Return a value with its tensors on the CPU.

        A tensor pickled on an accelerator is unpickled on the accelerator with the same number.
        """
        if self.processes.world_size == 1 or self.device.type == "cpu":
            return value
        return move_batch(value, torch.device("cpu"))  # type: ignore[no-any-return]

    def reduce(
        self, tensor: torch.Tensor, group: None = None, reduce_op: str = "mean", dst: int | None = None
    ) -> torch.Tensor:
        """Return a tensor reduced over ranks, element by element. Collective: every rank must call this.

        Args:
            tensor: The tensor on this process's device, with equal shape and dtype on all ranks.
            group: Not supported: all processes take part.
            reduce_op: "mean", "sum", "max", "min" or "prod"; equal on all ranks.
            dst: The rank that receives the result, equal on all ranks; other ranks get back their own tensor. None
                sends the result to every rank.

        Raises:
            ConfigError: The operation or the rank does not exist, or `group` was given.
        """
        if group is not None:
            raise ConfigError(
                f"reduce: all processes take part, but group={group!r} was given. Name the operation, as in "
                "reduce(tensor, reduce_op='max'). For a group call torch.distributed.all_reduce."
            )
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


def count_training_parts(strategy: Strategy) -> int:
    """Return the number of parts into which training batches are divided: processes of a context share them."""
    return strategy.data_world_size // (1 if strategy.context is None else strategy.context.size)


def set_reduction(strategy: Strategy, reduction: str | None) -> None:
    """Set `is_exact` of a strategy.

    Args:
        strategy: The strategy of a trainer.
        reduction: The argument of the trainer.

    Raises:
        ConfigError: The strategy does not support exact sums, or has a setting that rounds.
    """
    kind = type(strategy).__name__
    if strategy.is_exact is not None:
        strategy.is_exact = reduction is not None
    elif reduction is not None:
        raise make_exact_error(f"{kind}. Use strategy: single, ddp or fsdp")
    settings = [name for name, value in strategy.numerics.items() if value is not None] if strategy.is_exact else []
    if settings:
        raise make_exact_error(f"{settings[0]} of {kind}. Remove it")


def make_exact_error(reason: str) -> ConfigError:
    """Return the error for a part of a run that cannot be exact, with what to do instead."""
    return ConfigError(f"reduction: exact does not support {reason}, or remove reduction.")


def gather_from_data_ranks(strategy: Strategy, value: T) -> list[T]:
    """Return the value of each data rank's first process, over Lumen's own group. Collective."""
    return select_by_data_rank(strategy.processes.all_gather((strategy.data_rank, strategy._as_portable(value))))


def select_by_data_rank(values: Sequence[tuple[int, T]]) -> list[T]:
    """Return one value per data rank, in the order of data ranks.

    Args:
        values: The data rank and the value of each process.
    """
    first = dict(reversed(values))
    return [first[rank] for rank in sorted(first)]


def check_data_ranks(strategy: Strategy) -> None:
    """Refuse data ranks that do not divide the data evenly among the processes. Collective: every rank must call this.

    Raises:
        ConfigError: A data rank is missing, or has more processes than a different data rank. Raised on every rank.
    """
    found, world = strategy.processes.all_gather(strategy.data_rank), strategy.data_world_size
    if sorted(found) != sorted([*range(world)] * (len(found) // world)):
        raise ConfigError(
            f"{type(strategy).__name__}: data_world_size is {world}, and the data ranks of the {len(found)} processes "
            f"are {found}. data_rank must return each of 0 to {world - 1} on the same number of processes."
        )


def sync_buffers(strategy: Strategy, task: nn.Module) -> None:
    """Set the persistent buffers of a task to rank 0's values. Collective: every rank must call this.

    Each rank updates buffers such as BatchNorm's statistics from its own batches, but an evaluation uses one model.
    """
    if strategy.processes.world_size == 1:
        return
    buffers = [buffer for buffer in list_persistent_buffers(task) if buffer.device.type == strategy.device.type]
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        same_dtype = [buffer for buffer in buffers if buffer.dtype == dtype]
        joined = torch.cat([buffer.reshape(-1) for buffer in same_dtype])
        sizes = [buffer.numel() for buffer in same_dtype]
        with strategy.processes.count_wait():
            torch.distributed.broadcast(joined, 0)
        with torch.no_grad():
            split = torch.split(joined, sizes)
            fill_tensors(same_dtype, [values.view_as(buffer) for buffer, values in zip(same_dtype, split, strict=True)])
