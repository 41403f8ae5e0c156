"""Trials: short trainings of a copy that leave the original unchanged."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lumen.callbacks import Callback
from lumen.console import logger as _log
from lumen.data.combined import CombinedLoader
from lumen.errors import ConfigError
from lumen.internals.memory import empty_device_cache
from lumen.random import preserve_generators
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.logs import filter_handlers
from lumen.trainer.trainer import Trainer


@final
class TrialRunner:
    """Trainings of copies of a task, for a few steps, on the trainer's device, without its callbacks and loggers.

    Args:
        trainer: The trainer whose settings apply. If it is in a run, the trials use the data and seed of this run.
        task: The task to copy; it stays unchanged.
        data: A loader, several, or a data module; None: the data of the run in progress, else the task's loaders.
        configure_optimizers: Function that builds the optimizer of a copy; None: the task's own method.

    Attributes:
        run_configure: The function passed to `fit` that replaces the task's `configure_optimizers`, or None.
        owners: The task, and the data module if any.

    Raises:
        ConfigError: The trainer has several processes.
    """

    def __init__(
        self, trainer: Trainer, task: TaskModule, data: Any, configure_optimizers: Callable[[TaskModule], Any] | None
    ) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"a search for a learning rate or a batch size runs on one process, but the trainer has "
                f"{trainer.world_size}. Search with devices: 1, and train with the value that it finds. With the same "
                "global_batch_size the training is the same on any number of processes."
            )
        self._trainer, self._task, self._configure = trainer, task, configure_optimizers
        run = trainer.run if trainer._status == "running" else None
        self.run_configure = None if run is None or configure_optimizers is not None else trainer._configure_optimizers
        self._seed, self._data = trainer.seed if run is None else run.seed, data
        if run is not None and data is None:
            self._data = run.loaders.datamodule or (run.loaders.user_loaders or (None, None))[0]
        self.owners: list[TaskModule | DataModule] = [task]
        if isinstance(self._data, DataModule):
            self.owners.append(self._data)

    def run_trial(self, callback: Callback, settings: dict[str, Any] | None = None, **plan: Any) -> None:
        """Train a copy.

        Args:
            callback: The only callback of this training.
            settings: Attributes and hyperparameters to set first, on the copies of the task and the data module.
            plan: Fields that differ from the trainer's plan.
        """
        self.free_memory()
        trainer, task, data = self._make_trainer(callback, plan), _copy_task(self._task), _copy_data(self._data)
        for name, value in (settings or {}).items():
            set_on_owners([task, data], name, value)
        configure = copy.deepcopy(
            self.run_configure, {id(self._task): task}
        )  # the copy's optimizer is built like the run's
        if configure is not None and configure is self.run_configure:
            raise ConfigError(
                "a search trains a copy of the task, but the function passed to fit as configure_optimizers refers to "
                "the original task. Pass functools.partial(function, task)."
            )
        if self._configure is not None:
            configure = partial(self._configure, task)
        with preserve_generators(), filter_handlers([*_log.handlers], lambda record: record.levelno >= logging.ERROR):
            trainer.fit(task, data, configure_optimizers=configure)

    def free_memory(self) -> None:
        """Free the memory of trials, after their errors are no longer referenced."""
        gc.collect()  # tensors of a failed step and its traceback form reference cycles
        empty_device_cache(self._trainer.strategy.device)

    def _make_trainer(self, callback: Callback, plan: dict[str, Any]) -> Trainer:
        trainer = copy.copy(self._trainer)
        trainer.strategy = copy.copy(trainer.strategy)  # because a strategy refers to the modules that it has placed
        if not isinstance(trainer.precision, (str, int, type)):
            trainer.precision = copy.copy(trainer.precision)  # because `setup` changes its state
        trainer.compilation = Compilation(self._trainer.compilation.setting)
        plan = {"max_epochs": None, "max_time_s": None, "min_steps": 0, "min_epochs": 0} | plan
        limits = trainer.plan.limits | {"validate": 0}
        trainer._disable_side_effects([callback], "ERROR", **plan, sanity_batches=0, limits=limits)
        trainer.origin = trainer._origin = trainer.origin.for_trial()
        trainer.fast_dev_run, trainer.seed = 1, self._seed  # no directory, and no warnings about schedules
        trainer.run_directory, trainer._run, trainer._status = None, None, "initializing"
        return trainer


def set_on_owners(owners: list[Any], name: str, value: Any) -> list[str]:
    """Set an attribute and a hyperparameter on all owners that have it, and return the changed places in words."""
    found = []
    for owner in owners:
        if not isinstance(owner, (TaskModule, DataModule)):
            continue
        if hasattr(owner, name):
            setattr(owner, name, value)
            found.append(f"{type(owner).__name__}.{name}")
        if name in owner.hparams:
            owner.hparams[name] = value
            found.append(f"{type(owner).__name__}.hparams.{name}")
    return found


def has_on_owners(owners: list[Any], name: str) -> bool:
    """Return True if an owner has an attribute or a hyperparameter of this name."""
    return any(hasattr(owner, name) or name in owner.hparams for owner in owners)


def _copy_task(task: TaskModule) -> TaskModule:
    try:
        return copy.deepcopy(task, _find_shared_datasets(vars(task)))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"a search trains a copy of the task, but {type(task).__name__} cannot be copied: {error}. Create the "
            "attribute that cannot be copied in setup or in configure_model."
        ) from error


def _copy_data(data: Any) -> Any:
    """Copy loaders or a data module, because streams advance; copies share map-style data sets."""
    try:
        return copy.deepcopy(data, _find_shared_datasets(data))
    except (RuntimeError, TypeError) as error:
        _log.warning("could not copy the dataloader (%s); the search advances its iterators", error)
        return data


def _find_shared_datasets(value: Any) -> dict[int, Any]:
    """Return, by id, the map-style data sets in loaders, a data module, or collections of these."""
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        return {id(value): value}
    held = vars(value) if isinstance(value, (DataLoader, DataModule, CombinedLoader)) else value
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
    return {number: each for found in map(_find_shared_datasets, inside) for number, each in found.items()}
