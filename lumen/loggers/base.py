"""Logger: the base of what records a run's metrics, hyperparameters, images and text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch

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


class Logger(ABC):
    """A record of a run. Only the first process of a run writes it, and only `fit` has one.

    `log_metrics` and `log_system` are called for you; images, histograms and text are yours to give, to every logger
    of the run:

        for logger in self.trainer.loggers:
            logger.log_image("reconstruction", image, self.global_step)

    A logger whose record cannot hold one of them ignores it, and so does every logger outside of `fit` and in the other
    processes.
    """

    @abstractmethod
    def open(self, directory: Path, *, resumed: bool) -> None:
        """Begin the record in a run directory.

        Args:
            directory: The run directory; it exists.
            resumed: True: keep what is recorded, for `load_state_dict` to cut it back; False: start over. A record that
                the checkpoint has no state of is started over too, since all of it comes after the checkpoint.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """Record values that repeat exactly in a repeated run.

        Args:
            metrics: Values by name.
            step: Optimizer updates completed.
            epoch: Epochs completed so far.
        """

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Record timings and memory, which no two runs share."""

    def log_hyperparams(self, hyperparameters: Mapping[str, Any]) -> None:
        """Record the hyperparameters; called whenever `fit` starts, a resumed one too.

        Args:
            hyperparameters: Those of the task under `model`, those of the data module under `data`.
        """

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

    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Record how values are distributed.

        Args:
            name: Name of the series of histograms, such as "weights".
            values: An array of any shape and real dtype. Values that are not finite, or 1e20 and beyond, are left out.
            step: Optimizer updates completed.
        """

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

    def flush(self) -> None:
        """Bring everything recorded to the disk; called before each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The length of the record, as plain data, from which `load_state_dict` cuts it back."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the record back to where it stood, so that a resumed run neither repeats nor loses a value."""

    def close(self) -> None:
        """The run has ended."""
