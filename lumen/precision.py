"""Precision: the dtype in which the forward runs, and how the loss is scaled. A class each, with the same methods."""

from __future__ import annotations

import logging
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.errors import ConfigError, NonFiniteLoss
from lumen.internals.optimizers import bare_step

_log = logging.getLogger("lumen")
_NO_CONTEXT = nullcontext()
_MANY_IN_A_ROW = 5
#: Parts of torch's error messages about a dtype that an operator does not support.
_COMPLAINTS = {
    torch.float16: r"\b(Half|HalfTensor|Float16)\b|primitive descriptor",
    torch.bfloat16: r"BFloat16|primitive descriptor",
    torch.float64: r"\b(Double|DoubleTensor|double)\b",
}


class Precision(ABC):
    """What a precision changes in a step. The loop calls every method, whatever the precision.

    Attributes:
        name: Its name, such as "bf16"; see `make_precision`.
    """

    name: str

    #: A non-finite loss is this format's own business (fp16 skips the update), not an error of the loop.
    handles_overflow = False
    #: The dtype of parameters and of what reaches the steps; None: whatever they have.
    dtype: torch.dtype | None = None
    #: Updates that were skipped because gradients overflowed, in the whole run.
    skipped_updates = 0

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """The context in which every step of the task runs."""

    def convert(self, model: nn.Module) -> None:
        """Cast a model's parameters and buffers, before an optimizer is built."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, so that clipping thresholds mean what they say."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters.

        Args:
            optimizer: The optimizer of parameters whose gradients are complete, unscaled and clipped.
            closure: For an optimizer that evaluates loss and gradients several times (LBFGS); never with fp16.

        Returns:
            False if the update was skipped because gradients overflowed: then schedules and counters must not move.
        """
        if closure is None:
            bare_step(optimizer)()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@final
class Float32(Precision):
    """`fp32`: the forward runs in the dtypes of the model's parameters."""

    name = "fp32"

    def forward(self) -> AbstractContextManager[Any]:
        """A context that does nothing."""
        return _NO_CONTEXT


@final
class OneDtype(Precision):
    """Parameters, buffers and the floating-point tensors of batches all in one dtype; no autocast, no scaler.

    Args:
        name: "bf16-true" or "fp64".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = torch.bfloat16 if name == "bf16-true" else torch.float64
        self._context = _Explaining(nullcontext(), name, self.dtype)

    def forward(self) -> AbstractContextManager[Any]:
        """A context that only explains errors about dtypes."""
        return self._context

    def convert(self, model: nn.Module) -> None:
        """Cast floating-point parameters and buffers in place, but not the states of torchmetrics objects."""
        model.double() if self.dtype is torch.float64 else model.bfloat16()  # Module.to would cast those sums too

    def state_dict(self) -> dict[str, Any]:
        """The name, by which `load_from_checkpoint` builds the same task again."""
        return {"name": self.name}


@final
class BFloat16(Precision):
    """Forward under autocast to bfloat16; parameters and gradients stay float32."""

    name = "bf16"

    def __init__(self, device: torch.device) -> None:
        self._context = _Explaining(torch.autocast(device.type, torch.bfloat16), "bf16", torch.bfloat16)

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16."""
        return self._context


@final
class Float16(Precision):
    """Forward under autocast to float16 with a gradient scaler (Micikevicius et al., Mixed Precision Training, 2018).

    An update whose gradients overflow is skipped and the scale halved, with a warning the first time and after several
    in a row. A scale below 1 means that the gradients are not finite at any scale, which is an error.
    """

    name = "fp16"
    handles_overflow = True

    def __init__(self, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self._context = _Explaining(torch.autocast(device.type, torch.float16), "fp16", torch.float16)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=init_scale, growth_interval=growth_interval)
        self._scale = init_scale
        self._in_a_row = 0

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast to float16."""
        return self._context

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss * scale`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and note whether any overflowed."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters unless gradients overflowed; then adapt the scale.

        Raises:
            NonFiniteLoss: The scale fell below 1, so the gradients are not finite at any scale.
        """
        self._scaler.step(optimizer)
        self._scaler.update()
        before, self._scale = self._scale, self._scaler.get_scale()
        if self._scale < 1.0:
            raise NonFiniteLoss(
                f"fp16 gradients are not finite at any loss scale (it fell to {self._scale:g}). "
                "Look for an overflow in the forward, lower the learning rate, or use precision: bf16."
            )
        if self._scale >= before:
            self._in_a_row = 0
            return True
        self._count_skipped(before)
        return False

    def _count_skipped(self, scale: float) -> None:
        self.skipped_updates += 1
        self._in_a_row += 1
        if self.skipped_updates == 1:
            _log.warning(
                "fp16: an update was skipped, because its gradients overflow at a loss scale of %g; the scale is "
                "halved. A few such updates at the start are usual; how many there were is said at the end",
                scale,
            )
        elif self._in_a_row % _MANY_IN_A_ROW == 0:
            _log.warning(
                "fp16: %d updates in a row were skipped, and the loss scale has fallen to %g. If that goes on, lower "
                "the learning rate or use precision: bf16",
                self._in_a_row,
                self._scale,
            )

    def state_dict(self) -> dict[str, Any]:
        """The scaler's scale and growth tracker, and how many updates were skipped."""
        return self._scaler.state_dict() | {"skipped_updates": self.skipped_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale; the state of a run without a scaler changes nothing."""
        if "scale" in state:
            self.skipped_updates = state.get("skipped_updates", 0)
            self._scaler.load_state_dict({key: value for key, value in state.items() if key != "skipped_updates"})
            self._scale = float(state["scale"])


@final
class _Explaining(AbstractContextManager[None]):
    """A context for steps that adds to torch's dtype errors which module raised them."""

    def __init__(self, context: AbstractContextManager[Any], name: str, dtype: torch.dtype) -> None:
        self._context = context
        self._name = name
        self._complaint = re.compile(_COMPLAINTS[dtype])

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)
        if error is not None and _is_torchs(error, trace) and self._complaint.search(str(error)):
            better = "bf16 or fp32" if self._name == "fp16" else "fp32"
            raise ConfigError(
                f"precision: under {self._name} torch cannot run {_culprit(list(_modules(trace)))}: "
                f"{str(error).splitlines()[0].rstrip('.')}. Use precision: {better}, or run this part in float32 "
                "(docs/precision.md). A tensor that a step makes has to be given the dtype of those it meets."
            ) from error


