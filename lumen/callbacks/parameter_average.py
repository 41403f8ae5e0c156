"""Averages of the parameters that a callback keeps: evaluated, saved and left in the task in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from lumen.callbacks.base import Callback
from lumen.console import logger as _log
from lumen.data.nested import fill
from lumen.errors import ConfigError
from lumen.strategies import sync_buffers
from lumen.task.averages import Averages, Place, places_of

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
        self._places: dict[str, Place] = {}  # of the parameters and buffers that the average follows
        self._averages = Averages({}, {})
        self._parameters: dict[str, torch.Tensor] = {}  # while the average is in their place, if it is of another dtype
        self._is_swapped = False  # a validation holds the average in the place of the parameters

    @property
    def average(self) -> Mapping[str, torch.Tensor]:
        """The averages, by name of parameter and buffer; under FSDP in shards. Empty until there are any."""
        return self._average

    @property
    def evaluated_state(self) -> str | None:
        """The averages, once there are any."""
        return "average" if self._average else None

    def _average_to_save(self) -> dict[str, torch.Tensor]:
        if self._is_swapped:
            raise ConfigError(
                f"save_checkpoint: a validation runs, in which {type(self).__name__} puts its average in the place of "
                "the parameters. Save in on_train_epoch_end or on_step_checkpoint, which follow the validation."
            )
        return self._average

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Forget the average of an earlier fit."""
        if stage != "fit":
            return
        kept = [type(each).__name__ for each in trainer.callbacks if isinstance(each, ParameterAverage)]
        if len(kept) > 1:
            raise ConfigError(
                f"callbacks: {' and '.join(kept)} each put an average in the place of the parameters, and validations "
                "and checkpoints have room for one. Keep one of them."
            )
        self.load_state_dict({"average": {}, "updates": 0, "seen": 0, "rates": []})

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Begin, or find the averages of the checkpoint on the devices of what they are of."""
        if self._average:
            self._find(task)
        else:
            self._begin(trainer, task)

    def on_train_epoch_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Find the parameters and buffers again, since hooks may have replaced some."""
        if self._average:
            self._find(task)

    def _begin(self, trainer: Trainer, task: TaskModule) -> None:
        """A run begins anew."""

    @abstractmethod
    def update(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average if it is due: before it is evaluated, and before the parameters change but by training."""

    def _copy(self, task: TaskModule) -> None:
        """Begin with the parameters as they are."""
        found = places_of(task, buffers=self.use_buffers, persistent=True)
        self._average = {
            name: held[key].detach().to(_exact(held[key].dtype), copy=True) for name, (held, key) in found.items()
        }
        self._find(task)

    def _find(self, task: TaskModule) -> None:
        """Find the places of all parameters, and of buffers that are saved."""
        self._places = places_of(task, buffers=self.use_buffers, persistent=True)
        if differing := self._places.keys() ^ self._average.keys():
            raise ConfigError(
                f"{type(self).__name__}: the model and the average have different tensors: "
                f"{', '.join(sorted(differing)[:8])}. Resume with the model and the use_buffers it was saved with; add "
                "layers in configure_model, before the average begins."
            )
        for name, tensor in self._tensors():
            self._average[name] = self._average[name].to(tensor.device, _exact(tensor.dtype))
        self._averages = Averages({name: (self._average, name) for name in self._average}, self._places)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers that the average follows, by name."""
        return ((name, held[key]) for name, (held, key) in self._places.items())

    def around_validation(self, trainer: Trainer, task: TaskModule) -> AbstractContextManager[None]:
        """The average stands in the place of the parameters."""
        return self._swapped(trainer, task)

    @contextmanager
    def _swapped(self, trainer: Trainer, task: TaskModule) -> Iterator[None]:
        self.update(trainer, task)
        if self._average:
            self._find(task)
        self._swap()
        self._is_swapped = True
        try:
            if self._average:
                sync_buffers(trainer.strategy, task)  # each rank has averaged its own
            yield
        finally:
            self._swap()
            self._is_swapped = False

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the averages, if there are any, with what they are of."""
        for name, tensor in self._tensors() if self._average else ():
            average, before = self._average[name], tensor.detach().clone()
            fill(tensor, self._parameters.pop(name, average))
            if average.dtype == before.dtype:
                average.copy_(before)
            elif not self._is_swapped:
                self._parameters[name] = before  # the average has digits that the tensor cannot hold

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Leave the average in the task, if there is one."""
        if not self._updates:
            _log.warning(
                "%s: the run ended before its average began, so the task keeps its parameters", type(self).__name__
            )
        if not self._average:
            return
        self._find(task)
        for name, tensor in self._tensors():
            fill(tensor, self._average[name])
        sync_buffers(trainer.strategy, task)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average: float32 for parameters whose dtype would round small moves away."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
