"""ViewBase: the run that a trainer lets others look at."""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, final

from lumen.callbacks import Callback, ModelCheckpoint
from lumen.errors import ConfigError
from lumen.errors.lightning_names import ATTRIBUTES
from lumen.loggers import Logger
from lumen.run.plan import Plan, Progress
from lumen.run.run import Run
from lumen.strategies import Strategy

Status = Literal["initializing", "running", "finished", "interrupted"]
#: Lightning's names of what a run does at a moment, by Lumen's.
_STAGES = {"fit": "train", "sanity": "sanity_check"}


@final
@dataclass(frozen=True)
class TrainerState:
    """What a trainer does, in plain words, which compare equal to Lightning's enumerations.

    Attributes:
        status: "initializing" before the first run, "running", "finished"; "interrupted" by an error or a stop request.
        fn: The call that is running or was the last one: "fit", "validate", "test" or "predict"; None before it.
        stage: What it does now: "train", "sanity_check", "validate", "test" or "predict"; None when it is over.
    """

    status: Status
    fn: str | None
    stage: str | None

    @property
    def finished(self) -> bool:
        """The last run has ended as it should."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """No run is in progress, but there was one."""
        return self.status in ("finished", "interrupted")


def stage_name(stage: str) -> str | None:
    """Lightning's name of a stage of a run; None for "", which is that of a run that is over."""
    return _STAGES.get(stage, stage) or None


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
    _status: Status
    _fn: str | None
    _given_optimizers: Callable[[], Any] | None = None
    _counted: Progress | None = None  # of the newest fit
    _command = ""  # first words of a command that trains, such as "lumen fit"

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

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __getstate__(self) -> Any:
        """Refuse to pickle a run, whose data, devices and processes stay where they are.

        Raises:
            ConfigError: The trainer has run.
        """
        if self._run is not None:
            raise ConfigError(
                "a Trainer that has run cannot be pickled. Pickle what is needed of it, such as "
                "trainer.callback_metrics or task.state_dict(), or make a new Trainer with the same arguments."
            )
        return super().__getstate__()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what a run would never read.

        Raises:
            ConfigError: It is an argument, or what a run tells; or it is an attribute of Lightning's trainer alone.
        """
        found = getattr(type(self), name, None)
        if name in ATTRIBUTES or (isinstance(found, property) and found.fset is None):
            given = name in inspect.signature(type(self).__init__).parameters
            hint = f"Give it to Trainer({name}=...)." if given else ATTRIBUTES.get(name, "It can only be read.")
            raise ConfigError(f"{type(self).__name__}.{name} cannot be set. {hint}")
        super().__setattr__(name, value)

    @classmethod
    def add_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Not here: a command line is `lumen.CLI`.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError(
            "Trainer.add_argparse_args is of Lightning 1. Use lumen.CLI, which has the trainer's options."
        )

    @classmethod
    def from_argparse_args(cls, *_: Any, **__: Any) -> NoReturn:
        """Not here; see `add_argparse_args`.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError("Trainer.from_argparse_args is of Lightning 1. Use lumen.CLI, or write Trainer(**settings).")

    @property
    def run(self) -> Run:
        """The run in progress, or the last one: its parts, for callbacks that need more than the trainer shows.

        The parts (`progress`, `values`, `ending`, `saves`, ...) are listed in `lumen.run.run.Run`. Their members may
        change from one version to the next.

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
