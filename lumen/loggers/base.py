"""`Logger`, the base class of loggers, and conversions of values for them."""

from __future__ import annotations

import inspect
import operator
import warnings
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import nn

from lumen.errors import ConfigError
from lumen.errors.arguments import LightningAttributeErrors, describe_type, expand_path

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]


@final
class NullWriter:
    """Object whose every attribute and call does nothing; replaces a writer where no record is written."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Copying and pickling look for special methods.
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NullWriter:
        """Do nothing."""
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing, as for `experiment.config["lr"] = 0.1`."""

    def __getitem__(self, key: Any) -> NullWriter:
        """Return this object, as for `experiment.config["lr"]`."""
        return self

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())

    def __enter__(self) -> NullWriter:
        """Begin nothing, as for `with experiment.train():`."""
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""


@final
class DeferredWriter:
    """Writer of a logger before `fit`: keeps calls and assignments, which `replay` makes on the actual writer."""

    _owner: str
    _calls: list[Any]
    _path: tuple[str, ...]

    def __init__(self, owner: str, calls: list[Any] | None = None, path: tuple[str, ...] = ()) -> None:
        for key, value in {"_owner": owner, "_calls": [] if calls is None else calls, "_path": path}.items():
            object.__setattr__(self, key, value)

    def __getattr__(self, name: str) -> DeferredWriter:
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredWriter(self._owner, self._calls, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> NullWriter:
        """Keep a call."""
        self._calls.append((self._path, args, kwargs))
        return NullWriter()

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append(((*self._path, "__setattr__"), (name, value), {}))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append(((*self._path, "__setitem__"), (key, value), {}))

    def __str__(self) -> str:
        """Refuse to be a part of a name or a path.

        Raises:
            ConfigError: Always, because the value does not exist yet.
        """
        raise ConfigError(
            f"{'.'.join((self._owner, 'experiment', *self._path))} has no value before fit. Read it in on_fit_start or "
            "later, or choose a name yourself: the arguments of the logger, or Trainer(name=...)."
        )

    __fspath__ = __str__

    def __getitem__(self, key: Any) -> Any:
        """Refuse to read a value, as `__str__` does."""
        return str(self)

    def replay(self, writer: Any) -> None:
        """Make the kept calls."""
        calls, self._calls[:] = [*self._calls], []
        for path, args, kwargs in calls:
            operator.attrgetter(".".join(path))(writer)(*args, **kwargs)


def as_hyperparameters(params: Any) -> Mapping[str, Any]:
    """Return hyperparameters as a mapping: those of a mapping, of a namespace or dataclass, or none for None.

    Raises:
        ConfigError: The argument is of a different type.
    """
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return params
    if not hasattr(params, "__dict__"):
        raise ConfigError(
            f"log_hyperparams: expected a dictionary or a namespace, found {describe_type(params)}. Write "
            "logger.log_hyperparams({'lr': lr})."
        )
    return dict(vars(params))


def explain_wrong_calls(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a logging method of users: a wrong call raises an error that shows the right call.

    Wrong calls typically use the signature of Lightning's method of the same name. A call without a step, or with None,
    gets the step of the run.

    Raises:
        ConfigError: Raised by the decorated method: arguments have wrong names or are missing, or the step is not an
            integer.
    """
    signature, name = inspect.signature(method), method.__name__
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty][1:]
    words = ["step=self.global_step" if each == "step" else each for each in needed]
    right_call = f"logger.{name}({', '.join(words)})"

    @wraps(method)
    def checked(self: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            given = dict(signature.bind_partial(self, *args, **kwargs).arguments)
            if "step" in signature.parameters and given.get("step") is None:
                given["step"] = 0 if self.progress is None else self.progress.step
            if (step := signature.bind(**given).arguments.get("step")) is not None:
                given["step"] = operator.index(step)
        except TypeError as error:
            raise ConfigError(
                f"{type(self).__name__}.{name}: {error}. Write {right_call}. For other features of the library, use "
                "logger.experiment."
            ) from None
        if self.has_ended:
            self.warn_of_end(name)
        else:
            method(**given)

    return checked


class Logger(LightningAttributeErrors, ABC):
    """Base class of loggers. Only the first process of a run writes a record, in `fit`, `validate` and `test`.

    A subclass must define `log_metrics`; all other methods are optional. Lumen calls `log_metrics` and `log_system`.
    Your code logs images, histograms and text, to every logger of the run:

        for logger in self.trainer.loggers:
            logger.log_image("reconstruction", image, self.global_step)

    A logger that does not support a kind of value ignores it. In all other processes, and outside of a run, every
    logger ignores all values; after a run with a warning.
    """

    #: Directory of the newest record, in every process; the trainer sets it.
    run_directory: Path | None = None
    #: Counters of the newest `fit`, whose `step` is the default step of values that your code logs.
    progress: Any = None
    #: True in the first process if the newest run has ended, so that the logger writes nothing.
    has_ended = False
    has_warned = False  # True if a call outside of a run has caused its warning

    def note_state(self, *, has_ended: bool) -> None:
        """Note in the first process that a record begins or has ended."""
        self.has_ended, self.has_warned = has_ended, False

    def warn_of_end(self, name: str) -> None:
        """Warn once that a call after the end of the run does nothing."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(  # Outside of a run Lumen's logger shows nothing.
                f"{type(self).__name__}.{name} does nothing here, because the run has ended. Call it in a hook of fit, "
                f"validate or test, such as on_fit_end or on_test_end{self.describe_library_use()}.",
                stacklevel=4 if name == "experiment" else 3,
            )

    def describe_library_use(self) -> str:
        """Return how the library itself continues the record, as ", or write ..."; "" if it cannot."""
        return ""

    @property
    def state_key(self) -> str:
        """Name of this logger's state in checkpoints; loggers of one class that have a state need different keys."""
        return type(self).__qualname__

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values that repeat exactly in a repeated run.

        A logger may have a third parameter, `epoch`: the number of completed epochs.

        Args:
            metrics: Values by name.
            step: Optimizer updates completed.
        """

    def open(self, directory: Path, *, resumed: bool) -> None:
        """Begin the record in a run directory.

        Args:
            directory: The run directory; it exists.
            resumed: True: keep the existing record, which `load_state_dict` cuts back. False: start over. The value is
                also False if the checkpoint has no state of this record, since the whole record then comes after the
                checkpoint.
        """

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Record timings and memory, which differ between repeated runs."""

    @explain_wrong_calls
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the hyperparameters; Lumen calls this whenever `fit` starts, also when it resumes.

        Args:
            params: Hyperparameters of the task under the key `model`, of the data module under the key `data`.
        """

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Record the graph of a module; Lumen calls this with the task whenever `fit` starts.

        Args:
            model: The module, such as the task.
            input_array: Arguments of its `forward`: a tensor or a tuple. Default: `model.example_input_array`.
        """

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Record an image.

        Args:
            name: Name of the series of images, such as "reconstruction".
            image: An image of shape (height, width) or (channels, height, width) with 1 (grey), 3 (RGB) or 4 (RGBA)
                channels; uint8 of 0 to 255, bool, or floating point of 0 to 1 (values outside are clipped).
            step: Optimizer updates completed. Default: the step of the run.

        Raises:
            ConfigError: The image has a different shape or dtype.
        """

    @explain_wrong_calls
    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Record a histogram of values.

        Args:
            name: Name of the series of histograms, such as "weights".
            values: An array of any shape and real dtype. Values that are not finite, or 1e20 and beyond, are omitted.
            step: Optimizer updates completed.
        """

    @explain_wrong_calls
    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text in Markdown.

        Args:
            name: Name of the series of texts, such as "samples".
            text: Markdown of any length.
            step: Optimizer updates completed.
        """

    @property
    def experiment(self) -> Any:
        """Object that writes the record, for features that `Logger` lacks; None if the logger has no such object.

        Outside of a run, and in all processes but the first, calls on the object do nothing.
        """
        return None

    def _get_idle_writer(self, deferred: DeferredWriter) -> DeferredWriter | NullWriter:
        """Return the object for `experiment` outside of a run; after a run with a warning."""
        if self.has_ended:
            self.warn_of_end("experiment")
        return deferred if self.run_directory is None else NullWriter()

    @property
    def save_dir(self) -> str | None:
        """Parent directory of the run directories; None before `fit`."""
        return None if self.run_directory is None else str(self.run_directory.parent)

    @property
    def name(self) -> str | None:
        """Name of the record, by default of the run directory; None before `fit`."""
        return None if self.run_directory is None else self.run_directory.name

    @property
    def version(self) -> int | str | None:
        """Identifier among records of the same name, such as an id given by a service; None without an identifier."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Run directory; None before `fit`."""
        return self.log_dir

    @property
    def log_dir(self) -> str | None:
        """Run directory; None before `fit`."""
        return None if self.run_directory is None else str(self.run_directory)

    def save(self) -> None:
        """Write the whole record to the disk; Lumen calls this before each checkpoint."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Act on a complete checkpoint.

        Args:
            checkpoint_callback: The `ModelCheckpoint` that saved the checkpoint: `last_model_path` is its directory.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the record as plain data, for `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the record back to a saved length, so that a resumed run neither repeats nor loses a value."""

    def finalize(self, status: str) -> None:
        """End the record when the run ends; Lumen calls this once.

        Args:
            status: "success"; "failed": the run ended with an error; "interrupted": the run was asked to stop, and can
                be resumed.
        """


class RunDirectoryLogger(Logger):
    """Base class of loggers that write into the run directory, which their arguments may choose.

    The arguments of `Trainer` have priority. If several loggers choose a directory, the first logger decides.

    Args:
        save_dir: Default of `Trainer(default_root_dir=...)`.
        name: Default of `Trainer(name=...)`. With a `version` the run is in the directory of this name.
        version: Default of `Trainer(name=...)`: a name, or a number N for "version_N".
    """

    def __init__(
        self, save_dir: str | Path | None = None, name: str | None = None, version: int | str | None = None
    ) -> None:
        self._given = save_dir, name or None, None if version == "" else version

    @property
    def chosen_place(self) -> tuple[Path | None, str | None]:
        """Parent of the run directory, and name of the run, where the arguments choose them."""
        save_dir, name, version = self._given
        parent = None if save_dir is None else expand_path(save_dir or ".")
        if version is None:
            return parent, name
        return (parent or Path()) / (name or ""), version if isinstance(version, str) else f"version_{version}"

    @property
    def save_dir(self) -> str | None:
        """The argument `save_dir`, else the parent of the run directory; None before `fit`."""
        return super().save_dir if self._given[0] is None else str(self._given[0])

    @property
    def name(self) -> str | None:
        """The argument `name`, else the name of the run directory; None before `fit`."""
        return self._given[1] or super().name

    @property
    def version(self) -> int | str | None:
        """The argument `version`, or None."""
        return self._given[2]


def flatten_entries(
    values: Mapping[str, Any] | Namespace, separator: str, above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested dictionaries, with names joined by a separator."""
    for name, value in (vars(values) if isinstance(values, Namespace) else values).items():
        if isinstance(value, Mapping | Namespace):
            yield from flatten_entries(value, separator, f"{above}{name}{separator}")
        else:
            yield f"{above}{name}", value


def as_array(values: Array) -> np.ndarray[Any, Any]:
    """Return a tensor as a numpy array on the CPU; bfloat16, which numpy lacks, becomes float32."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def as_image_array(name: str, image: Array) -> np.ndarray[Any, Any]:
    """Return an argument of `Logger.log_image` as an array of shape (channels, height, width).

    Raises:
        ConfigError: The image has a different shape or dtype, or is not an array.
    """
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise ConfigError(
            f"log_image({name!r}): expected a tensor or an array, found {describe_type(image)}. Call log_image once "
            "for each image. For an image of PIL, write np.array(image).transpose(2, 0, 1)."
        )
    pixels = as_array(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    if (
        pixels.ndim != 3
        or pixels.shape[0] not in (1, 3, 4)
        or not (pixels.dtype in (np.uint8, np.bool_) or np.issubdtype(pixels.dtype, np.floating))
    ):
        raise ConfigError(
            f"log_image({name!r}): expected (height, width) or (channels, height, width) with 1, 3 or 4 channels, "
            f"of uint8, bool or floating point; found shape {tuple(image.shape)} of {image.dtype}."
        )
    return pixels


def as_uint8_image(name: str, image: Array) -> np.ndarray[Any, Any]:
    """Return an argument of `Logger.log_image` as a uint8 array for image files.

    The shape is (height, width, channels), or (height, width) for grey images.

    Raises:
        ConfigError: The image has a different shape or dtype.
    """
    pixels = as_image_array(name, image)
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels.astype(np.float32), 0.0, 1.0) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
