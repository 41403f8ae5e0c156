"""Train and eval modes of modules, and removal of inference tensors after evaluations."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lumen.console import logger as _log
from lumen.internals.attributes import replaced_attribute
from lumen.internals.tensors import get_direct_buffers, get_direct_parameters


@final
class SavedModes:
    """Train or eval mode of every module in a model, to be restored.

    Args:
        model: The outermost module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(name, module, module.training) for name, module in model.named_modules()]
        self._chosen: set[int] = set()

    @contextmanager
    def keep_choices(self) -> Iterator[None]:
        """Keep the modes that hooks set within the context, by `train`, `eval` or by hand, when modes are restored.

        Lumen records calls of `train` and `eval`, because during an evaluation `eval` changes no mode.
        """
        train, modes_at_start = nn.Module.train, [module.training for _, module, _ in self._before]

        def recorded_train(module: nn.Module, mode: bool = True) -> nn.Module:
            self._chosen.add(id(module))
            return train(module, mode)

        try:
            with replaced_attribute(nn.Module, "train", recorded_train):
                yield
        finally:
            for (_, module, _), mode in zip(self._before, modes_at_start, strict=True):
                if module.training != mode:
                    self._chosen.add(id(module))

    def hand_over_to(self, hook: Callable[[], None]) -> None:
        """Let a hook set the modes after the evaluation, and restore no mode."""
        hook()
        self._chosen.update(id(module) for _, module, _ in self._before)

    def restore(self) -> None:
        """Restore each module's mode, unless a hook has set the mode meanwhile."""
        for _, module, training in self._before:
            if id(module) not in self._chosen:
                module.training = training
        left_in_eval = [(name, module) for name, module, training in self._before if training and not module.training]
        if names := [name for name, module in left_in_eval if _is_trained(module)]:
            _log.warning(
                "modules stay in eval mode, in training too: %s. A hook at the end of the evaluation called eval(), "
                "or on_*_model_train left these modules in eval mode. Evaluations run in eval mode anyway: remove "
                "the call if training needs train mode.",
                _format_names(names),
            )

    def warn_if_left_in_eval(self, built: Collection[str]) -> None:
        """Warn of trained modules in eval mode, unless a hook or an overridden `train` chose this mode.

        Args:
            built: Names of the modules that were in eval mode before the first hook of training.
        """
        if names := list(self._iterate_left_in_eval(self._before[0][1], "", built)):
            first = "self" + re.sub(r"\.(\d+)", r"[\1]", f".{names[0]}" if names[0] else "")
            _log.warning(
                "modules are trained in eval mode, without dropout and with BatchNorm's running statistics: %s. fit "
"keeps the mode that a module has, and from_pretrained returns models in eval mode. Write "
"%s.train() in on_train_start, or %s.eval() there if eval mode is intended.",
                _format_names(names), first, first,
            )  # fmt: skip

    def _iterate_left_in_eval(self, module: nn.Module, name: str, built: Collection[str]) -> Iterator[str]:
        """Yield the names of the outermost modules in eval mode that no hook has put there."""
        if not module.training:
            if name in built and id(module) not in self._chosen and _is_trained(module):
                yield name
        elif type(module).train is nn.Module.train:  # an overridden `train` decides about the modules below
            for child_name, child in module.named_children():
                if type(child).train is nn.Module.train:
                    yield from self._iterate_left_in_eval(child, f"{name}.{child_name}" if name else child_name, built)


def _format_names(names: list[str]) -> str:
    labels = [name or "the task" for name in names]
    return ", ".join(labels[:8]) + (f", and {len(labels) - 8} more" if len(labels) > 8 else "")


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@contextmanager
def avoid_inference_tensors(task: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Replace the inference tensors of a task and its optimizer at the end of the context.

    Autograd and in-place updates refuse tensors made under `torch.inference_mode`. Parameters stay the same objects.
    Buffers, attributes of modules and entries of the optimizer's state are replaced by copies.

    Args:
        task: The task whose parameters, buffers and module attributes are replaced.
        optimizer: The optimizer whose state is replaced, or None.
    """
    try:
        yield
    finally:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps the tensor, because its id could be reused
        for module in task.modules():
            for parameter in get_direct_parameters(module).values():
                if parameter is not None and _is_inference(parameter):
                    parameter.data = parameter.data.clone()
            _replace_tensors(get_direct_buffers(module), copies)
            _replace_tensors(vars(module), copies)
        for state in optimizer.state.values() if optimizer is not None else ():
            if isinstance(state, dict):
                _replace_tensors(state, copies)


def make_trainable(task: nn.Module) -> None:
    """Replace the inference tensors of a task that was built in a hook of an evaluation, so that it can be trained.

    Parameters are new objects; shared parameters stay shared.
    """
    replacements: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    with avoid_inference_tensors(task, None):
        for module in task.modules():
            for name, parameter in get_direct_parameters(module).items():
                if parameter is not None and _is_inference(parameter):
                    if id(parameter) not in replacements:
                        replacement = nn.Parameter(parameter.data.clone(), requires_grad=parameter.requires_grad)
                        replacements[id(parameter)] = parameter, replacement
                    get_direct_parameters(module)[name] = replacements[id(parameter)][1]


def _is_inference(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()  # a lazy parameter raises an error


def _replace_tensors(holder: dict[str, Any], copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for key, value in holder.items():
        if isinstance(value, torch.Tensor) and _is_inference(value):
            if id(value) not in copies:
                copies[id(value)] = value, value.clone()
            holder[key] = copies[id(value)][1]
