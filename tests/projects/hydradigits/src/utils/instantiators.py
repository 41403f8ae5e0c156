from typing import Any

import hydra
from omegaconf import DictConfig

from src.utils.pylogger import RankedLogger

log = RankedLogger(__name__, rank_zero_only=True)


def instantiate_all(kind: str, config: DictConfig | None) -> list[Any]:
    """Return the callbacks or the loggers of a config."""
    found: list[Any] = []
    for each in (config or {}).values():
        if isinstance(each, DictConfig) and "_target_" in each:
            log.info(f"Instantiating {kind} <{each._target_}>")
            found.append(hydra.utils.instantiate(each))
    return found
