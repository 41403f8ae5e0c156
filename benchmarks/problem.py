"""Model, data, optimizer and loss of a case, equal for every system, and the clock readings."""

from __future__ import annotations

import cProfile
import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from benchmarks.cases import Case
from benchmarks.gaps import Gaps
from benchmarks.models import make_model, make_tensors

EMA_DECAY = 0.999


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Dataset as users write it, one sample at a time."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@final
class DrawingSamples(Samples):
    """Dataset that draws random numbers, as augmentations do, but returns the same samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random.random()
        return self.inputs[index], self.targets[index]


@final
class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Iterable dataset."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs, self.targets, strict=True)


@final
class Problem:
    """Training or evaluation to measure.

    The clocks are read in the loss function, which every system calls once per batch, at the same batches. So
    everything between two steps is measured, and nothing before the first step.

    Attributes:
        case: The case.
        system: Name of the system.
        model: The model, not yet on a device and not compiled.
        directory: An empty directory for output.
        steps: Number of optimizer steps to make.
        take_turns: Function that is called between two turns, and returns at this process's turn.
        cpu_s: CPU seconds per batch in each turn after the first epoch, including workers.
        wall_s: Wall seconds per batch in each turn.
        calls: Number of batches so far.
        first_s: CPU seconds of the process at the end of the first step.
        final_loss: Loss of the last batch.
        result: Result of an evaluation.
        profile: Profile of the measured epoch, or None.
    """

    def __init__(self, case: Case, system: str, directory: Path):
        self.case, self.directory = case, directory
        self.system = system
        self.model = make_model(case.model)
        self.steps = case.batches // case.accumulate
        self.take_turns: Callable[[], object] = lambda: None
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        self.first_s = 0.0
        self.final_loss: Tensor | None = None
        self.result: float | None = None
        self.profile: cProfile.Profile | Gaps | None = (
            cProfile.Profile() if case.measure == "calls" else Gaps(case.device) if case.measure == "gap_s" else None
        )
        self._begin: tuple[float, float] | None = None
        self._fused = case.fused == "yes" or (case.fused == "not by hand" and system not in ("hand", "again"))
        self._turn = case.epoch // case.turns
        self.calls = 0
        self._begins: list[float] = []  # start times of the steps; with the end times, these show the cost of a save
        self._ends: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch, a scalar."""
        return self.loss_and_logits(model, batch)[0]

    def loss_and_logits(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits of shape `(samples or tokens, classes)`, and read the clocks."""
        self.calls += 1
        if self.case.save_every:
            self._begins.append(time.perf_counter())
        if self.calls == 2:
            self.first_s = time.process_time()
        if self.calls % self._turn == 0:
            self._mark()
        logits = model(batch[0]).flatten(0, -2)
        loss = F.cross_entropy(logits, batch[1].flatten())
        if self.calls == self.case.batches:
            self.final_loss = loss.detach()
        return loss, logits

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the case."""
        optimizer = torch.optim.AdamW(parameters, lr=self.case.lr, **({"fused": True} if self._fused else {}))
        if self.case.save_every:
            optimizer.register_step_post_hook(lambda *_: self._ends.append(time.perf_counter()))
        return optimizer

    def optimizers(self, parameters: Any) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the case, each with a part of the parameters."""
        given, number = list(parameters), self.case.optimizers
        return [self.optimizer(given[place::number]) for place in range(number)]

    def loader(self, *, shards: bool = True) -> DataLoader[Any]:
        """Return the loader of the batches, in order.

        Args:
            shards: True to give each process every `ranks`-th batch, False if the system divides the batches.
        """
        case = self.case
        epochs = case.epochs + 1 if case.kind == "evaluate" else 1
        tensors = make_tensors(case.model, case.batch_size * case.epoch * case.ranks * epochs)
        data = self._data(*tensors)
        options: dict[str, Any] = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
        if case.device == "cuda":
            options["pin_memory"] = True
        if case.ranks > 1 and shards:
            batches = list(BatchSampler(SequentialSampler(data), case.batch_size, drop_last=False))
            return DataLoader(data, batch_sampler=batches[int(os.environ["RANK"]) :: case.ranks], **options)
        return DataLoader(data, case.batch_size, shuffle=False, **options)

    def _data(self, inputs: Tensor, targets: Tensor) -> Any:
        case = self.case
        kinds = {TensorDataset: case.tensors, DrawingSamples: case.draws, Stream: case.stream, Samples: True}
        return next(kind for kind, is_wanted in kinds.items() if is_wanted)(inputs, targets)

    def loaders(self) -> list[DataLoader[Any]]:
        """Return the loaders of an evaluation: the batches in order, in equal parts."""
        case = self.case
        tensors = make_tensors(case.model, case.batch_size * case.batches)
        parts = zip(*(tensor.chunk(case.loaders) for tensor in tensors), strict=True)
        return [DataLoader(self._data(*part), case.batch_size, shuffle=False) for part in parts]

    def end_epoch(self) -> None:
        """Read the clocks where no loss is computed: after each epoch."""
        self.calls += self.case.epoch
        self._mark()

    def save_costs(self) -> tuple[list[float], list[float]]:
        """Return the cost of the first save, if any, in seconds.

        Returns:
            The additional time between the steps around the save; and the same plus the slowdown of the steps up to
            the second save.
        """
        saved = self.case.save_every
        if not saved or len(self._ends) <= saved:
            return [], []
        waits = [begin - end for begin, end in zip(self._begins[1:], self._ends, strict=False)]
        works = [end - begin for begin, end in zip(self._begins, self._ends, strict=False)]
        usual_wait, usual_work = (statistics.median(times[3 : saved - 1]) for times in (waits, works))
        blocked = waits[saved - 1] - usual_wait
        slowed = sum(work - usual_work for work in works[saved : 2 * saved])
        return [blocked], [blocked + slowed]

    def digest(self) -> str:
        """Return a digest of all parameters, or "sharded", since processes have different shards."""
        if self.case.sharded:
            return "sharded"
        sha = hashlib.sha256()
        for parameter in self.model.parameters():
            sha.update(parameter.detach().cpu().numpy().tobytes())
        return sha.hexdigest()[:16]

    def _mark(self) -> None:
        if self.profile is not None:
            self.profile.disable()
        if self.case.device == "cuda":
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time() + (_children_s() if self.case.workers else 0.0)
        if self._begin is not None:
            self.wall_s.append((wall - self._begin[0]) / self._turn)
            self.cpu_s.append((cpu - self._begin[1]) / self._turn)
        elif self.calls < self.case.epoch:
            return
        if self.calls < self.case.batches:
            own_s = time.thread_time()
            self.take_turns()
            own_s = time.thread_time() - own_s  # The CPU time of waiting does not count; that of other threads does.
            self._begin = time.perf_counter(), cpu + own_s
            if self.profile is not None:
                self.profile.enable()


def _children_s() -> float:
    """Return the CPU seconds of the live child processes."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) for child in children) / 1e9
