"""Averages of the parameters that a callback keeps: evaluated, saved and left in the task in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from lumen.callbacks.base import Callback
from lumen.data.nested import fill
from lumen.distributed.dtensor import local_tensor
from lumen.errors import ConfigError
from lumen.internals.tensors import lerp
from lumen.strategies import sync_buffers
from lumen.task.teacher import is_running_statistic

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


class ParameterAverage(Callback, ABC):
    """What averages of parameters have in common; a subclass says when the average begins and moves.

    Args:
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`; copy other buffers.
    """

    stops_at_steps = False

    def __init__(self, use_buffers: bool) -> None:
        self.use_buffers = use_buffers
        self._average: dict[str, torch.Tensor] = {}  # empty until it begins
        self._updates = 0  # how often it has moved
        self._parameters: dict[str, torch.Tensor] = {}  # while the average is in their place, if it is of another dtype
        self._is_swapped = False  # a validation holds the average in the place of the parameters

    @property
    def average(self) -> Mapping[str, torch.Tensor]:
        """The averages, by name of parameter and buffer; under FSDP in shards. Empty until there are any."""
        return self._average

    def _average_to_save(self) -> dict[str, torch.Tensor]:
        if self._is_swapped:
            raise ConfigError(
                f"save_checkpoint: a validation runs, in which {type(self).__name__} puts its average in the place of "
                "the parameters. Save in on_train_epoch_end or on_step_checkpoint, which follow the validation."
            )
        return self._average

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Forget the average of an earlier fit."""
        if stage == "fit":
            self.load_state_dict({"average": {}, "updates": 0, "seen": 0, "rates": []})

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Begin, or find the averages of the checkpoint on the devices of what they are of."""
        if not self._average:
            self._begin(trainer, task)
            return
        found = self._of(task)
        self._average = {name: self._average[name].to(each.device, _exact(each.dtype)) for name, each in found.items()}

    def _begin(self, trainer: Trainer, task: TaskModule) -> None:
        """A run begins anew."""

    @abstractmethod
    def _look(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average if it is due, before it is evaluated."""

    def _copy(self, task: TaskModule) -> None:
        """Begin with the parameters as they are."""
        self._average = {
            name: tensor.detach().to(_exact(tensor.dtype), copy=True) for name, tensor in self._of(task).items()
        }

    def _of(self, task: TaskModule) -> dict[str, torch.Tensor]:
        """What is averaged: parameters, and buffers that are saved."""
        found = dict[str, torch.Tensor](task.named_parameters())
        if self.use_buffers:
            saved = task.state_dict(keep_vars=True).keys()
            found |= {name: buffer for name, buffer in task.named_buffers() if name in saved}
        if self._average and (differing := found.keys() ^ self._average.keys()):
            raise ConfigError(
                f"{type(self).__name__}: the model and the average have different tensors: "
                f"{', '.join(sorted(differing)[:8])}. Resume with the model and the use_buffers it was saved with; add "
                "layers in configure_model, before the average begins."
            )
        return found

    @torch.no_grad()
    def _move(self, task: TaskModule, decay: float) -> None:
        averages, values, rest = [], [], []
        for name, tensor in self._of(task).items():
            averaged = tensor.is_floating_point() or tensor.is_complex()
            if averaged and (isinstance(tensor, torch.nn.Parameter) or is_running_statistic(name, tensor)):
                averages.append(local_tensor(self._average[name]))
                values.append(local_tensor(tensor.detach()).to(averages[-1].dtype))
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
        self._is_swapped = True
        try:
            if self._average:
                sync_buffers(trainer.strategy, task)  # each rank has averaged its own
            yield
        finally:
            self._swap(task)
            self._is_swapped = False

    @torch.no_grad()
    def _swap(self, task: TaskModule) -> None:
        """Exchange the averages, if there are any, with what they are of."""
        for name, tensor in self._of(task).items() if self._average else ():
            average, before = self._average[name], tensor.detach().clone()
            fill(tensor, self._parameters.pop(name, average))
            if average.dtype == before.dtype:
                average.copy_(before)
            elif not self._is_swapped:
                self._parameters[name] = before  # the average has digits that the tensor cannot hold

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Leave the average in the task, if there is one."""
        if not self._average:
            return
        for name, tensor in self._of(task).items():
            fill(tensor, self._average[name])
        sync_buffers(trainer.strategy, task)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average: float32 for parameters whose dtype would round small moves away."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
