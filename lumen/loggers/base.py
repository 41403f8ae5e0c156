"""Logger: where numbers go."""

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
    """Whatever is asked of it or called on it does nothing: what writes no record has no effect."""

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
            directory: The run's.
            resumed: Keep what is there, for `load_state_dict` to cut it back; otherwise start over. A record that the
                checkpoint does not know is started over too: all of it is past the checkpoint.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int) -> None:
        """Record values that repeat exactly in a repeated run.

        Args:
            metrics: By name.
            step: Optimizer updates completed.
            epoch: Epochs completed.
        """

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Record timings and memory, which no two runs share."""

    def log_hyperparams(self, hyperparameters: Mapping[str, Any]) -> None:
        """Record what the run was configured with; called whenever `fit` starts, also with a record that goes on.

        Args:
            hyperparameters: Those of the task under `model`, those of the data module under `data`.
        """

    def log_image(self, name: str, image: Array, step: int) -> None:
        """Record an image.

        Args:
            name: Of the series that the image continues.
            image: Of shape (height, width) or (channels, height, width) with 1 (grey), 3 (RGB) or 4 (RGBA) channels;
                uint8 of 0 to 255, bool, or floating point of 0 to 1 (what is outside is clipped).
            step: Optimizer updates completed.

        Raises:
            ConfigError: The shape or the dtype is another one.
        """

    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Record how values are distributed.

        Args:
            name: Of the series that the histogram continues.
            values: Of any shape and real dtype. What is not finite, or 1e20 and beyond, is left out.
            step: Optimizer updates completed.
        """

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text, in Markdown.

        Args:
            name: Of the series that the text continues.
            text: Of any length.
            step: Optimizer updates completed.
        """

    @property
    def experiment(self) -> Any:
        """The object that writes the record, for what is not offered here; None if there is none.

        Where there is no record, outside of `fit` and in all processes but the first, what is called on it does
        nothing.
        """
        return None

    def flush(self) -> None:
        """Bring everything recorded to the disk; called before each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Where the record stands: plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the record back to where it stood, so that a resumed run neither repeats nor loses a value."""

    def close(self) -> None:
        """The run has ended."""
