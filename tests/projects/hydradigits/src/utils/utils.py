from importlib.util import find_spec
from typing import Any
from collections.abc import Callable

from omegaconf import DictConfig

from src.utils.pylogger import RankedLogger

log = RankedLogger(__name__, rank_zero_only=True)


def task_wrapper(task_func: Callable) -> Callable:
    """Log the failure of a job, so that a multirun shows which one failed, and close its loggers."""

    def wrap(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            return task_func(cfg=cfg)
        except Exception:
            log.exception("")
            raise
        finally:
            log.info(f"Output dir: {cfg.paths.output_dir}")
            if find_spec("wandb"):
                import wandb

                if wandb.run:
                    wandb.finish()

    return wrap


def get_metric_value(metric_dict: dict[str, Any], metric_name: str | None) -> float | None:
    """Return the value that a sweeper optimizes."""
    if not metric_name:
        return None
    if metric_name not in metric_dict:
        raise Exception(f"Metric value not found! <metric_name={metric_name}>")
    return metric_dict[metric_name].item()
