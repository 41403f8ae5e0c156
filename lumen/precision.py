"""Precision: in which dtype the forward runs and how the loss is scaled. One class each, all with the same step."""

from __future__ import annotations

import dis
import logging
import re
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
#: How torch's messages name a dtype that an operation does not have, or that does not fit the others.
_COMPLAINTS = {
    torch.float16: r"\b(Half|HalfTensor|Float16)\b|primitive descriptor",
    torch.bfloat16: r"BFloat16|primitive descriptor",
    torch.float64: r"\b(Double|DoubleTensor|double)\b",
}


class Precision(ABC):
    """What a number format asks of the loop. The loop calls every method, whatever the format.

    Attributes:
        name: As `make_precision` has it.
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
        """Bring what a model holds to this format, before it has an optimizer."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true size, so that clipping thresholds mean what they say."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update the parameters.

        Args:
            optimizer: Their gradients are complete.
            closure: For an optimizer that evaluates loss and gradients several times; never with fp16.

        Returns:
            False if the update was skipped because gradients overflowed: then nothing else may move either.
        """
        if closure is None:
            bare_step(optimizer)()
        else:
            optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


@final
class Float32(Precision):
    """Everything as the model's parameters are."""

    name = "fp32"

    def forward(self) -> AbstractContextManager[Any]:
        """No context."""
        return _NO_CONTEXT


@final
class OneDtype(Precision):
    """Parameters, buffers and the floating tensors of batches all in one dtype; no autocast, no scaler.

    Args:
        name: `bf16-true` or `fp64`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = torch.bfloat16 if name == "bf16-true" else torch.float64
        self._context = _Explaining(nullcontext(), name, self.dtype)

    def forward(self) -> AbstractContextManager[Any]:
        """Nothing but clear errors."""
        return self._context

    def convert(self, model: nn.Module) -> None:
        """Cast floating parameters and buffers in place; integers stay, and the sums of torchmetrics objects."""
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
        """Autocast."""
        return self._context


@final
class Float16(Precision):
    """Forward under autocast to float16 with a gradient scaler (Micikevicius et al., Mixed Precision Training, 2018).

    An update whose gradients overflow is skipped and the scale halved, which is said once, and again where it happens
    several times in a row. A scale below 1 means that the gradients are
    not finite at any scale, which is an error.
    """

    name = "fp16"
    handles_overflow = True

    def __init__(self, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self._context = _Explaining(torch.autocast(device.type, torch.float16), "fp16", torch.float16)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=init_scale, growth_interval=growth_interval)
        self._scale = init_scale
        self._in_a_row = 0

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return self._context

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss * scale`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and look for overflow."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Update unless gradients overflowed; then adapt the scale.

        Raises:
            NonFiniteLoss: The scale fell below 1.
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
        """Take over the scale; a run that had none begins with this one's."""
        if "scale" in state:
            self.skipped_updates = state.get("skipped_updates", 0)
            self._scaler.load_state_dict({key: value for key, value in state.items() if key != "skipped_updates"})
            self._scale = float(state["scale"])


@final
class _Explaining(AbstractContextManager[None]):
    """A context around the steps that says which module cannot run in a dtype; it costs nothing until one fails."""

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
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or type(error) not in (RuntimeError, NotImplementedError):
        return False
    raised = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return not raised and not re.search(r"\b(Long|Int|Byte)\b", str(error))


def _modules(trace: TracebackType | None) -> Iterator[nn.Module]:
    """The modules whose methods a traceback passes through, outermost first."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        trace = trace.tb_next


def _culprit(modules: list[nn.Module]) -> str:
    """The innermost of nested modules: its path in the outermost, its class, its device."""
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
    """The precision of a name; see `check_precision`.

    Args:
        name: `fp32`, `bf16`, `fp16`, `bf16-true` or `fp64`; Lightning's `32-true`, `bf16-mixed`, `16-mixed` and
            `64-true` mean the same.
        device: Where the forward runs.
    """
    check_precision(name, device, device)
    return _KINDS[str(name)](device)


def check_precision(name: str | int, device: torch.device, parameter_device: torch.device) -> None:
    """Find out whether there is a precision, without a look at the device: that would take hold of one for good.

    Args:
        name: See `make_precision`.
        device: Where the forward runs.
        parameter_device: Where parameters and gradients lie between steps.

    Raises:
        ConfigError: No such precision, or not on this device.
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
