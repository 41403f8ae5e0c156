"""Callbacks that search when a run begins, before its loaders and optimizers are made."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from lumen.callbacks import Callback
from lumen.console import logger as _log
from lumen.errors.arguments import checked
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer
from lumen.trainer.tuner.lr_search import LearningRateCurve
from lumen.trainer.tuner.trial import set_everywhere
from lumen.trainer.tuner.tuner import Tuner, rate_name


@final
class LearningRateFinder(Callback):
    """Finds a learning rate when a run begins, and trains with it; see `Tuner.lr_find`.

    A run that goes on from a checkpoint has the rate that was found, and does not search.

    Args:
        min_lr: The first rate, more than 0.
        max_lr: The last rate.
        num_training_steps: Steps of the search, at least 2.
        mode: "exponential": each rate is a multiple of the one before; "linear": they have equal distances.
        early_stop_threshold: Stop when the smoothed loss is more than so many times the least one; None: never.
        update_attr: Set the attribute or hyperparameter; else the run trains with the rate that it has.
        attr_name: Of the attribute or hyperparameter of the task. Default: `lr` or `learning_rate`.
        plot: Write the curve into the run directory: `lr_find.csv`, and `lr_find.png` if matplotlib is installed.

    Attributes:
        optimal_lr: The curve; None: there was no search.
    """

    @checked
    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        *,
        plot: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = {
            "min_lr": min_lr, "max_lr": max_lr, "num_training": num_training_steps, "mode": mode,
            "early_stop_threshold": early_stop_threshold, "update_attr": update_attr, "attr_name": attr_name,
        }  # fmt: skip
        self._plot = plot
        self.optimal_lr: LearningRateCurve | None = None
        self._found: Any = None  # the name, and the rate

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Search, unless the run goes on from a checkpoint."""
        if stage != "fit":
            return
        self.optimal_lr = self._found = None
        if trainer.run.checkpoint is not None:
            return
        self.optimal_lr = Tuner(trainer).lr_find(task, **self._settings)
        rate = self.optimal_lr.suggestion()
        if self._settings["update_attr"]:
            self._found = rate_name(task, self._settings["attr_name"]), rate
        elif rate is not None:
            _log.info("learning rate: %g is suggested", rate)
        if self._plot and trainer.run_directory is not None:
            _draw(self.optimal_lr, trainer.run_directory)

    def on_save_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Keep the rate that was found."""
        checkpoint["found"] = self._found

    def on_load_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Set the rate that was found, before optimizers are built."""
        self._found = checkpoint["found"]
        if self._found is not None:
            set_everywhere([task], *self._found)


@final
class BatchSizeFinder(Callback):
    """Finds the largest batch that training fits into memory, and trains with it; see `Tuner.scale_batch_size`.

    With `global_batch_size` of the trainer that is the micro-batch, and the training is the same as with any other;
    without it a step becomes larger. A run that goes on from a checkpoint has the size that was found, and does not
    search.

    Args:
        mode: "power": double until memory ends; "binsearch": then search between what fits and what does not.
        steps_per_trial: Updates of each trial, at least 1.
        init_val: The first size, at least 1.
        max_trials: How many trials there may be, at least 1.
        batch_arg_name: Of the attribute or hyperparameter of the task or the data module that the loader is made with.
        margin: With "binsearch" this part less is used, from 0 to 1.

    Attributes:
        optimal_batch_size: The size; None: there was no search.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {"max_val": "It ends where a batch no longer fits, or after max_trials."}

    @checked
    def __init__(
        self,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
    ) -> None:
        self._settings: dict[str, Any] = {
            "mode": mode, "steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials,
            "batch_arg_name": batch_arg_name, "margin": margin,
        }  # fmt: skip
        self.optimal_batch_size: int | None = None

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Search, unless the run goes on from a checkpoint."""
        if stage == "fit":
            self.optimal_batch_size = None
            if trainer.run.checkpoint is None:
                self.optimal_batch_size = Tuner(trainer).scale_batch_size(task, **self._settings)

    def on_save_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Keep the size that was found."""
        checkpoint["found"] = self.optimal_batch_size

    def on_load_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Set the size that was found, before loaders are made."""
        self.optimal_batch_size = checkpoint["found"]
        if self.optimal_batch_size is not None:
            set_everywhere([task, trainer.datamodule], self._settings["batch_arg_name"], self.optimal_batch_size)


def _draw(curve: LearningRateCurve, directory: Path) -> None:
    curve.write(directory / "lr_find.csv")
    if importlib.util.find_spec("matplotlib") is not None:
        from matplotlib.figure import Figure

        curve.plot(suggest=True, ax=Figure().add_subplot()).savefig(directory / "lr_find.png", dpi=120)
