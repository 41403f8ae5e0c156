"""Service: the base of loggers whose record lies with a service, such as Weights & Biases or MLflow."""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.whole_files import replaced
from lumen.loggers.base import Logger, Nothing

UPLOADING = (
    "Leave it out: checkpoints lie in the run directory, or where ModelCheckpoint(dirpath=...) says. To upload each, "
    "give the trainer a Logger of yours beside this one, whose after_save_checkpoint(self, saver) uploads "
    "saver.last_model_path."
)


class Service(Logger):
    """A logger of a service: one run there over all parts of a run here, and a service that fails ends none.

    The id that the service gives is kept in the run directory. No service can be cut back to a checkpoint. So a resumed
    run asks what is recorded: values of these names and steps are not sent again, since they would be the same; what a
    killed process had not sent yet is sent from `metrics.csv` and `system.csv`. So is what a service missed that did
    not answer for a while; it is asked again at each checkpoint and at the end.

    Args:
        prefix: What the names of all values begin with, before a "-".
    """

    #: Its name in texts, and that of the file in the run directory with the id.
    title: ClassVar[str]
    file: ClassVar[str]

    def __init__(self, prefix: str = "") -> None:
        self._prefix = f"{prefix}-" if prefix else ""
        self._directory: Path | None = None
        self._id: str | None = None
        self._step = 0
        self._recorded: dict[str, int] = {}  # the last step of each name that is not sent again
        self._is_behind = False
        self._has_failed = self._has_warned = False
        self._before_fit: dict[str, Any] = {}

    @abstractmethod
    def connect(self, directory: Path, kept: str | None) -> str:
        """Begin a run, or go on in one.

        Args:
            directory: The run directory.
            kept: The id of the run to go on in; None: begin one.

        Returns:
            The id of the run there.
        """

    @abstractmethod
    def recorded(self, directory: Path) -> dict[str, int]:
        """The last step of each name that the service has, of all parts of the run."""

    @abstractmethod
    def send(self, values: Mapping[str, float], step: int) -> None:
        """Record values."""

    @abstractmethod
    def send_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters, in nested dictionaries."""

    @abstractmethod
    def disconnect(self, status: str) -> None:
        """The run has ended; see `Logger.finalize`."""

    def abandon(self, kept: str) -> None:
        """The run directory is begun anew, and the run there that was its record is not gone on in."""

    def key(self, name: str) -> str:
        """The name that a value has there."""
        return f"{self._prefix}{name}"

    def confirm(self) -> None:
        """Wait until what was sent is recorded."""

    def open(self, directory: Path, *, resumed: bool) -> None:
        """See `Logger.open`.

        Raises:
            ConfigError: A run that is new cannot begin its record.
        """
        place = directory / self.file
        self._step, self._recorded = 0, {}
        self._is_behind = self._has_failed = False
        known = json.loads(place.read_text())["id"] if place.exists() else None
        kept = known if resumed else None
        try:
            self._id = self.connect(directory, kept)
            if known not in (None, self._id):
                self.abandon(known)
            self._directory = directory
        except Exception as error:
            if not resumed:
                raise ConfigError(f"{self.title} does not begin a run: {error}") from error
            self._directory = None
            _log.warning("%s: this part of the run is not recorded: %s", self.title, error)
            return
        if kept is None:
            _write(place, json.dumps({"id": self._id}) + "\n")
        if self._before_fit:
            self.attempt(self.send_hyperparams, self._before_fit)

    @property
    def version(self) -> int | str | None:
        """The id of the run there; None before `fit`, and in all processes but the first."""
        return self._id

    def in_fit(self, experiment: Any) -> Any:
        """What `experiment` returns: in `fit`, in the first process, the object; else one whose calls do nothing."""
        if self.is_open:
            return experiment
        if self.run_directory is None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s.experiment is used before fit, where there is no record: calls on it do nothing. What is given to "
                "log_hyperparams before is recorded once fit begins.", type(self).__name__,
            )  # fmt: skip
        return Nothing()

    @property
    def is_open(self) -> bool:
        """Whether there is a record: in `fit`, in the first process."""
        return self._directory is not None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Logger.log_metrics`."""
        self._log({self.key(name): float(value) for name, value in metrics.items()}, step)

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger.log_system`; their names begin with `system/`."""
        self._log({self.key(f"system/{name}"): float(value) for name, value in values.items()}, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `Logger.log_hyperparams`; what is given before `fit` is recorded once that begins."""
        if self.is_open:
            self.attempt(self.send_hyperparams, params)
        else:
            self._before_fit = {**self._before_fit, **(params if isinstance(params, Mapping) else vars(params))}

    def is_new(self, name: str, step: int) -> bool:
        """Whether the service has no value of this name for this step yet, as far as it was asked."""
        return step > self._recorded.get(name, -1)

    def attempt(self, call: Callable[..., None], *args: Any) -> bool:
        """Call the service; the first time that it fails is a warning. Returns whether it has answered."""
        try:
            call(*args)
        except ConfigError:
            raise  # what is given is no image, say
        except Exception as error:
            if not self._has_failed:
                _log.warning(
                    "%s has failed, and training goes on: %s: %s. What it misses of metrics.csv and system.csv it gets "
                    "once it answers again.", self.title, type(error).__name__, error,
                )  # fmt: skip
            self._has_failed = True
            return False
        return True

    def save(self) -> None:
        """See `Logger.save`; a service that has not answered is asked again."""
        if self.is_open:
            self._is_behind = not self.attempt(self.confirm) or self._is_behind
            if self._is_behind and self.attempt(self._catch_up):
                self._is_behind = not self.attempt(self.confirm)

    def state_dict(self) -> dict[str, Any]:
        """Up to which step values were given."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Send what the record lacks of the values up to the checkpoint."""
        self._step = state["step"]
        if self.is_open:
            self._is_behind = not self.attempt(self._catch_up)

    def finalize(self, status: str) -> None:
        """See `Logger.finalize`."""
        if self.is_open:
            self.save()
            self.attempt(self.disconnect, status)
            self._directory = None
            self._before_fit = {}

    def _log(self, values: dict[str, float], step: int) -> None:
        self._step = step
        if not self.is_open:
            return
        if fresh := {name: value for name, value in values.items() if self.is_new(name, step)}:
            self._is_behind = self._is_behind or not self.attempt(self.send, fresh, step)

    def _catch_up(self) -> None:
        """Send what the run's own record has and the service does not."""
        assert self._directory is not None
        self._recorded = self.recorded(self._directory)
        for step, row in _rows(self._directory):
            values = {self.key(name): value for name, value in row.items()}
            missing = {name: value for name, value in values.items() if self.is_new(name, step)}
            if missing and step <= self._step:
                self.send(missing, step)


def _rows(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """The rows of `metrics.csv` and `system.csv`, in the order of their steps."""
    found = [*_rows_of(directory / "metrics.csv", ""), *_rows_of(directory / "system.csv", "system/")]
    return sorted(found, key=lambda row: row[0])


def _rows_of(path: Path, above: str) -> Iterator[tuple[int, dict[str, float]]]:
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                cells = {name: text for name, text in row.items() if text and name not in ("step", "epoch")}
                yield int(row["step"]), {f"{above}{name}": float(text) for name, text in cells.items()}


def _write(path: Path, text: str) -> None:
    with replaced(path) as beside:
        beside.write_text(text)
