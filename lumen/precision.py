"""Precision: in which dtype the forward runs and how the loss is scaled. One class each, all with the same step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch.optim import Optimizer

from lumen.errors import ConfigError, NonFiniteLoss

_NO_CONTEXT = nullcontext()


class Precision(ABC):
    """What a number format asks of the loop. The loop calls every method, whatever the format."""

    #: A non-finite loss is this format's own business (fp16 skips the update), not an error of the loop.
    handles_overflow = False

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """The context in which every step of the task runs."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true size, so that clipping thresholds mean what they say."""

    def step(self, optimizer: Optimizer) -> bool:
        """Update the parameters.

        Returns:
            False if the update was skipped because gradients overflowed: then nothing else may move either.
        """
        optimizer.step()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


@final
class Float32(Precision):
    """Everything as the model's parameters are."""

    def forward(self) -> AbstractContextManager[Any]:
        """No context."""
        return _NO_CONTEXT


@final
class BFloat16(Precision):
    """Forward under autocast to bfloat16; parameters and gradients stay float32."""

    def __init__(self, device: torch.device) -> None:
        self._autocast = torch.autocast(device.type, torch.bfloat16)

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return self._autocast


@final
class Float16(Precision):
    """Forward under autocast to float16 with a gradient scaler (Micikevicius et al., Mixed Precision Training, 2018).

    An update whose gradients overflow is skipped and the scale halved. A scale below 1 means that the gradients are
    not finite at any scale, which is an error.
    """

    handles_overflow = True

    def __init__(self, device: torch.device, init_scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self._autocast = torch.autocast(device.type, torch.float16)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=init_scale, growth_interval=growth_interval)
        self._scale = init_scale

    def forward(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return self._autocast

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss * scale`."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale and look for overflow."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
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
        return self._scale >= before

    def state_dict(self) -> dict[str, Any]:
        """The scaler's scale and growth tracker."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale."""
        self._scaler.load_state_dict(state)
        self._scale = float(state["scale"])


_NAMES = {
    "fp32": Float32, "32": Float32, "32-true": Float32,
    "bf16": BFloat16, "bf16-mixed": BFloat16,
    "fp16": Float16, "16": Float16, "16-mixed": Float16,
}  # fmt: skip


def make_precision(name: str | int, device: torch.device) -> Precision:
    """The precision of a name.

    Args:
        name: `fp32`, `bf16` or `fp16`; Lightning's `32-true`, `bf16-mixed`, `16-mixed` mean the same.
        device: Where the forward runs.

    Raises:
        ConfigError: No such precision.
    """
    kind = _NAMES.get(str(name))
    if kind is None:
        raise ConfigError(f"precision: no precision is named {name!r}; use one of {', '.join(_NAMES)}.")
    return Float32() if kind is Float32 else kind(device)
