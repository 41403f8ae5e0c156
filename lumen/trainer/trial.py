"""Trial: a training of a copy, which leaves no trace in what it is a copy of."""

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
from lumen.random import preserved_generators
from lumen.task.compile import Compilation
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.logs import filtered
from lumen.trainer.trainer import Trainer


@final
class Trials:
    """Trains copies of a task as a trainer would, on its device, for a few steps and without its callbacks and records.

    Args:
        trainer: Whose settings count; it may be in a run, whose data and seed are taken then.
        task: The one whose copies are trained; it is left as it is.
        data: A loader, several, or a data module; None: those of the run in progress, else the task's own.
        configure_optimizers: Makes the optimizer of a copy; None: its own method does.

    Attributes:
        given: What makes the optimizer of the run in progress, if `fit` was given it in place of the task's method.
        owners: The task, and the data module if there is one.

    Raises:
        ConfigError: There are several processes.
    """

    def __init__(
        self, trainer: Trainer, task: TaskModule, data: Any, configure_optimizers: Callable[[TaskModule], Any] | None
    ) -> None:
        if trainer.world_size > 1:
            raise ConfigError(
                f"a search for a learning rate or a batch size runs on one process, but the trainer has "
                f"{trainer.world_size}. Search with devices: 1, and train with what it finds: with the same "
                "global_batch_size the training is the same on any number of processes."
            )
        self._trainer, self._task, self._configure = trainer, task, configure_optimizers
        run = trainer.run if trainer._status == "running" else None
        self.given = None if run is None or configure_optimizers is not None else trainer._given_optimizers
        self._seed, self._data = trainer.seed if run is None else run.seed, data
        if run is not None and data is None:
            self._data = run.loaders.datamodule or (run.loaders.given or (None, None))[0]
        self.owners: list[TaskModule | DataModule] = [task]
        if isinstance(self._data, DataModule):
            self.owners.append(self._data)

    def run(self, callback: Callback, settings: dict[str, Any] | None = None, **plan: Any) -> None:
        """Train a copy.

        Args:
            callback: The only callback of that training.
            settings: Attributes and hyperparameters to set on the copies of the task and the data module first.
            plan: What differs from the trainer's plan.
        """
        self.free()
        trainer, task, data = self._trial(callback, plan), _copied(self._task), _copied_data(self._data)
        for name, value in (settings or {}).items():
            set_everywhere([task, data], name, value)
        configure = copy.deepcopy(self.given, {id(self._task): task})  # as the run's is made
        if configure is not None and configure is self.given:
            raise ConfigError(
                "a search trains a copy of the task, but the function that fit was given as configure_optimizers knows "
                "the task alone. Give functools.partial(function, task)."
            )
        if self._configure is not None:
            configure = partial(self._configure, task)
        with preserved_generators(), filtered([*_log.handlers], lambda record: record.levelno >= logging.ERROR):
            trainer.fit(task, data, configure_optimizers=configure)

    def free(self) -> None:
        """Give the memory of trials back, once nobody holds what they have failed by."""
        gc.collect()  # tensors of a failed step are in circles with its traceback
        empty_device_cache(self._trainer.strategy.device)

    def _trial(self, callback: Callback, plan: dict[str, Any]) -> Trainer:
        trainer = copy.copy(self._trainer)
        trainer.strategy = copy.copy(trainer.strategy)  # it holds what it has placed
        if not isinstance(trainer.precision, (str, int, type)):
            trainer.precision = copy.copy(trainer.precision)  # `setup` gives it a state of its own
        trainer.compilation = Compilation(self._trainer.compilation.setting)
        plan = {"max_epochs": None, "max_time_s": None, "min_steps": 0, "min_epochs": 0} | plan
        limits = trainer.plan.limits | {"validate": 0}
        trainer._leave_no_traces([callback], "ERROR", **plan, sanity_batches=0, limits=limits)
        trainer.origin = trainer._origin = trainer.origin.anew()
        trainer.fast_dev_run, trainer.seed = 1, self._seed  # no directory, and no word on schedules
        trainer.run_directory, trainer._run, trainer._status = None, None, "initializing"
        return trainer


def set_everywhere(owners: list[Any], name: str, value: Any) -> list[str]:
    """Set an attribute and a hyperparameter where there is one. Returns where, in words."""
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


def has_anywhere(owners: list[Any], name: str) -> bool:
    """Whether one of them has an attribute or a hyperparameter of this name."""
    return any(hasattr(owner, name) or name in owner.hparams for owner in owners)


def _copied(task: TaskModule) -> TaskModule:
    try:
        return copy.deepcopy(task, _shared(vars(task)))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"a search trains a copy of the task, but {type(task).__name__} cannot be copied: {error}. Make what "
            "cannot be copied in setup or in configure_model."
        ) from error


def _copied_data(data: Any) -> Any:
    """Loaders or a data module of their own, since streams move; their data sets with indices are the same objects."""
    try:
        return copy.deepcopy(data, _shared(data))
    except (RuntimeError, TypeError) as error:
        _log.warning(
            "a search reads the data itself, which cannot be copied (%s): what keeps a place in it is moved", error
        )
        return data


def _shared(value: Any) -> dict[int, Any]:
    """By their ids, the data sets with indices that loaders, a data module or a collection of such things hold."""
    if isinstance(value, Dataset) and not isinstance(value, IterableDataset):
        return {id(value): value}
    held = vars(value) if isinstance(value, (DataLoader, DataModule, CombinedLoader)) else value
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
    return {number: each for found in map(_shared, inside) for number, each in found.items()}
