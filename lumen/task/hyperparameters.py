"""`save_hyperparameters`: the arguments that a task or a data module was built with."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import Any, Self, final

from lumen.errors import ConfigError
from lumen.internals.masking import References, masked


@final
class Hyperparameters(dict[str, Any]):
    """A dictionary whose entries are attributes too: `hparams.lr` is `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter is named {name!r}; there are: {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HasHyperparameters:
    """Mixin of `TaskModule` and `DataModule`."""

    #: The hyperparameters that a config took from the environment, by their place in `hparams`.
    _hparams_references: References = MappingProxyType({})

    @property
    def hparams(self) -> Hyperparameters:
        """What `save_hyperparameters` collected; saved in every checkpoint."""
        return self.__dict__.setdefault("_hparams", Hyperparameters())  # type: ignore[no-any-return]

    @property
    def hparams_initial(self) -> Hyperparameters:
        """The entries of `hparams` as `save_hyperparameters` left them, whatever has been set since."""
        return Hyperparameters(self.__dict__.get("hparams_as_saved", {}))

    def _refer(self, references: References) -> None:
        """Note which hyperparameters a config took from the environment."""
        self._hparams_references = {**self._hparams_references, **references}

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of `__init__` in `self.hparams` and in every checkpoint. Call it inside `__init__`.

        The arguments of every class of the object are collected, also when a base class makes the call.

        Args:
            names: Only these arguments (names), or instead one dictionary, namespace or dataclass to keep as it is.
            ignore: Names to leave out, in the calls of base classes too: arguments that are no plain data, such as a
                module.
            frame: That of the `__init__`, where a function called there calls this. Default: the caller's.
            logger: False: keep them in `hparams` and in checkpoints alone, not in what loggers record.

        Raises:
            ConfigError: `__init__` has no such argument, or there is nothing to keep by name.
        """
        own = inspect.currentframe()
        collected = _constructor_arguments(self, frame or (own.f_back if own else None))
        ignored = self.__dict__.setdefault("hparams_ignored", set[str]())
        ignored |= {ignore} if isinstance(ignore, str) else set(ignore or ())
        if names and not isinstance(names[0], str):
            collected = _as_dictionary(names[0])
        elif names:
            if unknown := [name for name in names if name not in collected]:
                raise ConfigError(
                    f"save_hyperparameters: {type(self).__name__} has no argument {', '.join(unknown)}; "
                    f"there are: {', '.join(collected) or 'none'}."
                )
            collected = {name: collected[name] for name in names}
        self.hparams.update(collected)
        unlogged = self.__dict__.setdefault("hparams_unlogged", set[str]())
        unlogged.difference_update(collected) if logger else unlogged.update(collected)
        for name in ignored:
            self.hparams.pop(name, None)
        self.__dict__["hparams_as_saved"] = dict(self.hparams)

    @classmethod
    def _built_from(cls, checkpoint_path: str | PurePath, hparams_file: None, **how: Any) -> Self:
        """Build an object of the class from a checkpoint; `load_from_checkpoint` says how.

        Raises:
            ConfigError: A file of hyperparameters is given.
        """
        if hparams_file is not None:
            raise ConfigError(
                f"load_from_checkpoint: hparams_file={str(hparams_file)!r} is not read: a checkpoint has its "
                "hyperparameters. Give others by name, load_from_checkpoint(PATH, lr=0.1), or "
                "**yaml.safe_load(open(FILE))."
            )
        from lumen.checkpoint.load.load_weights import build  # the one way up: checkpoints are floors above

        return build(cls, checkpoint_path, **how)  # type: ignore[type-var]  # a task or a data module


def recorded_hparams(owner: HasHyperparameters) -> dict[str, Any]:
    """Return hyperparameters as files keep them: secrets are masked, references to the environment kept."""
    return masked(owner.hparams, references=owner._hparams_references)  # type: ignore[no-any-return]


def logged_hparams(owner: HasHyperparameters) -> dict[str, Any]:
    """Return the recorded hyperparameters that loggers get."""
    unlogged = vars(owner).get("hparams_unlogged", ())
    return {name: value for name, value in recorded_hparams(owner).items() if name not in unlogged}


def _as_dictionary(given: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, SimpleNamespace | Namespace):
        return dict(vars(given))
    raise ConfigError(
        f"save_hyperparameters: expected names of arguments, or a dictionary, namespace or dataclass, found {given!r}. "
        "Call it without arguments to keep those of __init__."
    )


def _constructor_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """Arguments of the `__init__` calls of one object, found on the stack; a subclass's value wins."""
    collected: dict[str, Any] = {}
    while frame is not None:
        names, _, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is owner:
            collected.update({name: values[name] for name in names[1:]})
            keyword_only = frame.f_code.co_varnames[len(names) : len(names) + frame.f_code.co_kwonlyargcount]
            collected.update({name: values[name] for name in keyword_only if name in values})
            if keywords:
                collected.pop(keywords, None)
                for name, value in values[keywords].items():
                    collected.setdefault(name, value)
        frame = frame.f_back
    return collected
