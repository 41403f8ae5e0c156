"""A teacher for self-supervised tasks: a module that follows another one by moving averages of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Self, final

import torch
from torch import nn

from lumen.distributed.dtensor import is_sharded, local_tensor
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least
from lumen.internals.tensors import copy_all, is_saved, lerp, own_buffers, own_parameters
from lumen.task.optimizer_hooks import OptimizerHooks

#: The dictionary that holds a tensor, and its key there: a module may put another tensor in the place of a buffer.
Place = tuple[dict[str, Any], str]


def places_of(module: nn.Module, *, buffers: bool, persistent: bool = False) -> dict[str, Place]:
    """Find where a module holds its parameters, by name; shared ones once.

    Args:
        module: The module, with its submodules.
        buffers: Find buffers too.
        persistent: Of these, only buffers that are saved.
    """
    found: dict[str, Place] = {}
    seen = set[int]()
    for prefix, each in module.named_modules():
        path = prefix and f"{prefix}."
        for held in (own_parameters(each), own_buffers(each) if buffers else {}):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen and (not persistent or is_saved(each, name)):
                    seen.add(id(tensor))
                    found[path + name] = held, name
    return found


@final
class Averages:
    """Moving averages of parameters and of running statistics, and copies of other buffers.

    Args:
        averages: Averages by name, perhaps in a dtype with more digits.
        tensors: The tensors that they follow, by the same names.
    """

    def __init__(self, averages: Mapping[str, Place], tensors: Mapping[str, Place]) -> None:
        self._parameters: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._statistics: list[tuple[Place, Place]] = []
        self._copied: list[tuple[Place, Place]] = []
        self._is_plain = True  # no shards, no other dtypes
        for name, (held, key) in tensors.items():
            (own, own_key), tensor = averages[name], held[key]
            self._is_plain &= own[own_key].dtype == tensor.dtype and not is_sharded(tensor)
            if isinstance(tensor, nn.Parameter) and (tensor.is_floating_point() or tensor.is_complex()):
                self._parameters[0].append(own[own_key])
                self._parameters[1].append(tensor)
            else:
                pairs = self._statistics if is_running_statistic(name, tensor) else self._copied
                pairs.append((averages[name], (held, key)))

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """Move each average by `average = decay * average + (1 - decay) * tensor`; copy the other buffers."""
        statistics, copied = _tensors(self._statistics), _tensors(self._copied)
        own, others = self._parameters[0] + statistics[0], self._parameters[1] + statistics[1]
        if not self._is_plain:
            own = [local_tensor(each) for each in own]
            others = [local_tensor(each).to(mine.dtype) for each, mine in zip(others, own, strict=True)]
        if own:
            lerp(own, others, 1.0 - decay)
        if self._copied:
            copy_all(*([local_tensor(each) for each in tensors] for tensors in copied))


def _tensors(pairs: list[tuple[Place, Place]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [held[key] for (held, key), _ in pairs], [held[key] for _, (held, key) in pairs]


def is_running_statistic(name: str, buffer: torch.Tensor) -> bool:
    """Return True if averages average a buffer; a mean of vectors of power iteration or of queues has no meaning."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()


