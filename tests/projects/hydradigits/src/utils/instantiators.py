from typing import Any

import hydra
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from src.utils.logging_utils import log_hyperparameters
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


def instantiate_project(cfg: DictConfig) -> dict[str, Any]:
    """Build all objects of a config, and send its hyperparameters to the loggers."""
    log.info(f"Instantiating datamodule <{cfg.data._target_}>")
    datamodule: LightningDataModule = hydra.utils.instantiate(cfg.data)
    log.info(f"Instantiating model <{cfg.model._target_}>")
    model: LightningModule = hydra.utils.instantiate(cfg.model)
    callbacks: list[Callback] = instantiate_all("callback", cfg.get("callbacks"))
    logger: list[Logger] = instantiate_all("logger", cfg.get("logger"))
    log.info(f"Instantiating trainer <{cfg.trainer._target_}>")
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=logger)
    objects = {"cfg": cfg, "model": model, "datamodule": datamodule, "trainer": trainer}
    if logger:
        log_hyperparameters(objects)
    return objects
