"""Precisions: dtype of the forward and scaling of the loss. Each precision is a class with the same methods."""

from __future__ import annotations

import inspect
import math
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.console import logger as _log
from lumen.errors import ConfigError, NonFiniteLoss
from lumen.errors.arguments import check_arguments, suggest_names
from lumen.errors.renamed import RenamedMembers
from lumen.internals.optimizers import get_unwrapped_step

_NO_CONTEXT = nullcontext()
_SKIPPED_PER_WARNING = 5
_GROWTH_DEFAULTS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}  # of torch's GradScaler
#: Parts of torch's error messages about a dtype that an operator does not support.
_DTYPE_ERROR_PATTERN = {
    torch.float16: r"\b(Half|HalfTensor|Float16)\b|primitive descriptor",
    torch.bfloat16: r"BFloat16|primitive descriptor",
    torch.float64: r"\b(Double|DoubleTensor|double)\b",
}


#: New names of members, by the names of earlier versions.
_RENAMED = {
    "leave_out": "skip_update",
}


class Precision(RenamedMembers, ABC, renamed=_RENAMED):
    """Base class of precisions: the parts of a step that depend on the precision.

    Pass an object of your own subclass to `Trainer(precision=...)`; only `forward` must be defined. One object serves
    one trainer at a time. The loop calls the methods of every precision in this order: `check` when the trainer is
    made; `setup`; `convert`; `load_state_dict`, if the run resumes from a checkpoint; then for each step `forward`
    around every micro-batch, `backward` after each, `unscale` and `step`. Evaluations call `setup`, `convert` and
    `forward`.
    """

    #: True if the precision handles non-finite losses (fp16 skips the update); False if they are an error of the loop.
    handles_overflow: bool = False
    #: The dtype of parameters and of the batches that steps get; None to leave dtypes as they are.
    dtype: torch.dtype | None = None
    #: Updates that were skipped because gradients overflowed, in the whole run.
    skipped_updates: int = 0

    @property
    def name(self) -> str:
        """Name in checkpoints and messages, such as "bf16"; by default the name of the class."""
        return type(self).__name__

    @property
    def numerics(self) -> dict[str, str | int | float | bool]:
        """Settings that change numbers and differ from their defaults. A resumed run compares these settings."""
        return {}

    def check(self, device: torch.device, parameter_device: torch.device) -> None:
        """Refuse devices that do not support the precision, without initialising a device, which would stay occupied.

        Args:
            device: The device on which the forward runs.
            parameter_device: The device of parameters and gradients between steps.

        Raises:
            ConfigError: The precision does not work on these devices. The message says what to use instead.
        """

    def setup(self, device: torch.device) -> None:
        """Begin a run on a device, without the state of earlier runs."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which every step of the task runs."""

    def convert(self, model: nn.Module) -> None:
        """Cast a model's parameters and buffers, before an optimizer is built."""

    def backward(self, loss: torch.Tensor, by: Callable[[torch.Tensor], Any] = torch.Tensor.backward) -> None:
        """Accumulate the gradients of a loss.

        Args:
            loss: A scalar tensor.
            by: Function that makes the backward: the task's `backward` if the task overrides it.
        """
        by(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, so that clipping thresholds apply to unscaled gradients."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters.

        Args:
            optimizer: The optimizer of parameters whose gradients are complete, unscaled and clipped.
            closure: The closure of an optimizer that evaluates loss and gradients several times (LBFGS); never with
                fp16.

        Returns:
            False if the update was skipped because gradients overflowed. Then schedules and counters must not move.
        """
        if closure is None:
            get_unwrapped_step(optimizer)()
        else:
            optimizer.step(closure)
        return True

    def skip_update(self, optimizer: Optimizer) -> None:
        """Make no update of complete and unscaled gradients, because a hook rejected the update."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


@final
class Float32(Precision):
    """Precision `fp32`: the forward runs in the dtypes of the model's parameters."""

    name = "fp32"

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return _NO_CONTEXT


@final
class OneDtype(Precision):
    """Precision with parameters, buffers and floating-point tensors of batches in one dtype; no autocast, no scaler.

    Args:
        name: "bf16-true" or "fp64".
    """

    name = ""

    @check_arguments
    def __init__(self, name: Literal["bf16-true", "fp64"]) -> None:
        self.name = name
        self.dtype = torch.bfloat16 if name == "bf16-true" else torch.float64
        self._context = _DtypeErrorContext(nullcontext(), name, self.dtype)

    def check(self, device: torch.device, parameter_device: torch.device) -> None:
        """Refuse fp64 on MPS, which has no float64."""
        if self.dtype is torch.float64 and device.type == "mps":
            raise ConfigError("precision: fp64 needs float64, which MPS does not have. Set accelerator: cpu, or fp32.")

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context that only explains errors about dtypes."""
        return self._context

    def convert(self, model: nn.Module) -> None:
        """Cast floating-point parameters and buffers in place, but not the states of torchmetrics objects."""
        model.double() if self.dtype is torch.float64 else model.bfloat16()  # Module.to would cast metrics too.

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the precision, which `load_from_checkpoint` needs to cast the task again."""
        return {"name": self.name}


@final
class BFloat16(Precision):
    """Precision `bf16`: forward under autocast to bfloat16; parameters and gradients stay float32."""

    name = "bf16"

    def setup(self, device: torch.device) -> None:
        """Make the autocast context for a device."""
        self._context = _DtypeErrorContext(torch.autocast(device.type, torch.bfloat16), "bf16", torch.bfloat16)

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of autocast to bfloat16."""
        return self._context


@final
class Float16(Precision):
    """Precision `fp16`: forward under autocast to float16, with a gradient scaler.

    Micikevicius et al., Mixed Precision Training, 2018. If gradients overflow, the scaler skips the update and lowers
    the scale. Lumen warns of the first skipped update and of several in a row. A scale below 1 is an error, because the
    gradients are then not finite at any scale. The arguments equal those of `torch.amp.GradScaler`. A resumed run uses
    the checkpoint's scale and the settings passed here.

    Args:
        init_scale: The first factor of the loss, at least 1.
        growth_factor: The factor by which the scale grows, more than 1.
        backoff_factor: The factor by which the scale shrinks when gradients overflow, between 0 and 1.
        growth_interval: Number of successive updates without overflow before the scale grows, at least 1.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "fp16"
    handles_overflow = True

    @check_arguments
    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        _check_value("init_scale", init_scale, "at least 1", is_valid=1 <= init_scale < math.inf)
        _check_value("growth_factor", growth_factor, "more than 1", is_valid=1 < growth_factor < math.inf)
        _check_value("backoff_factor", backoff_factor, "between 0 and 1", is_valid=0 < backoff_factor < 1)
        _check_value("growth_interval", growth_interval, "at least 1", is_valid=growth_interval >= 1)
        self._init_scale = float(init_scale)
        growth = float(growth_factor), float(backoff_factor), growth_interval
        self._growth_settings: dict[str, Any] = dict(zip(_GROWTH_DEFAULTS, growth, strict=True))

    @property
    def numerics(self) -> dict[str, str | int | float | bool]:
        """Settings of the scale's growth that differ from the defaults. A resumed run does not use `init_scale`."""
        return {name: value for name, value in self._growth_settings.items() if value != _GROWTH_DEFAULTS[name]}

    def check(self, device: torch.device, parameter_device: torch.device) -> None:
        """Refuse gradients on another type of device than the loss scale."""
        if device.type != parameter_device.type:
            raise ConfigError(
                f"precision: fp16 does not support FSDP(cpu_offload=True). The loss scale is on {device.type} and the "
                f"gradients are on the {parameter_device.type}, so torch would read the scale before its copy arrives. "
                "Use precision: bf16, or set cpu_offload: false."
            )

    def setup(self, device: torch.device) -> None:
        """Make the autocast context and a gradient scaler for a device."""
        self._context = _DtypeErrorContext(torch.autocast(device.type, torch.float16), "fp16", torch.float16)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=self._init_scale, **self._growth_settings)
        self._scale, self._has_gradients = self._init_scale, True
        self._skipped_in_a_row = self.skipped_updates = 0

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of autocast to float16."""
        return self._context

    def backward(self, loss: torch.Tensor, by: Callable[[torch.Tensor], Any] = torch.Tensor.backward) -> None:
        """Accumulate the gradients of `loss * scale`."""
        by(self._scaler.scale(loss))

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and note whether any overflowed."""
        groups = optimizer.param_groups
        self._has_gradients = any(parameter.grad is not None for group in groups for parameter in group["params"])
        if self._has_gradients:  # Torch's scaler cannot step otherwise.
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters unless gradients overflowed; then adapt the scale.

        Raises:
            NonFiniteLoss: The scale fell below 1, so the gradients are not finite at any scale.
        """
        if not self._has_gradients:
            optimizer.step()
            return True
        self._scaler.step(optimizer)
        self._scaler.update()
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale < 1.0:
            raise NonFiniteLoss(
                f"fp16 gradients are not finite at any loss scale (the scale fell to {self._scale:g}). Look for an "
                "overflow in the forward, lower the learning rate, or use precision: bf16."
            )
        if self._scale >= before:
            self._skipped_in_a_row = 0
            return True
        self._count_skipped_update(before)
        return False

    def skip_update(self, optimizer: Optimizer) -> None:
        """Adapt the scale as after an update."""
        if self._has_gradients:
            self._scaler.update()
            self._scale = self._scaler.get_scale()

    def _count_skipped_update(self, scale: float) -> None:
        self.skipped_updates += 1
        self._skipped_in_a_row += 1
        if self.skipped_updates == 1:
            _log.warning(
                "fp16: skipped an update, because its gradients overflow at a loss scale of %g; the scale is %s. A few "
                "skipped updates at the start are normal; the end of the run reports their number",
                scale, "halved" if self._scale == scale / 2 else f"now {self._scale:g}",
            )  # fmt: skip
        elif self._skipped_in_a_row % _SKIPPED_PER_WARNING == 0:
            _log.warning(
                "fp16: skipped %d updates in a row, and the loss scale has fallen to %g. If more updates are skipped, "
                "lower the learning rate or use precision: bf16", self._skipped_in_a_row, self._scale,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's scale and growth tracker, and the number of skipped updates."""
        return self._scaler.state_dict() | {"skipped_updates": self.skipped_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale. The state of a run without a scaler has no effect."""
        if "scale" in state:
            self.skipped_updates = state.get("skipped_updates", 0)
            saved = {key: state[key] for key in self._scaler.state_dict() if key in state}
            self._scaler.load_state_dict(self._scaler.state_dict() | saved | self._growth_settings)
            self._scale = float(state["scale"])


@final
class _DtypeErrorContext(AbstractContextManager[None]):
    """Context for steps that names, for a dtype error of torch, the module that raised it."""

    def __init__(self, context: AbstractContextManager[Any], name: str, dtype: torch.dtype) -> None:
        self._context = context
        self._name = name
        self._error_pattern = re.compile(_DTYPE_ERROR_PATTERN[dtype])

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)
        if error is not None and _is_torch_error(error, trace) and self._error_pattern.search(str(error)):
            alternative = "bf16 or fp32" if self._name == "fp16" else "fp32"
            raise ConfigError(
                f"precision: under {self._name} torch cannot run {_describe_innermost(list(_iterate_modules(trace)))}: "
                f"{str(error).splitlines()[0].rstrip('.')}. Use precision: {alternative}, or run this part in float32 "
                "(docs/guides/precision.md). Create tensors in a step with the dtype of the tensors that they are "
                "combined with."
            ) from error


def _is_torch_error(error: BaseException, trace: TracebackType | None) -> bool:
    """Return True if a torch kernel does not support a float dtype.

    Errors from a `raise` in Python and errors about integer dtypes do not count.
    """
    if trace is None or type(error) not in (RuntimeError, NotImplementedError):
        return False
    line = traceback.extract_tb(trace)[-1].line or ""
    return not re.search(r"\braise\b", line) and not re.search(r"\b(Long|Int|Byte)\b", str(error))


def _iterate_modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """Yield the modules whose methods are on a traceback, outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        trace = trace.tb_next


def _describe_innermost(modules: list[nn.Module]) -> str:
    """Describe the innermost module by its path in the outermost module, its class and its device."""
    if not modules:
        return "an operation"
    task, innermost = modules[0], modules[-1]
    path = next((name for name, module in task.named_modules() if module is innermost), "")
    device = next((f" on {tensor.device.type}" for tensor in (*innermost.parameters(), *task.parameters())), "")
    return f"{path!r} ({type(innermost).__name__}){device}" if path else f"a step of {type(task).__name__}{device}"


def _check_value(name: str, found: float, expected: str, *, is_valid: bool) -> None:
    if not is_valid:
        raise ConfigError(f"precision: {name} must be {expected}, found {found:g}.")


PRECISIONS: dict[str, Callable[[], Precision]] = {
    **dict.fromkeys(("fp32", "32", "32-true"), Float32),
    **dict.fromkeys(("bf16", "bf16-mixed"), BFloat16),
    **dict.fromkeys(("fp16", "16", "16-mixed"), Float16),
    "bf16-true": lambda: OneDtype("bf16-true"),
    **dict.fromkeys(("fp64", "64", "64-true"), lambda: OneDtype("fp64")),
}


def make_precision(precision: str | int | Precision | type[Precision]) -> Precision:
    """Return the precision with a name, or the user's own precision.

    Args:
        precision: The name `fp32`, `bf16`, `fp16`, `bf16-true` or `fp64`, or one of Lightning's equivalent names
            `32-true`, `bf16-mixed`, `16-mixed` and `64-true`. Or an object, or a class that needs no arguments.

    Raises:
        ConfigError: There is no precision of this name.
    """
    if isinstance(precision, Precision):
        return precision
    if inspect.isclass(precision):
        return precision()
    if str(precision) in ("fp16-true", "16-true"):
        raise ConfigError(
            f"precision: {precision} trains float16 parameters without a loss scale, so small gradients and updates "
            "become 0. Use fp16 (autocast with a scaler), or bf16-true for parameters of 16 bits."
        )
    if str(precision) not in PRECISIONS:
        raise ConfigError(
            f"precision: no precision is named {precision!r}; use one of {', '.join(PRECISIONS)}, or pass a Precision "
            f"object (in a config: {{class_path: ..., init_args: ...}}).{suggest_names(str(precision), PRECISIONS)}"
        )
    return PRECISIONS[str(precision)]()


def convert_as_saved(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Cast a model by the precision whose state was saved. A user's own precision has no effect here."""
    if (name := state.get("name")) in PRECISIONS:
        make_precision(name).convert(model)
