"""Logger: where numbers go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Logger(ABC):
    """A record of a run's numbers. Only the first process of a run writes it."""

    @abstractmethod
    def open(self, directory: Path, *, resumed: bool) -> None:
        """Begin the record in a run directory.

        Args:
            directory: The run's.
            resumed: Keep what is there, for `load_state_dict` to cut it back; otherwise start over.
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
        """Record what the run was configured with."""

    def flush(self) -> None:
        """Bring everything recorded to the disk; called before each checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Where the record stands: plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the record back to where it stood, so that a resumed run neither repeats nor loses a value."""

    def close(self) -> None:
        """The run has ended."""
