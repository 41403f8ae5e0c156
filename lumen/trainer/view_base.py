"""ViewBase: the run that a trainer lets others look at."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lumen.callbacks import Callback, ModelCheckpoint
from lumen.errors import ConfigError
from lumen.errors.lightning_names import ATTRIBUTES
from lumen.loggers import Logger
from lumen.run.plan import Plan
from lumen.run.run import Run
from lumen.strategies import Strategy


class ViewBase(ABC):
    """What the parts of `RunView` share: the run, and words for a name that there is not.

    Attributes:
        plan: How long the run is and what happens when.
        strategy: On which devices tasks lie, and how a step is computed there.
        callbacks: Those that were given, and the default ones.
        loggers: Where its record goes beside `metrics.csv`, or that alone; empty: there is none.
        run_directory: Where it writes; None if it writes nothing.
    """

    plan: Plan
    strategy: Strategy
    callbacks: list[Callback]
    loggers: list[Logger]
    run_directory: Path | None
    _run: Run | None
    _given_optimizers: Callable[[], Any] | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Say what is read in place of an attribute that only Lightning's trainer has.

        Raises:
            AttributeError: There is none of this name.
        """
        if hasattr(type(self), name):  # one that has failed for want of another
            object.__getattribute__(self, name)
        near = difflib.get_close_matches(name, [each for each in dir(type(self)) if not each.startswith("_")])
        hint = ATTRIBUTES.get(name) or (f"Did you mean {' or '.join(near)}?" if near else "")
        raise AttributeError(f"{type(self).__name__} has no attribute {name}. {hint}".rstrip())

    @property
    def run(self) -> Run:
        """The run in progress, or the last one.

        Raises:
            ConfigError: None has been started.
        """
        if self._run is None:
            raise ConfigError("this trainer has not started a run yet; call fit, validate, test or predict.")
        return self._run

    @property
    @abstractmethod
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The `ModelCheckpoint` that says which checkpoint is best."""
