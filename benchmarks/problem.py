"""One case as every system gets it: model, data, optimizer, loss, and the places where the clocks are read."""

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
    """A data set as users write them, one sample at a time."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@final
class DrawingSamples(Samples):
    """One that draws, as data do that are augmented, and gives the same samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random.random()
        return self.inputs[index], self.targets[index]


@final
class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A data set that is read from its beginning."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs, self.targets, strict=True)


@final
class Problem:
    """What is trained or evaluated.

    The clocks are read with the loss, which every system calls once per batch: at the same batches for all of them, so
    that everything between two steps is measured and nothing of what comes before the first one. The turns
    of an epoch are its end too.

    Attributes:
        case: What to do.
        system: Who does it.
        model: Not yet on a device, nor compiled.
        directory: An empty one for what is written.
        steps: Optimizer steps to make.
        take_turns: Called between two turns; returns when it is this process's turn.
        cpu_s: CPU seconds of a batch in each turn after the first epoch, those of workers too.
        wall_s: Its wall seconds.
        calls: Batches so far.
        first_s: CPU seconds of the process when the first step was done.
        final_loss: Of the last batch.
        result: Of an evaluation.
        profile: Switched on for the epoch, where it is looked into.
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
        self._begins: list[float] = []  # of each step, and its end: where a save is looked for
        self._ends: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, a scalar."""
        return self.loss_and_logits(model, batch)[0]

    def loss_and_logits(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss, and what the model says, of shape `(samples or tokens, classes)`. Reads the clocks."""
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
        """What the user has chosen."""
        optimizer = torch.optim.AdamW(parameters, lr=self.case.lr, **({"fused": True} if self._fused else {}))
        if self.case.save_every:
            optimizer.register_step_post_hook(lambda *_: self._ends.append(time.perf_counter()))
        return optimizer

    def optimizers(self, parameters: Any) -> list[torch.optim.Optimizer]:
        """As many as the case has, each of some of the parameters."""
        given, number = list(parameters), self.case.optimizers
        return [self.optimizer(given[place::number]) for place in range(number)]

    def loader(self, *, shards: bool = True) -> DataLoader[Any]:
        """The batches in their order.

        Args:
            shards: Whether each process gets every `ranks`-th batch, else the system does that.
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
        """The loaders of an evaluation: the batches in their order, in equal parts."""
        case = self.case
        tensors = make_tensors(case.model, case.batch_size * case.batches)
        parts = zip(*(tensor.chunk(case.loaders) for tensor in tensors), strict=True)
        return [DataLoader(self._data(*part), case.batch_size, shuffle=False) for part in parts]

    def end_epoch(self) -> None:
        """Read the clocks where no loss is computed: after each epoch."""
        self.calls += self.case.epoch
        self._mark()

    def save_costs(self) -> tuple[list[float], list[float]]:
        """What the first save cost the loop, if there was one, in seconds.

        Returns:
            The time from the end of the step before it to the begin of the next one; and this with what the steps up
            to the second save took longer than those before the first, both less what is usual.
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
        """Of all bits of all parameters; of shards nothing, since each process has others: the loss depends on all."""
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
            own_s = time.thread_time() - own_s  # all but this counts: threads may work while others have their turn
            self._begin = time.perf_counter(), cpu + own_s
            if self.profile is not None:
                self.profile.enable()


def _children_s() -> float:
    """CPU seconds of the processes that this one has started and that are alive."""
    pid = os.getpid()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) for child in children) / 1e9
