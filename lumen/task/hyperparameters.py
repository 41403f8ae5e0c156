"""`save_hyperparameters`: saves the constructor arguments of a task or a data module."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial, update_wrapper
from pathlib import PurePath
from types import FrameType, MappingProxyType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from lumen.errors import ConfigError
from lumen.internals.masking import References, mask_secrets


@final
class Hyperparameters(dict[str, Any]):
    """Dictionary whose entries are attributes too: `hparams.lr` is `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter is named {name!r}; the hyperparameters are: {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


if not TYPE_CHECKING:

    @final
    class class_only_method:
        """Decorator of a class method whose call on an object, which it would not change, is an error.

        Args:
            function: The function, whose first argument is the class.
        """

        def __init__(self, function: Callable[..., Any]) -> None:
            self._function = function
            update_wrapper(self, function)

        def __get__(self, instance: object, owner: type) -> Any:
            if instance is None:
                return MethodType(self._function, owner)
            return partial(self._refuse, owner)

        def _refuse(self, owner: type, *_: Any, **__: Any) -> NoReturn:
            name = self._function.__name__
            raise ConfigError(
                f"{name} returns a new object and does not change this one. Write {owner.__name__}.{name}(...), and "
                "use its result."
            )

else:
    class_only_method = classmethod


class HyperparametersMixin:
    """Mixin with `save_hyperparameters` and `hparams`, which `TaskModule` and `DataModule` have."""

    #: Hyperparameters that a config took from environment variables, by their path in `hparams`.
    _hparams_references: References = MappingProxyType({})

    @property
    def hparams(self) -> Hyperparameters:
        """Hyperparameters collected by `save_hyperparameters`; saved in every checkpoint."""
        return self.__dict__.setdefault("_hparams", Hyperparameters())  # type: ignore[no-any-return]

    @property
    def hparams_initial(self) -> Hyperparameters:
        """Entries of `hparams` after `save_hyperparameters`, without later changes."""
        return Hyperparameters(self.__dict__.get("hparams_as_saved", {}))

    def _set_references(self, references: References) -> None:
        """Record which hyperparameters a config took from environment variables."""
        self._hparams_references = {**self._hparams_references, **references}

    def save_hyperparameters(
        self,
        *names: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of `__init__` in `self.hparams` and in every checkpoint. Call it inside `__init__`.

        Lumen collects the arguments of all classes of the object, even if a base class makes the call.

        Args:
            names: Names of the only arguments to save; or instead one dictionary, namespace or dataclass to save as it
                is.
            ignore: Names to omit, also in the calls of base classes: arguments that are not plain data, such as
                modules.
            frame: Frame of `__init__`, needed if a helper of `__init__` makes this call. Default: the caller's frame.
            logger: False: save them in `hparams` and in checkpoints only, not in the records of loggers.

        Raises:
            ConfigError: `__init__` has no such argument, or the given object has no named entries.
        """
        present_frame = inspect.currentframe()
        collected = _find_constructor_arguments(self, frame or (present_frame.f_back if present_frame else None))
        ignored = self.__dict__.setdefault("hparams_ignored", set[str]())
        ignored |= {ignore} if isinstance(ignore, str) else set(ignore or ())
        if names and not isinstance(names[0], str):
            collected = _as_dictionary(names[0])
        elif names:
            if unknown := [name for name in names if name not in collected]:
                raise ConfigError(
                    f"save_hyperparameters: {type(self).__name__} has no argument {', '.join(unknown)}; the "
                    f"arguments are: {', '.join(collected) or 'none'}."
                )
            collected = {name: collected[name] for name in names}
        self.hparams.update(collected)
        unlogged = self.__dict__.setdefault("hparams_unlogged", set[str]())
        unlogged.difference_update(collected) if logger else unlogged.update(collected)
        self.remove_ignored_hparams(ignored)
        self.__dict__["hparams_as_saved"] = {
            name: deepcopy(value) if type(value) in (dict, list, set) else value for name, value in self.hparams.items()
        }

    def remove_ignored_hparams(self, ignore_list: Iterable[str]) -> None:
        """Remove hyperparameters that a base class has saved.

        Args:
            ignore_list: The names of the hyperparameters.
        """
        for name in ignore_list:
            self.hparams.pop(name, None)

    @classmethod
    def _build_from_checkpoint(cls, checkpoint_path: str | PurePath, hparams_file: None, **options: Any) -> Self:
        """Build an object of the class from a checkpoint, with the options of `load_from_checkpoint`.

        Raises:
            ConfigError: `hparams_file` was given.
        """
        if hparams_file is not None:
            raise ConfigError(
                f"load_from_checkpoint: hparams_file={str(hparams_file)!r} is not supported: a checkpoint contains "
                "its hyperparameters. Pass other values by name, load_from_checkpoint(PATH, lr=0.1), or "
                "**yaml.safe_load(open(FILE))."
            )
        from lumen.checkpoint.load.load_weights import (
            build_from_checkpoint,  # imported here: checkpoints are a layer above
        )

        return build_from_checkpoint(cls, checkpoint_path, **options)  # type: ignore[type-var]  # a task or a data module


def get_recorded_hparams(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return hyperparameters for files: secrets are masked, references to environment variables kept."""
    return mask_secrets(owner.hparams, references=owner._hparams_references)  # type: ignore[no-any-return]


def get_logged_hparams(owner: HyperparametersMixin) -> dict[str, Any]:
    """Return the hyperparameters for loggers."""
    unlogged = vars(owner).get("hparams_unlogged", ())
    return {name: value for name, value in get_recorded_hparams(owner).items() if name not in unlogged}


def _as_dictionary(hparams: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(hparams) and not isinstance(hparams, type):
        return dataclasses.asdict(hparams)
    if isinstance(hparams, Mapping):
        return dict(hparams)
    if isinstance(hparams, SimpleNamespace | Namespace):
        return dict(vars(hparams))
    raise ConfigError(
        "save_hyperparameters: expected names of arguments, or a dictionary, namespace or dataclass, found "
        f"{hparams!r}. Call save_hyperparameters() to save all arguments of __init__."
    )


def _find_constructor_arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of the object's `__init__` calls on the stack; a subclass's value wins."""
    collected: dict[str, Any] = {}
    while frame is not None:
        names, _, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is owner:
            collected.update({name: values[name] for name in names[1:]})
            if keywords:
                collected.pop(keywords, None)
                for name, value in values[keywords].items():
                    collected.setdefault(name, value)
        frame = frame.f_back
    return collected
