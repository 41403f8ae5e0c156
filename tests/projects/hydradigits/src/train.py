"""python src/train.py trainer=ddp_sim model.optimizer.lr=0.01"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
import lightning as L
from lightning import Trainer
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PROJECT_ROOT", str(ROOT))

from src.utils import RankedLogger, get_metric_value, instantiate_project, task_wrapper  # noqa: E402

log = RankedLogger(__name__, rank_zero_only=True)


@task_wrapper
def train(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and test the best weights."""
    if cfg.get("seed"):
        L.seed_everything(cfg.seed, workers=True)
    objects = instantiate_project(cfg)
    model, datamodule = objects["model"], objects["datamodule"]
    trainer: Trainer = objects["trainer"]

    if cfg.get("train"):
        log.info("Starting training!")
        # The network, the optimizer and the schedule are pickled with the hyperparameters.
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg.get("ckpt_path"), weights_only=False)
    train_metrics = trainer.callback_metrics

    if cfg.get("test"):
        log.info("Starting testing!")
        ckpt_path = trainer.checkpoint_callback.best_model_path
        if ckpt_path == "":
            log.warning("Best ckpt not found! Using current weights for testing...")
            ckpt_path = None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
        log.info(f"Best ckpt path: {ckpt_path}")
    return {**train_metrics, **trainer.callback_metrics}, objects


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> float | None:
    metric_dict, _ = train(cfg)
    return get_metric_value(metric_dict=metric_dict, metric_name=cfg.get("optimized_metric"))


if __name__ == "__main__":
    main()
