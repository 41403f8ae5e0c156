"""An exponential moving average of the parameters, which is evaluated, saved and exported in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from lumen.callbacks.base import Callback
from lumen.data.nested import fill
from lumen.distributed.dtensor import local_tensor
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked
from lumen.internals.tensors import lerp
from lumen.strategies import sync_buffers

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class EMA(Callback):
    """Keeps an exponential moving average of the parameters, and evaluates it.

    After an update `average = decay * average + (1 - decay) * parameter` (Polyak and Juditsky, Acceleration of
    Stochastic Approximation by Averaging, 1992, with exponential weights). It begins as the parameters are when
    training does. An update that fp16 or a callback has left out does not move it. Validations in `fit` are of the
    average, so monitors, the best checkpoint and early stopping are too; training goes on with the parameters. When
    `fit` is over, the task holds the average.

    Checkpoints hold both: a resumed run goes on exactly, under any strategy; `lumen export RUN --average EMA` writes
    the average, and `load_from_checkpoint(path, average="EMA")` builds the task with it. Under FSDP each process keeps
    the average of its shards.

    Args:
        decay: Share of the average that is kept, in [0, 1).
        update_every_n_steps: Steps between two updates of the average, at least 1.
        update_starting_at_step: Until this step is done the average follows the parameters; None: from the first on.
        update_starting_at_epoch: The same, counted in epochs; None: from the first on.
        warmup: The first decays are smaller: `(1 + n) / (10 + n)` in the n-th update of the average, if that is less.
        use_buffers: Average floating-point buffers too, such as the statistics of BatchNorm; others are copied. False:
            the average has the buffers of the model.

    Raises:
        ConfigError: A value is out of range.
    """

    stops_at_steps = False

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "device": "Leave it out: the average lies where the parameters do, under FSDP in shards.",
        "avg_fn": "Leave it out: decay and warmup say how; another average is a callback of your own.",
    }

    @checked
    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        warmup: bool = False,
        use_buffers: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, found {decay:g}.")
        at_least(1, update_every_n_steps=update_every_n_steps)
        self.decay, self.warmup, self.use_buffers = decay, warmup, use_buffers
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._average: dict[str, torch.Tensor] = {}
        self._seen = self._updates = 0  # the newest step that was looked at; how often the average has moved

    @property
    def average(self) -> Mapping[str, torch.Tensor]:
        """The averages, by name of parameter and buffer; under FSDP in shards."""
        return self._average

    def state_dict(self) -> dict[str, Any]:
        """The averages, and how often they have moved."""
        return {"average": self._average, "seen": self._seen, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        self._average, self._seen, self._updates = state["average"], state["seen"], state["updates"]

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Begin with the parameters as they are, or find those of the checkpoint on their devices."""
        found = self._of(task)
        if not self._average:
            self._average = {name: tensor.detach().clone() for name, tensor in found.items()}
            self._seen = trainer.global_step
            return
        if missing := found.keys() ^ self._average.keys():
            raise ConfigError(
                f"EMA: the averages of the checkpoint are not of this model: {', '.join(sorted(missing)[:8])}. Resume "
                "with the model and the use_buffers it was saved with."
            )
        self._average = {name: self._average[name].to(each.device, each.dtype) for name, each in found.items()}

    def _of(self, task: TaskModule) -> dict[str, torch.Tensor]:
        """What is averaged: parameters, and buffers that are saved."""
        found = dict[str, torch.Tensor](task.named_parameters())
        if self.use_buffers:
            saved = task.state_dict(keep_vars=True).keys()
            found |= {name: buffer for name, buffer in task.named_buffers() if name in saved}
        return found

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average after an update, unless a validation of this step has."""
        self._look(trainer, task)

    @torch.no_grad()
    def _look(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average if there was an update since it was looked at, and it is due."""
        if trainer.global_step == self._seen:
            return
        self._seen = step = trainer.global_step
        begins_at, epoch = self.update_starting_at_step or 0, self.update_starting_at_epoch or 0
        if step <= begins_at or trainer.current_epoch < epoch:
            self._move(task, 0.0)
        elif step % self.update_every_n_steps == 0:
            decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
            self._updates += 1
            self._move(task, decay)

    def _move(self, task: TaskModule, decay: float) -> None:
        averages, values, rest = [], [], []
        for name, tensor in self._of(task).items():
            if tensor.is_floating_point() or tensor.is_complex():
                averages.append(local_tensor(self._average[name]))
                values.append(local_tensor(tensor.detach()))
            else:
                rest.append((self._average[name], tensor))
        lerp(averages, values, 1.0 - decay)
        for average, tensor in rest:
            average.copy_(tensor)

    def around_validation(self, trainer: Trainer, task: TaskModule) -> AbstractContextManager[None]:
        """The average stands in the place of the parameters."""
        return self._swapped(trainer, task)

    @contextmanager
    def _swapped(self, trainer: Trainer, task: TaskModule) -> Iterator[None]:
        self._look(trainer, task)
        self._swap(task)
        try:
            sync_buffers(trainer.strategy, task)  # each rank has averaged its own
            yield
        finally:
            self._swap(task)

    @torch.no_grad()
    def _swap(self, task: TaskModule) -> None:
        """Exchange the averages with what they are of."""
        for name, tensor in self._of(task).items():
            before = tensor.detach().clone()
            fill(tensor, self._average[name])
            self._average[name].copy_(before)

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Leave the average in the task."""
        for name, tensor in self._of(task).items():
            fill(tensor, self._average[name])
        sync_buffers(trainer.strategy, task)
