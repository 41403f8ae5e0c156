"""`Logger`, the base class of loggers, and conversions of values for them."""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar, final

import numpy as np
import torch

from lumen.errors import ConfigError
from lumen.errors.arguments import LightningAttributeErrors, describe_type

P = ParamSpec("P")
S = TypeVar("S")

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


def explain_wrong_calls(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Decorate a logging method of users: a wrong call raises an error that shows the right call.

    Wrong calls typically use the signature of Lightning's method of the same name.

    Raises:
        ConfigError: Raised by the decorated method: arguments have wrong names or are missing, or the step is not an
            integer.
    """
    signature, name = inspect.signature(method), method.__name__
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty][1:]
    words = ["step=self.global_step" if each == "step" else each for each in needed]
    right_call = f"logger.{name}({', '.join(words)})"

    @wraps(method)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            operator.index(signature.bind(self, *args, **kwargs).arguments.get("step", 0))
        except TypeError as error:
            raise ConfigError(
                f"{type(self).__name__}.{name}: {error}. Write {right_call}. For other features of the library, use "
                "logger.experiment."
            ) from None
        method(self, *args, **kwargs)

    return checked


class Logger(LightningAttributeErrors, ABC):
    """Base class of loggers. Only the first process of a run writes a record, and only in `fit`.

    A subclass must define `log_metrics`; all other methods are optional. Lumen calls `log_metrics` and `log_system`.
    Your code logs images, histograms and text, to every logger of the run:

        for logger in self.trainer.loggers:
            logger.log_image("reconstruction", image, self.global_step)

    A logger that does not support a kind of value ignores it. Outside of `fit`, and in all other processes, every
    logger ignores all values.
    """

    ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "log_graph": "With a TensorBoardLogger in fit, write logger.experiment.add_graph(task, batch).",
    }

    #: Run directory of the newest `fit`, in every process; the trainer sets it.
    run_directory: Path | None = None

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

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Record an image.

        Args:
            name: Name of the series of images, such as "reconstruction".
            image: An image of shape (height, width) or (channels, height, width) with 1 (grey), 3 (RGB) or 4 (RGBA)
                channels; uint8 of 0 to 255, bool, or floating point of 0 to 1 (values outside are clipped).
            step: Optimizer updates completed.

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

        Outside of `fit`, and in all processes but the first, calls on the object do nothing.
        """
        return None

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
