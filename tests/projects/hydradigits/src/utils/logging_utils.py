from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import OmegaConf

from src.utils.pylogger import RankedLogger

log = RankedLogger(__name__, rank_zero_only=True)


@rank_zero_only
def log_hyperparameters(objects: dict[str, Any]) -> None:
    """Send the config and the number of parameters to all loggers."""
    cfg = OmegaConf.to_container(objects["cfg"])
    model, trainer = objects["model"], objects["trainer"]
    if not trainer.logger:
        log.warning("Logger not found! Skipping hyperparameter logging...")
        return
    hparams = {name: cfg.get(name) for name in ("model", "data", "trainer", "callbacks", "task_name", "tags", "seed")}
    hparams["model/params/total"] = sum(p.numel() for p in model.parameters())
    for logger in trainer.loggers:
        logger.log_hyperparams(hparams)
