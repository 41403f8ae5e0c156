"""How a batch reaches the task: through the user's transfer hooks, to a step with the arguments of its signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from lumen.data.nested import CopyStream, move
from lumen.precision import Precision
from lumen.run.loaders import Loaders
from lumen.strategies import Strategy
from lumen.task.data_module import DataModule
from lumen.task.hooks import fitted, overrides
from lumen.task.step_arguments import step_arguments
from lumen.task.task_module import TaskModule

_Pick = Callable[[tuple[Any, int, int]], tuple[Any, ...]]  # of (batch, batch_idx, dataloader_idx)


@final
class TaskCalls:
    """Brings batches to the device, and picks the arguments of the task's steps.

    Args:
        task: The steps are its own; its transfer hooks are used where the data module has none.
        datamodule: None: there is none.
        strategy: Knows the device.
        precision: May change the dtype of batches.
        replays_graphs: Compiled modules write what they return into the same memory for each batch.
    """

    def __init__(
        self,
        task: TaskModule,
        datamodule: DataModule | None,
        strategy: Strategy,
        precision: Precision,
        *,
        replays_graphs: bool,
    ) -> None:
        self._task = task
        self._device = strategy.device
        self._arguments = _step_arguments(task, {})
        self._hooks = _transfer_hooks(task, datamodule, strategy.device, precision.dtype, marks_steps=replays_graphs)

    def bind(self, loaders: Loaders) -> None:
        """Find out what the steps are called with, now that these loaders are open."""
        evaluates_several = len(loaders.evaluation) > 1 or any(adapter.in_turn for adapter in loaders.evaluation)
        several = dict.fromkeys(("validation_step", "test_step", "predict_step"), evaluates_several)
        several["training_step"] = loaders.train is not None and loaders.train.in_turn
        self._arguments = _step_arguments(self._task, several)

    def receive(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Bring a batch to the device through the user's transfer hooks."""
        for hook in self._hooks:
            batch = hook(batch, dataloader_idx)
        return batch

    def arguments(self, step: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Any, ...]:
        """What a step of the task is called with: those of the arguments that its signature has.

        Args:
            step: "training_step", "validation_step", "test_step" or "predict_step".
            batch: On the device.
            batch_idx: Its number in the epoch or evaluation.
            dataloader_idx: Number of its loader.
        """
        return self._arguments[step]((batch, batch_idx, dataloader_idx))

    def to_host(self, output: Any) -> Any:
        """What a step returned, to be kept: on an accelerator all of it would pile up, or be written over."""
        return output if self._device.type == "cpu" else move(output, torch.device("cpu"))


def _step_arguments(
    task: TaskModule, several: dict[str, bool]
) -> dict[str, Callable[[tuple[Any, int, int]], tuple[Any, ...]]]:
    """What picks the arguments of each step that the task has; `several`: by step, whether it has several loaders."""
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    return {
        step: step_arguments(function, several=several.get(step, False))
        for step in steps
        if (function := getattr(task, step)) is not None
    }


def _transfer_hooks(
    task: TaskModule,
    datamodule: DataModule | None,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    marks_steps: bool,
) -> list[Callable[[Any, int], Any]]:
    def owner(method: str) -> Any:
        return next((thing for thing in (datamodule, task) if thing and overrides(thing, method)), None)

    hooks: list[Callable[[Any, int], Any]] = []
    if (before := owner("on_before_batch_transfer")) is not None:
        hooks.append(fitted(before, "on_before_batch_transfer"))
    if (mover := owner("transfer_batch_to_device")) is not None:
        transfer = fitted(mover, "transfer_batch_to_device")
        hooks.append(lambda batch, index: transfer(batch, device, index))
    elif device.type == "cuda":
        copies = CopyStream(device, dtype)
        hooks.append(lambda batch, index: copies.move(batch))
    elif device.type != "cpu" or dtype is not None:
        hooks.append(lambda batch, index: move(batch, device, dtype))
    if marks_steps:
        hooks.append(_mark_step)
    if (after := owner("on_after_batch_transfer")) is not None:
        hooks.append(fitted(after, "on_after_batch_transfer"))
    return hooks


def _mark_step(batch: Any, _: int) -> Any:
    """What compiled modules returned for the batch before may be written over from here on."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return batch
