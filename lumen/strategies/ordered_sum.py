"""Sum of gradients in the order of micro-batches, which is bitwise identical on any number of processes.

Process r of P has the micro-batches r, r + P, r + 2 P, ... of a step. After each backward, process i receives part i of
the gradients of all processes, and adds the parts to its sum in the order of ranks. So each element of the sum is
((0.0 + g0) + g1) + g2 + ..., as on one process, where autograd adds each gradient to `parameter.grad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist

from lumen.distributed.processes import Processes
from lumen.errors import TrainingError
from lumen.internals.process_groups import all_gather_flat


@final
class OrderedSum:
    """Sums of this process's parts of flat gradients, over the micro-batches of a step.

    Args:
        processes: The processes of the run, more than one.

    Attributes:
        is_last: True if the micro-batch in progress is the last one of the step.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.is_last = True
        self._sums: dict[Any, torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}  # memory for the parts of each bucket
        self._added: set[Any] = set()
        self._used: set[Any] = set()
        self._places: dict[Any, tuple[torch.Tensor, int]] = {}  # of used parameters in buckets
        self._waiting: list[tuple[Any, torch.Tensor, Any, torch.futures.Future[torch.Tensor]]] = []

    def begin_step(self) -> None:
        """Drop the sums of the step before."""
        self._sums.clear()
        self._used.clear()
        self._places.clear()

    def begin_micro_batch(self, *, last: bool) -> None:
        """Prepare for a forward and a backward."""
        self.is_last = last
        self._added.clear()
        self._waiting.clear()

    def note_used(self, parameter: torch.Tensor) -> None:
        """Note that some process has used a parameter in this step, so that it gets a gradient in any case."""
        self._used.add(parameter)

    def write_missing(self) -> None:
        """Write the sums of parameters that some process has used in the step, but none in its last micro-batch."""
        for parameter, (flat, offset) in self._places.items():
            if parameter.grad is None:  # torch's wrapper writes the gradients of all other parameters
                gradient = torch.empty_like(parameter)
                parameter.grad = gradient.copy_(flat.as_strided(gradient.shape, gradient.stride(), offset))
        self._places.clear()

    def send(
        self, flat: torch.Tensor, sizes: Sequence[int], memory: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Begin to send each process its part of a gradient. Collective: every rank must call this.

        Args:
            flat: The parts in the order of ranks, one after the other.
            sizes: Number of elements of each part.
            memory: A tensor for the received parts, if its size and dtype are right; else new memory is used.

        Returns:
            The parts that this process receives, of shape (processes, size), and the work to wait for.
        """
        own = sizes[self._processes.rank]
        if memory is None or memory.shape != (len(sizes), own) or memory.dtype != flat.dtype:
            memory = flat.new_empty(len(sizes), own)
        work = dist.all_to_all_single(
            memory.view(-1), flat, [own] * len(sizes), list(sizes), group=self._processes.gradient_group, async_op=True
        )
        return memory, work

    def add(self, key: Any, received: torch.Tensor, work: Any) -> torch.Tensor:
        """Wait for the parts, add them in the order of ranks to the sum of `key`, and return the sum.

        Raises:
            TrainingError: The parts of this micro-batch were added before.
        """
        if key in self._added:
            raise TrainingError(
                "reduction: exact: FSDP sums the gradients of a unit twice in one backward, because training_step "
                "calls the unit twice. Choose other units with wrap, so that each unit is called once."
            )
        self._added.add(key)
        work.wait()
        total = self._sums.pop(key, None)
        if total is None:
            total, received = received[0] + 0.0, received[1:]  # so that no sum is -0.0
        for part in received:
            total.add_(part)
        if not self.is_last:
            self._sums[key] = total
        return total

    def sum_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket of `DistributedDataParallel`: the communication hook.

        The parts are sent while the backward computes further buckets. All are added once the last bucket is sent, in
        the order of buckets, because the gathers must have the same order on all processes.
        """
        flat = bucket.buffer()
        devices = [flat.device] if flat.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        memory, sizes = self._received.get(bucket.index()), _cut(flat.numel(), self._processes.world_size)
        self._received[bucket.index()], work = self.send(flat, sizes, memory)
        if self.is_last and self._used:
            for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if parameter in self._used:
                    self._places[parameter] = flat, part.storage_offset()
        self._waiting.append((flat, self._received[bucket.index()], work, future))
        if bucket.is_last():
            self._finish_buckets()
        return future

    def _finish_buckets(self) -> None:
        """Add the parts of all buckets, in the order of buckets."""
        for number, (flat, received, work, future) in enumerate(self._waiting):
            total = self.add(number, received, work)
            if self.is_last:
                self._gather(total, flat)
            future.set_result(flat)
        self._waiting.clear()

    def _gather(self, total: torch.Tensor, flat: torch.Tensor) -> None:
        """Write the sums of all processes to `flat`. Collective: every rank must call this."""
        world, group = self._processes.world_size, self._processes.gradient_group
        size = -(-flat.numel() // world)
        if flat.numel() == size * world:
            all_gather_flat(flat, total, group=group)
            return
        gathered = flat.new_empty(size * world)
        all_gather_flat(gathered, torch.nn.functional.pad(total, (0, size - total.numel())), group=group)
        flat.copy_(gathered[: flat.numel()])


@final
class OrderedScatter:
    """Replacement of the reduce-scatter of one unit of `fully_shard`, which sums in the order of micro-batches.

    In the last micro-batch of a step, this process's shard of the sum is written; before, zeros, which `fully_shard`
    adds to the gradients. With several replicas, each one sums a part of the shard. `fully_shard` then adds the shards
    of the replicas, which are zero outside their parts.

    Args:
        sums: The sums of this process.
        replicas: Number of groups of processes that hold all parameters.
        rank: The rank of this process.
    """

    def __init__(self, sums: OrderedSum, replicas: int, rank: int) -> None:
        self._sums, self._replicas, self._rank = sums, replicas, rank

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **options: Any) -> None:
        """Sum the gradients of a unit. Collective: every rank must call this.

        Args:
            output_tensor: Memory for the shard of this process.
            input_tensor: The shards of this process's gradient, in the order of shards.
            **options: The process group and the operation, which have no effect.
        """
        shards, widths = input_tensor.numel() // output_tensor.numel(), _cut(output_tensor.numel(), self._replicas)
        # A process with rank r is process r % shards of replica r // shards.
        parts = torch.split(input_tensor.view(shards, -1), widths, dim=1)
        flat = input_tensor if self._replicas == 1 else torch.cat([part.reshape(-1) for part in parts])
        total = self._sums.add(self, *self._sums.send(flat, [width for width in widths for _ in range(shards)]))
        output_tensor.zero_()
        if self._sums.is_last:
            torch.split(output_tensor, widths)[self._rank // shards].copy_(total)


def _cut(count: int, parts: int) -> list[int]:
    """Return the sizes of parts of `count` elements: all equal, but for those at the end."""
    size = -(-count // parts)
    return [max(min(size, count - index * size), 0) for index in range(parts)]
