"""Notices that modules got new parameters while they train: wrappers know only those that were there."""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@final
class Additions:
    """Sees every module and parameter that any module is given, at no cost for a step that adds none.

    Attributes:
        noticed: Something was added, to whatever module; who has looked sets it to False.
    """

    def __init__(self) -> None:
        self.noticed = True  # nobody has looked yet
        self._handles = [
            register_module_module_registration_hook(self._notice),
            register_module_parameter_registration_hook(self._notice),
        ]

    def _notice(self, module: nn.Module, name: str, value: Any) -> None:
        self.noticed = True

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
