"""Strategy: the base of what owns processes, placement and communication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.data.nested import fill_all, move
from lumen.distributed.processes import STARTUP_TIMEOUT_S, TIMEOUT_S, Processes
from lumen.internals.tensors import multiply, persistent_buffers
from lumen.strategies.all_gather import all_gather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_ALONE = Processes()
_NO_CONTEXT = nullcontext()


class Strategy(ABC):
    """On which devices a task lies, and how its processes communicate. The loop never asks which strategy it has.

    A subclass outside Lumen can be given to `Trainer(strategy=...)`; it needs no entry anywhere. Gradients are to be
    averaged over ranks, as torch's wrappers do: the loop weights losses so that this average is the step's mean.
    """

    #: The processes of the run.
    processes: Processes = _ALONE
    #: The device of this process.
    device: torch.device = torch.device("cpu")
    #: The device mesh of the run; None where there is no process group.
    device_mesh: DeviceMesh | None = None
    #: How long a rank waits for the others before that is an error, in seconds.
    timeout_s: float = TIMEOUT_S
    #: The same until the first step is done, while data is prepared and code compiled.
    startup_timeout_s: float = STARTUP_TIMEOUT_S
    #: It can run on several processes: then the trainer sets its `processes` and `device`.
    spans_processes: bool = False
    #: Forwards communicate: a rank that has no batch must run one of another rank's.
    needs_stand_ins: bool = False
    #: The same for forwards of an evaluation; known from `setup` on.
    evaluation_stands_in: bool = False
    #: `setup` shards parameters, and can do so while they are on the meta device.
    shards: bool = False

    @property
    def rank(self) -> int:
        """Process number in the run, 0 to world_size - 1."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Process number on its node."""
        return self.processes.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes that share the run."""
        return self.processes.world_size

    @property
    def is_global_zero(self) -> bool:
        """True in the one process that writes logs and talks to the user."""
        return self.rank == 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether logged values stay on the device, which computes them later: who reads one waits."""
        return self.device.type == "cuda"

    @property
    def communicates(self) -> bool:
        """Whether a backward needs its counterparts on the other ranks, so that none may leave one out."""
        return self.world_size > 1

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

    @abstractmethod
    def call(self, step: str, *args: Any) -> Any:
        """Run a step of the task (`"training_step"`, ...) through whatever wraps it."""

    def begin_step(self) -> None:
        """Called before the first forward of an optimizer step. Collective: every rank must call this."""

    @abstractmethod
    def gradient_sync(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch's forward and backward; ranks communicate gradients only in the last."""

    def idle_loss(self) -> torch.Tensor | None:
        """A loss of 0 whose backward does this rank's part in that of the others, when it has no loss of its own.

        Returns:
            A scalar; None if only a forward with a real batch can do that. Here: one on which nothing depends, for a
            backward that does not communicate.
        """
        return torch.zeros((), device=self.device, requires_grad=True)

    def begin_agreement(self, numbers: Sequence[float], news: bool) -> Callable[[], list[float] | None]:
        """Begin to sum numbers over the ranks beside the backward that communicates, which is to be the next thing.

        Collective: every rank must call this.

        Args:
            numbers: To sum, in float64.
            news: They are not what the other ranks expect them to be.

        Returns:
            To be called after that backward: the sums; None, if it can do without them, where no rank has news.
        """
        return self.processes.begin_sum(numbers)

    def carry_news(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose backward communicates, after `begin_agreement`; it may carry what that said to the others."""
        return loss

    def agree_in_next_step(self, numbers: Sequence[float]) -> list[float]:
        """Sum numbers with all ranks, of which some may go on: they find them in the agreement of their next step."""
        return self.processes.sum(numbers)

    def after_backward(self) -> None:
        """Called after the backward that communicates: check that all gradients have arrived."""

    def sync_buffers(self, task: nn.Module) -> None:
        """Set the persistent buffers to those of rank 0. Collective: every rank must call this.

        Each rank has updated buffers such as BatchNorm's statistics by its own batches, but one model is evaluated.
        """
        if self.world_size == 1:
            return
        buffers = [buffer for buffer in persistent_buffers(task) if buffer.device.type == self.device.type]
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            same = [buffer for buffer in buffers if buffer.dtype == dtype]
            joined = torch.cat([buffer.reshape(-1) for buffer in same])
            sizes = [buffer.numel() for buffer in same]
            torch.distributed.broadcast(joined, 0)
            with torch.no_grad():
                split = torch.split(joined, sizes)
                fill_all(same, [values.view_as(buffer) for buffer, values in zip(same, split, strict=True)])

    def evaluation(self) -> AbstractContextManager[Any]:
        """The context of an evaluation, in which there is no backward."""
        return _NO_CONTEXT

    @property
    def inference_mode(self) -> bool:
        """Whether the task can run under `torch.inference_mode`."""
        return True

    def correct_gradients(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        """Multiply all gradients by a factor, when the weights of a step were known only after its backward."""
        multiply([p.grad for p in parameters if p.grad is not None], factor)  # of sparse ones torch multiplies the rows

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip the gradients by their norm over all parameters and ranks.

        Returns:
            The norm before clipping: a scalar tensor on the device.
        """
        parameters = list(parameters)
        try:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        except NotImplementedError:  # some are sparse
            return nn.utils.clip_grad_norm_(_with_rows(parameters), max_norm)

    def clip_grad_value(self, parameters: Iterable[nn.Parameter], max_value: float) -> None:
        """Clamp every gradient element to [-max_value, max_value], as `torch.nn.utils.clip_grad_value_` does."""
        parameters = list(parameters)
        try:
            nn.utils.clip_grad_value_(parameters, max_value)
        except NotImplementedError:  # some are sparse, and others may be clamped by now
            nn.utils.clip_grad_value_(_with_rows(parameters), max_value)

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        self.processes.barrier()

    def broadcast(self, value: T, source: int = 0) -> T:
        """Rank `source`'s value of plain data, on every rank. Collective: every rank must call this.

        With several processes tensors arrive on the CPU.
        """
        return self.processes.broadcast(self._portable(value), source)

    def gather(self, value: T) -> list[T]:
        """Every rank's value of plain data, in rank order, on every rank. Collective: every rank must call this.

        With several processes tensors arrive on the CPU.
        """
        return self.processes.gather(self._portable(value))

    def _portable(self, value: T) -> T:
        """A tensor on the CPU instead: pickled on an accelerator, it would be unpickled on one that has its number."""
        if self.world_size == 1 or self.device.type == "cpu":
            return value
        return move(value, torch.device("cpu"))  # type: ignore[no-any-return]

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a tensor, on every rank. Collective: every rank must call this."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def all_gather(self, data: Any, *, sync_grads: bool = False) -> Any:
        """See `TaskModule.all_gather`. Collective: every rank must call this."""
        return all_gather(self, data, sync_grads=sync_grads)

    def teardown(self) -> None:
        """Undo `setup`."""


def _with_rows(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters to clip; for one with a sparse gradient a stand-in whose gradient is its rows, each once."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            found.append(parameter)
            continue
        parameter.grad = parameter.grad.coalesce()
        rows = parameter.grad.values()
        found.append(torch.empty_like(rows))
        found[-1].grad = rows
    return found
