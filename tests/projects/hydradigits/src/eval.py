"""python src/eval.py ckpt_path=PATH"""

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from lightning import Trainer
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PROJECT_ROOT", str(ROOT))

from src.utils import RankedLogger, instantiate_project, task_wrapper  # noqa: E402

log = RankedLogger(__name__, rank_zero_only=True)


@task_wrapper
def evaluate(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Test a checkpoint."""
    assert cfg.ckpt_path
    objects = instantiate_project(cfg)
    trainer: Trainer = objects["trainer"]
    log.info("Starting testing!")
    trainer.test(model=objects["model"], datamodule=objects["datamodule"], ckpt_path=cfg.ckpt_path, weights_only=False)
    return trainer.callback_metrics, objects


@hydra.main(version_base="1.3", config_path="../configs", config_name="eval.yaml")
def main(cfg: DictConfig) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()
