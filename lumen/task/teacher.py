"""Teacher for self-supervised tasks: a module that follows another module by moving averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self, final

import torch
from torch import nn

from lumen.distributed.dtensor import get_local_tensor, is_sharded
from lumen.errors import ConfigError
from lumen.errors.arguments import check_at_least
from lumen.internals.tensors import copy_all, get_direct_buffers, get_direct_parameters, is_saved, lerp_all
from lumen.task.optimizer_hooks import OptimizerHooks

#: The dictionary that holds a tensor, and its key there. The tensor itself may change: a module may replace a buffer.
Place = tuple[dict[str, Any], str]


def find_places(module: nn.Module, *, buffers: bool, persistent: bool = False) -> dict[str, Place]:
    """Find the places of a module's parameters, by name; shared parameters appear once.

    Args:
        module: The module, with its submodules.
        buffers: Find buffers too.
        persistent: Omit buffers that are not saved in the state dictionary.
    """
    found: dict[str, Place] = {}
    seen = set[int]()
    for prefix, each in module.named_modules():
        path = prefix and f"{prefix}."
        for held in (get_direct_parameters(each), get_direct_buffers(each) if buffers else {}):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen and (not persistent or is_saved(each, name)):
                    seen.add(id(tensor))
                    found[path + name] = held, name
    return found


@final
class Averages:
    """Moving averages of parameters and of running statistics, and copies of other buffers.

    Args:
        averages: Averages by name, in the tensors' dtypes or in more precise ones.
        tensors: Tensors that the averages follow, by the same names.
    """

    def __init__(self, averages: Mapping[str, Place], tensors: Mapping[str, Place]) -> None:
        self._parameters: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._statistics: list[tuple[Place, Place]] = []
        self._copied: list[tuple[Place, Place]] = []
        self._is_plain = True  # True without shards and with equal dtypes
        for name, (held, key) in tensors.items():
            (average_holder, average_key), tensor = averages[name], held[key]
            self._is_plain &= average_holder[average_key].dtype == tensor.dtype and not is_sharded(tensor)
            if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
                self._parameters[0].append(average_holder[average_key])
                self._parameters[1].append(tensor)
            else:
                pairs = self._statistics if is_running_statistic(name, tensor) else self._copied
                pairs.append((averages[name], (held, key)))

    @torch.no_grad()
    def update_averages(self, decay: float) -> None:
        """Move each average by `average = decay * average + (1 - decay) * tensor`; copy the other buffers."""
        statistics, copied = _split_pairs(self._statistics), _split_pairs(self._copied)
        averages, targets = self._parameters[0] + statistics[0], self._parameters[1] + statistics[1]
        if not self._is_plain:
            averages = [get_local_tensor(each) for each in averages]
            targets = [
                get_local_tensor(each).to(average.dtype) for each, average in zip(targets, averages, strict=True)
            ]
        if averages:
            lerp_all(averages, targets, 1.0 - decay)
        if self._copied:
            copy_all(*([get_local_tensor(each) for each in tensors] for tensors in copied))


def _split_pairs(pairs: list[tuple[Place, Place]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [held[key] for (held, key), _ in pairs], [held[key] for _, (held, key) in pairs]


def is_running_statistic(name: str, buffer: torch.Tensor) -> bool:
    """Return True if moving averages apply to a buffer; a mean of power-iteration vectors or queues has no meaning."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()


