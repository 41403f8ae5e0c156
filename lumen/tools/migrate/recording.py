"""Record of the first steps of a training by Lightning or Lumen, whose results can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import optimizer as hooks

from lumen.data.nested import map_leaves
from lumen.random import seed_generators
from lumen.tools.proof.outcome import Event, EventWriter, get_loss, iterate_tensors
from lumen.tools.proof.recorder import digest_generators, iterate_state

_FILE = "given.safetensors"  # initial weights and batches of the training with Lightning
_VALIDATION_BATCHES = 10
_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class _TrainingOver(BaseException):
    """End of the training after the steps to compare. No handler of `Exception` catches it."""


@final
class StepObserver:
    """Observer of a training, by means of the interface that both libraries have.

    Each training step starts with generators of a known state. With Lumen, the first step receives the initial weights,
    and each step the batch, that the training with Lightning used.

    Args:
        make_trainer: The class `Trainer` of the library.
        trainer: The trainer of the training to record, before `fit`.
        task: The task or LightningModule.
        settings: The settings of `child.install`.

    Attributes:
        is_over: True after the last step to compare.
    """

    def __init__(self, make_trainer: Callable[..., Any], trainer: Any, task: Any, settings: Mapping[str, Any]) -> None:
        self._make_trainer, self._trainer, self._task = make_trainer, trainer, task
        self._last, self._folder = settings["steps"], Path(settings["folder"])
        self._is_first = settings["library"] == "Lightning"
        self._events: list[Event] = []
        self._writer = EventWriter(self._events)
        self._facts: dict[str, Any] = {"losses": [], "sizes": [], "given": [], "dtypes": {}, "settings": {}}
        self._facts |= {"epochs": 0, "validation": {}, "unvalidated": None}
        self._tensors = {} if self._is_first else load_file(self._folder / _FILE)
        self._step, self._micro, self._recorded, self._validated = 0, -1, -1, 0
        self._is_in_step = self.is_over = False
        for name, module in task.named_modules():
            module.register_forward_hook(partial(self._on_call, name or "task"), with_kwargs=True)
        for name, method in (("training_step", self._run_step), ("manual_backward", self._run_backward),
                             ("validation_step", self._run_validation_step)):  # fmt: skip
            setattr(task, name, wraps(getattr(task, name))(partial(method, getattr(task, name))))
        hooks.register_optimizer_step_pre_hook(self._on_update)
        hooks.register_optimizer_step_post_hook(self._on_updated)

    # ------------------------------------------------------------------ events

    def _add_event(self, kind: str, place: str, value: Any, micro: int = -1) -> None:
        self._writer.add(self._step, micro, kind, place, value)

    def _run_step(self, training_step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a training step with the batch of the first training, and record the step."""
        if self._step >= self._last:
            self.is_over = True
            raise _TrainingOver
        self._micro += 1
        if self._recorded != self._step:
            self._record_state()
        leaves = count()
        batch = map_leaves(batch, lambda leaf: self._exchange(f"{self._micro} {next(leaves)}", leaf, "batch"))
        self._add_event("batch", "", batch, self._micro)
        size = next((len(each) for _, each in iterate_tensors(batch) if each.ndim), 0)
        self._facts["sizes"].append((self._step, size))
        seed_generators(self._micro)
        self._is_in_step = True
        output = training_step(batch, *args, **kwargs)
        self._is_in_step = False
        self._add_event("random", "training_step", digest_generators(), self._micro)
        if self._task.automatic_optimization and (loss := get_loss(output)) is not None:
            self._record_loss(loss)
        return output

    def _run_backward(self, backward: Callable[..., Any], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._record_loss(loss)
        backward(loss, *args, **kwargs)

    def _record_loss(self, loss: torch.Tensor) -> None:
        self._facts["losses"].append((self._step, float(loss.detach())))
        self._add_event("loss", "", loss, self._micro)

    def _run_validation_step(self, validation_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seed_generators(self._validated)
        self._validated += 1
        return validation_step(*args, **kwargs)

    def _record_state(self) -> None:
        """Record all parameters and buffers before a step. The first step with Lumen receives the initial weights."""
        prefix = "" if self._recorded >= 0 else "initial "
        self._recorded = self._step
        for kind, name, tensor in iterate_state(self._task):
            if prefix and (kept := self._exchange(f"initial {name}", tensor, name)) is not tensor:
                tensor.data.copy_(kept)
            self._add_event(f"{prefix}{kind}", name, tensor)
        names = "precision", "accumulate_grad_batches", "gradient_clip_val"
        self._facts["settings"] = {name: str(getattr(self._trainer, name, None)) for name in names}

    def _exchange(self, name: str, tensor: Any, role: str) -> Any:
        """Keep a tensor, or return the tensor of the same shape that is kept from the training with Lightning."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self._is_first:
            self._tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        kept = self._tensors.get(name, tensor).to(tensor.device)
        if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype) or torch.equal(kept, tensor):
            return tensor
        self._facts["given"].append(role)
        return kept.clone()  # Tensors in a file may start at any byte, and kernels for such memory round differently.

    def _on_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_in_step:
            self._add_event("input", name, [args, kwargs], self._micro)
            self._add_event("output", name, output, self._micro)
            self._facts["dtypes"][name] = next((str(each.dtype) for _, each in iterate_tensors(output)), "")

    def _on_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record gradients and settings right before the update: now, or after the closure that computes gradients."""
        if self.is_over:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._record_gradients(optimizer)
            return None

        def evaluate() -> Any:
            loss = closure()
            self._record_gradients(optimizer)
            return loss

        return (args[0],), kwargs | {"closure": evaluate}

    def _record_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in self._task.named_parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in names:
                    self._add_event("gradient", names[parameter], parameter.grad)
            for name, value in group.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._add_event("setting", f"groups[{number}].{name}", torch.tensor(value, dtype=torch.float64))

    def _on_updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._step += not self.is_over

    # ------------------------------------------------------------------ the end

    def finish(self, given: Mapping[str, Any]) -> None:
        """Validate on the first batches, and write the batches and initial weights for the other training.

        Args:
            given: The arguments of `fit` by name.
        """
        self.is_over = True
        if self._is_first:
            self._facts["epochs"] = self._trainer.current_epoch
            save_file(self._tensors, self._folder / _FILE)
        data, loaders = given.get("datamodule"), given.get("val_dataloaders")
        if data is None and hasattr(given.get("train_dataloaders"), "train_dataloader"):
            data = given["train_dataloaders"]
        source = {"dataloaders": loaders} if loaders is not None else {} if data is None else {"datamodule": data}
        self._validated = 0
        try:
            device = next(self._task.parameters()).device
            trainer = self._make_trainer(
                **_QUIET, limit_val_batches=_VALIDATION_BATCHES, precision=self._trainer.precision, devices=1,
                accelerator="gpu" if device.type == "cuda" else device.type,
            )  # fmt: skip
            rows = trainer.validate(self._task, verbose=False, **source)
            self._facts["validation"] = {name: float(value) for row in rows for name, value in row.items()}
        except Exception as error:
            self._facts["unvalidated"] = f"{type(error).__name__}: {error}"

    def describe(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {"events": self._events, "facts": self._facts}
