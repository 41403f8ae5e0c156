"""OmegaConf's configs in hyperparameters, without an import of OmegaConf in a run that has none."""

from __future__ import annotations

import sys
from typing import Any


def is_omegaconf(value: Any) -> bool:
    """Return True if a value is a config of OmegaConf."""
    module = sys.modules.get("omegaconf")
    return module is not None and bool(module.OmegaConf.is_config(value))


def make_omegaconf(value: Any) -> Any:
    """Return plain data as a config of OmegaConf."""
    from omegaconf import OmegaConf

    return OmegaConf.create(value, flags={"allow_objects": True})