@final
class Teacher(nn.Module):
    """Copy of a module whose parameters are an exponential moving average of the module's parameters.

    Set `self.teacher = lumen.Teacher(self.student, decay=0.996)` in `__init__` or `configure_model`. After each update
    in `fit`, Lumen sets `parameter = decay * parameter + (1 - decay) * parameter of the student`. Updates that fp16 or
    a callback skips do not move the teacher, nor do single micro-batches. Call it like the student; its outputs have no
    gradients (Mean Teacher, Tarvainen and Valpola 2017; MoCo, He et al. 2019; BYOL, Grill et al. 2020; DINO, Caron et
    al. 2021).

    No optimizer trains its parameters. Checkpoints save them under the name `module`, and the student only once. Under
    FSDP they are sharded like the student's.

    Args:
        student: A module of the task, in its present state; it must stay a part of the task.
        decay: Fraction of the teacher to keep, in [0, 1]; or a function that maps the number of steps that the run has
            completed before to the fraction, such as `lambda step: min(1 - 1 / (step + 1), 0.999)`.
        final_decay: Value that the fraction reaches from `decay` by half a cosine over the run's steps, as in BYOL with
            1.0: `final_decay - (final_decay - decay) * (cos(pi * step / steps) + 1) / 2`. None: the fraction stays
            constant.
        steps: Length of this half cosine. Default: the run's steps, by `max_steps` or `max_epochs`.
        eval_mode: Keep the teacher in eval mode. Default: the teacher has the task's mode; in training BatchNorm then
            normalizes by its own batches and dropout drops, as in the papers.
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`, and copy all other
            buffers. Default: True with `eval_mode`; otherwise the teacher has separate buffers.

    Attributes:
        module: The copy of the student.

    Raises:
        ConfigError: An argument is out of range, or the module cannot be copied.
    """

    def __init__(
        self,
        student: nn.Module,
        decay: float | Callable[[int], float] = 0.996,
        final_decay: float | None = None,
        *,
        steps: int | None = None,
        eval_mode: bool = False,
        use_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(student, nn.Module) or isinstance(student, OptimizerHooks):
            raise ConfigError(
                f"Teacher: expected a module of the task, such as self.backbone, found {type(student).__name__}."
            )
        check_at_least(1, steps=steps)
        if not callable(decay):
            _get_share(decay)
        elif final_decay is not None:
            raise ConfigError("Teacher: final_decay has no effect if decay is a function. Leave final_decay out.")
        if final_decay is not None:
            _get_share(final_decay)
        if steps is not None and final_decay is None:
            raise ConfigError(f"Teacher: steps={steps} needs final_decay. Set final_decay too.")
        try:
            self.module = deepcopy(student)
        except RuntimeError as error:
            raise ConfigError(
                f"Teacher: {type(student).__name__} cannot be copied: {error} Create the teacher before the first "
                "forward, and use torch.nn.utils.parametrizations instead of functions such as "
                "torch.nn.utils.weight_norm."
            ) from error
        self.requires_grad_(False)
        self.decay, self.final_decay, self.steps = decay, final_decay, steps
        self.eval_mode = eval_mode
        self.use_buffers = eval_mode if use_buffers is None else use_buffers
        self._student = (student,)  # in a tuple, so that it is not a submodule and is not saved twice
        self._steps = steps
        self._averages: Averages | None = None  # resolved at the first update of a run
        self.train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; with `eval_mode` the teacher stays in eval mode."""
        return super().train(mode and not self.eval_mode)

    def extra_repr(self) -> str:
        """Return the text for `repr`."""
        return f"decay={self.decay}" + ("" if self.final_decay is None else f", final_decay={self.final_decay}")

    # ------------------------------------------------------------------ following

    def begin(self, task: nn.Module, run_steps: Callable[[], int]) -> None:
        """Prepare for a run.

        Args:
            task: The task of the run, of which the student is a part.
            run_steps: Function that returns the optimizer steps of the whole run.

        Raises:
            ConfigError: The student is not a part of the task, the parameters are in bfloat16, or the length of the run
                is needed and unknown.
        """
        (student,), self._averages = self._student, None
        known = set(task.modules())
        if student not in known:
            raise ConfigError(
                f"Teacher: the student, a {type(student).__name__}, is not a module of {type(task).__name__}. Set "
                "the student as an attribute of the task, and create the teacher from this attribute."
            )
        if self.decay not in (0.0, 1.0) and torch.bfloat16 in {each.dtype for each in self.module.parameters()}:
            raise ConfigError(
                "Teacher: its parameters are torch.bfloat16, which rounds small updates to zero, so the teacher "
                'does not follow the student. Train with precision="bf16", which keeps parameters in float32.'
            )
        if self.final_decay is not None and self.steps is None:
            try:
                self._steps = run_steps()
            except ConfigError as error:
                raise ConfigError(
                    "Teacher: final_decay needs the number of steps of the run, which is unknown. Set max_steps, or "
                    "steps of the teacher."
                ) from error

    def decay_at(self, step: int) -> float:
        """Return the decay of an update.

        Args:
            step: Number of steps that the run has completed before this update.

        Raises:
            ConfigError: The function `decay` returned a number outside of [0, 1].
        """
        if callable(self.decay):
            return _get_share(self.decay(step))
        if self.final_decay is None:
            return self.decay
        done = min(1.0, step / (self._steps or 1))
        return self.final_decay - (self.final_decay - self.decay) * (math.cos(math.pi * done) + 1.0) / 2.0

    def follow(self, step: int) -> None:
        """Move once towards the student, as a run does after each update.

        Args:
            step: Number of steps that the run has completed before this update.
        """
        if self._averages is None:
            modules = (self.module, *self._student)
            self._averages = Averages(*(find_places(each, buffers=self.use_buffers) for each in modules))
        self._averages.update_averages(self.decay_at(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Copy the student's present state, for example after loading other weights in `on_fit_start`."""
        (student,) = self._student
        copies, originals = ([*module.parameters(), *module.buffers()] for module in (self.module, student))
        for copied, original in zip(copies, originals, strict=True):
            get_local_tensor(copied).copy_(get_local_tensor(original))


def find_teachers(task: nn.Module) -> list[Teacher]:
    """Return the teachers in a task."""
    return [module for module in task.modules() if isinstance(module, Teacher)]


def name_students(task: nn.Module) -> dict[str, str]:
    """Return the name in a task of each teacher's copy, and the name of the copied module."""
    names = {module: name for name, module in task.named_modules()}
    pairs = ((names[each.module], names.get(*each._student)) for each in find_teachers(task))
    return {copied: student for copied, student in pairs if student is not None}


def _get_share(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"Teacher: a decay must be at least 0 and at most 1, found {decay:g}.")
    return decay