def _is_torchs(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether a kernel refused its inputs for want of a float format: not code that raises, nor float for integers."""
    if trace is None or type(error) not in (RuntimeError, NotImplementedError):
        return False
    line = traceback.extract_tb(trace)[-1].line or ""
    return not re.search(r"\braise\b", line) and not re.search(r"\b(Long|Int|Byte)\b", str(error))


def _modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods are on a traceback, outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        trace = trace.tb_next


def _culprit(modules: list[nn.Module]) -> str:
    """The innermost module, in words: its path in the outermost one, its class, its device."""
    if not modules:
        return "an operation"
    task, culprit = modules[0], modules[-1]
    path = next((name for name, module in task.named_modules() if module is culprit), "")
    device = next((f" on {tensor.device.type}" for tensor in (*culprit.parameters(), *task.parameters())), "")
    return f"{path!r} ({type(culprit).__name__}){device}" if path else f"a step of {type(task).__name__}{device}"


_FP16, _FP64 = ("fp16", "16", "16-mixed"), ("fp64", "64", "64-true")
_KINDS: dict[str, Callable[[torch.device], Precision]] = {
    **dict.fromkeys(("fp32", "32", "32-true"), lambda device: Float32()),
    **dict.fromkeys(("bf16", "bf16-mixed"), BFloat16),
    **dict.fromkeys(_FP16, Float16),
    "bf16-true": lambda device: OneDtype("bf16-true"),
    **dict.fromkeys(_FP64, lambda device: OneDtype("fp64")),
}


def make_precision(name: str | int, device: torch.device) -> Precision:
    """The precision with a name; see `check_precision` for its errors.

    Args:
        name: `fp32`, `bf16`, `fp16`, `bf16-true` or `fp64`; Lightning's `32-true`, `bf16-mixed`, `16-mixed` and
            `64-true` mean the same.
        device: The device on which the forward runs.
    """
    check_precision(name, device, device)
    return _KINDS[str(name)](device)


def check_precision(name: str | int, device: torch.device, parameter_device: torch.device) -> None:
    """Refuse a precision that cannot be had. Does not initialise the device, which would stay taken.

    Args:
        name: One of the names that `make_precision` takes.
        device: The device on which the forward runs.
        parameter_device: The device of parameters and gradients between steps.

    Raises:
        ConfigError: There is no precision of this name, or it does not work on this device.
    """
    if str(name) in ("fp16-true", "16-true"):
        raise ConfigError(
            f"precision: {name} trains float16 parameters without a loss scale, where small gradients and updates "
            "become 0. Use fp16 (autocast with a scaler), or bf16-true for parameters of 16 bits."
        )
    if str(name) not in _KINDS:
        raise ConfigError(f"precision: no precision is named {name!r}; use one of {', '.join(_KINDS)}.")
    if str(name) in _FP64 and device.type == "mps":
        raise ConfigError(f"precision: {name} needs float64, which MPS does not have. Set accelerator: cpu, or fp32.")
    if str(name) in _FP16 and device.type != parameter_device.type:
        raise ConfigError(
            f"precision: {name} with FSDP(cpu_offload=True): the loss scale lies on {device.type}, the gradients on "
            f"the {parameter_device.type}, where torch would read it before it has arrived. Use bf16, or cpu_offload: "
            "false."
        )
