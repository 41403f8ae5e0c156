"""Strategy for one process on one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from lumen.distributed.processes import STARTUP_TIMEOUT_S, Processes
from lumen.errors.arguments import check_arguments
from lumen.errors.lightning_names import INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES
from lumen.strategies.strategy import Strategy

_NO_CONTEXT = nullcontext()


@final
class SingleDevice(Strategy):
    """Strategy that runs the task unwrapped on one device.

    Args:
        device: The device to which the task is moved, such as "cuda:1".
        timeout_s: The longest time of a step without progress before Lumen ends the process; in seconds, > 0. Infinity
            disables the limit.
        startup_timeout_s: The limit until the first step ends, and also within evaluations and between steps.
    """

    is_exact = False
    INSTEAD, NEUTRAL = INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES

    @check_arguments
    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        timeout_s: float = STARTUP_TIMEOUT_S,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        self.processes = Processes()
        self._timeouts = timeout_s, startup_timeout_s
        self.device = torch.device(device)
        self._task: nn.Module | None = None

    def connect(self) -> None:
        """Make the device the current one, so that tensors created on "cuda" are on this device."""
        self.processes.set_timeouts(*self._timeouts)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def setup(self, task: nn.Module) -> None:
        """Move the task to the device."""
        self._task = task.to(self.device)

    def call(self, step: str, *args: Any) -> Any:
        """Call the step."""
        return getattr(self._task, step)(*args)

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return _NO_CONTEXT