@final
class Teacher(nn.Module):
    """A copy of a module that follows it: its parameters are an exponential moving average of those of the module.

    `self.teacher = lumen.Teacher(self.student, decay=0.996)` in `__init__` or `configure_model` is all: in `fit`, once
    an update is complete, `parameter = decay * parameter + (1 - decay) * parameter of the student`. An update that fp16
    or a callback has left out does not move it, nor do the micro-batches of a step. It is called as the student is, and
    gives outputs without gradients (Mean Teacher, Tarvainen and Valpola 2017; MoCo, He et al. 2019; BYOL, Grill et al.
    2020; DINO, Caron et al. 2021).

    Nothing trains its parameters, whatever the optimizer was given. Checkpoints have them, by `module` in its name,
    and not the student a second time; under FSDP they are cut up as the student's are.

    Args:
        student: A module of the task, as it is now; it must stay a part of the task.
        decay: Share of the teacher that is kept, in [0, 1]; or a function from the steps that the run had completed
            before to it, such as `lambda step: min(1 - 1 / (step + 1), 0.999)`.
        final_decay: Let the share go from `decay` to this by half a cosine over the run's steps, as BYOL does with 1.0:
            `final_decay - (final_decay - decay) * (cos(pi * step / steps) + 1) / 2`. None: it stays.
        steps: Length of that half cosine. Default: the run's, by `max_steps` or `max_epochs`.
        eval_mode: Keep the teacher in eval mode. Default: it is in the mode of the task, so that in training BatchNorm
            normalizes by its own batches and dropout drops, as in the papers.
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`, and copy all other
            buffers. Default: with `eval_mode`; otherwise the teacher has buffers of its own.

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
        at_least(1, steps=steps)
        if not callable(decay):
            _share(decay)
        elif final_decay is not None:
            raise ConfigError("Teacher: decay is a function, which says all. Leave final_decay out.")
        if final_decay is not None:
            _share(final_decay)
        if steps is not None and final_decay is None:
            raise ConfigError(f"Teacher: steps={steps} is the length of the way to final_decay. Set that too.")
        try:
            self.module = deepcopy(student)
        except RuntimeError as error:
            raise ConfigError(
                f"Teacher: {type(student).__name__} cannot be copied: {error} Make the teacher before the first "
                "forward, and use torch.nn.utils.parametrizations for what weight_norm and its like did before."
            ) from error
        self.requires_grad_(False)
        self.decay, self.final_decay, self.steps = decay, final_decay, steps
        self.eval_mode = eval_mode
        self.use_buffers = eval_mode if use_buffers is None else use_buffers
        self._student = (student,)  # in a tuple: no module of this one, which would be saved twice
        self._steps = steps
        self._averages: Averages | None = None  # resolved at the first update of a run
        self.train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy; its outputs have no gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode, unless it is to be eval mode always."""
        return super().train(mode and not self.eval_mode)

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"decay={self.decay}" + ("" if self.final_decay is None else f", final_decay={self.final_decay}")

    # ------------------------------------------------------------------ following

    def begin(self, task: nn.Module, run_steps: Callable[[], int]) -> None:
        """Prepare for a run.

        Args:
            task: The task of the run, of which the student is a part.
            run_steps: Optimizer steps of the whole run.

        Raises:
            ConfigError: The student is no part of the task, the parameters are in bfloat16, or the length of the run is
                not known and is needed.
        """
        (student,), self._averages = self._student, None
        known = set(task.modules())
        if student not in known:
            raise ConfigError(
                f"Teacher: the {type(student).__name__} that it follows is no module of {type(task).__name__}. "
                "Set it as an attribute of the task, and make the teacher of that."
            )
        if self.decay not in (0.0, 1.0) and torch.bfloat16 in {each.dtype for each in self.module.parameters()}:
            raise ConfigError(
                "Teacher: its parameters are torch.bfloat16, which rounds small moves away, so it does not follow. "
                'Train with precision="bf16", which keeps parameters in float32.'
            )
        if self.final_decay is not None and self.steps is None:
            try:
                self._steps = run_steps()
            except ConfigError as error:
                raise ConfigError(
                    "Teacher: final_decay is reached at the end of the run, whose steps are not known. Set max_steps, "
                    "or steps of the teacher."
                ) from error

    def decay_at(self, step: int) -> float:
        """The decay of an update.

        Args:
            step: Steps that the run had completed before.

        Raises:
            ConfigError: The function gives no share.
        """
        if callable(self.decay):
            return _share(self.decay(step))
        if self.final_decay is None:
            return self.decay
        done = min(1.0, step / (self._steps or 1))
        return self.final_decay - (self.final_decay - self.decay) * (math.cos(math.pi * done) + 1.0) / 2.0

    def follow(self, step: int) -> None:
        """Move towards the student once, as a run does when it has made an update.

        Args:
            step: Steps that the run had completed before.
        """
        if self._averages is None:
            modules = (self.module, *self._student)
            self._averages = Averages(*(places_of(each, buffers=self.use_buffers) for each in modules))
        self._averages.move(self.decay_at(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Be as the student is now, such as after it was given other weights in `on_fit_start`."""
        (student,) = self._student
        own, others = ([*module.parameters(), *module.buffers()] for module in (self.module, student))
        for mine, other in zip(own, others, strict=True):
            local_tensor(mine).copy_(local_tensor(other))


def teachers_of(task: nn.Module) -> list[Teacher]:
    """The teachers in a task."""
    return [module for module in task.modules() if isinstance(module, Teacher)]


def _share(decay: float) -> float:
    if not 0.0 <= decay <= 1.0:
        raise ConfigError(f"Teacher: a decay must be at least 0 and at most 1, found {decay:g}.")
    return decay
