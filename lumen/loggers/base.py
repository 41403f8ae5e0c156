"""Logger: the base of what records a run's metrics, hyperparameters, images and text, and the forms of these."""

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
from lumen.errors.arguments import LacksLightnings, in_words

P = ParamSpec("P")
S = TypeVar("S")

Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]


@final
class Nothing:
    """An object whose every attribute and call does nothing; it stands for a writer where no record is written."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copying, pickling and the like
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        """Do nothing."""
        return self


def told(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Let a method that users call say how it is called, when it is called as one of that name in Lightning.

    Raises:
        ConfigError: By the method: its arguments have other names, some are missing, or the step is no whole number.
    """
    signature, name = inspect.signature(method), method.__name__
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty][1:]
    words = ["step=self.global_step" if each == "step" else each for each in needed]
    written = f"logger.{name}({', '.join(words)})"

    @wraps(method)
    def telling(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            operator.index(signature.bind(self, *args, **kwargs).arguments.get("step", 0))
        except TypeError as error:
            raise ConfigError(
                f"{type(self).__name__}.{name}: {error}. Write {written}; every logger has it. What "
                "the library has beyond that is in logger.experiment."
            ) from None
        method(self, *args, **kwargs)

    return telling


class Logger(LacksLightnings, ABC):
    """A record of a run. Only the first process of a run writes it, and only `fit` has one.

    One method must be written, `log_metrics`; what else a record can hold is up to it. `log_metrics` and `log_system`
    are called for you; images, histograms and text are yours to give, to every logger of the run:

        for logger in self.trainer.loggers:
            logger.log_image("reconstruction", image, self.global_step)

    A logger whose record cannot hold one of them ignores it, and so does every logger outside of `fit` and in the other
    processes.
    """

    ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "log_graph": "With a TensorBoardLogger in fit, write logger.experiment.add_graph(task, batch).",
    }

    #: Where the newest run of `fit` writes, in every process; its trainer sets it.
    run_directory: Path | None = None

    @property
    def state_key(self) -> str:
        """Name of this logger's state in checkpoints; loggers of one class that have a state need one each."""
        return type(self).__qualname__

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values that repeat exactly in a repeated run.

        A third parameter, `epoch`, is given the epochs completed so far to those that have it.

        Args:
            metrics: Values by name.
            step: Optimizer updates completed.
        """

    def open(self, directory: Path, *, resumed: bool) -> None:
        """Begin the record in a run directory.

        Args:
            directory: The run directory; it exists.
            resumed: True: keep what is recorded, for `load_state_dict` to cut it back; False: start over. A record that
                the checkpoint has no state of is started over too, since all of it comes after the checkpoint.
        """

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Record timings and memory, which no two runs share."""

    @told
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the hyperparameters; called whenever `fit` starts, a resumed one too.

        Args:
            params: Those of the task under `model`, those of the data module under `data`.
        """

    @told
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Record an image.

        Args:
            name: Name of the series of images, such as "reconstruction".
            image: Of shape (height, width) or (channels, height, width) with 1 (grey), 3 (RGB) or 4 (RGBA) channels;
                uint8 of 0 to 255, bool, or floating point of 0 to 1 (what is outside is clipped).
            step: Optimizer updates completed.

        Raises:
            ConfigError: The image has another shape or dtype.
        """

    @told
    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Record how values are distributed.

        Args:
            name: Name of the series of histograms, such as "weights".
            values: An array of any shape and real dtype. Values that are not finite, or 1e20 and beyond, are left out.
            step: Optimizer updates completed.
        """

    @told
    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text, in Markdown.

        Args:
            name: Name of the series of texts, such as "samples".
            text: Markdown, of any length.
            step: Optimizer updates completed.
        """

    @property
    def experiment(self) -> Any:
        """The object that writes the record, for what `Logger` does not offer; None if the logger has none.

        Where there is no record, outside of `fit` and in all processes but the first, what is called on it does
        nothing.
        """
        return None

    @property
    def save_dir(self) -> str | None:
        """Where the run directories lie; None before `fit`."""
        return None if self.run_directory is None else str(self.run_directory.parent)

    @property
    def name(self) -> str | None:
        """Name of the record: that of the run directory, if the logger has no other; None before `fit`."""
        return None if self.run_directory is None else self.run_directory.name

    @property
    def version(self) -> int | str | None:
        """What tells the record from others of its name, such as the id that a service gave it; None: nothing does."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The run directory; None before `fit`."""
        return self.log_dir

    @property
    def log_dir(self) -> str | None:
        """The run directory; None before `fit`."""
        return None if self.run_directory is None else str(self.run_directory)

    def save(self) -> None:
        """Bring everything recorded to the disk; called before each checkpoint."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """A checkpoint has been committed.

        Args:
            checkpoint_callback: The `ModelCheckpoint` that saved it: `last_model_path` is its directory.
        """

    def state_dict(self) -> dict[str, Any]:
        """The length of the record, as plain data, from which `load_state_dict` cuts it back."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the record back to where it stood, so that a resumed run neither repeats nor loses a value."""

    def finalize(self, status: str) -> None:
        """The run has ended; called once, when nothing is recorded any more.

        Args:
            status: "success"; "failed": by an error; "interrupted": it was asked to stop, and can be resumed.
        """


def entries(values: Mapping[str, Any] | Namespace, separator: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of nested dictionaries, by their names joined with a separator."""
    for name, value in (vars(values) if isinstance(values, Namespace) else values).items():
        if isinstance(value, Mapping | Namespace):
            yield from entries(value, separator, f"{above}{name}{separator}")
        else:
            yield f"{above}{name}", value


def as_array(values: Array) -> np.ndarray[Any, Any]:
    """An array of a tensor, on the CPU; bfloat16, which numpy lacks, as float32."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def as_pixels(name: str, image: Array) -> np.ndarray[Any, Any]:
    """An image of shape (channels, height, width), as it was given to `Logger.log_image`.

    Raises:
        ConfigError: The image has another shape or dtype, or is no array.
    """
    if not isinstance(image, torch.Tensor | np.ndarray):
        raise ConfigError(
            f"log_image({name!r}): expected an image, as a tensor or an array, found {in_words(image)}. Call it once "
            "for each image; np.array(image).transpose(2, 0, 1) makes an array of one of PIL, with channels first."
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


def as_bytes(name: str, image: Array) -> np.ndarray[Any, Any]:
    """The same as uint8 of shape (height, width, channels), as files of images have it; grey without channels.

    Raises:
        ConfigError: The image has another shape or dtype.
    """
    pixels = as_pixels(name, image)
    if pixels.dtype != np.uint8:
        pixels = (np.clip(pixels.astype(np.float32), 0.0, 1.0) * 255).astype(np.uint8)
    return pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
