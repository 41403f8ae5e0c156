"""Notices parameters that are added during training, of which torch's wrappers would know nothing."""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)


@final
class Additions:
    """Notices whenever any module is given a parameter or a submodule; a step that adds none costs nothing.

    Attributes:
        noticed: Something was added to some module since this was last set to False.
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
        """Stop noticing."""
        for handle in self._handles:
            handle.remove()
