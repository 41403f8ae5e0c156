"""Service: the base of loggers whose record lies with a service, such as Weights & Biases or MLflow."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.lightning_names import NEUTRAL_IN_LOGGERS
from lumen.internals.masking import masked
from lumen.internals.whole_files import replaced
from lumen.loggers.base import Logger, Nothing, told
from lumen.loggers.csv import rows_in

UPLOADING = (
    "Leave it out: checkpoints lie in the run directory, or where ModelCheckpoint(dirpath=...) says. To upload each, "
    "give the trainer a Logger of yours beside this one, whose after_save_checkpoint(self, saver) uploads "
    "saver.last_model_path."
)
_LARGEST = 1.7e308  # MLflow keeps infinity as the largest number, and a NaN equals nothing


class Service(Logger):
    """A logger of a service: one run there over all parts of a run here, and a service that fails ends none.

    The id that the service gives is kept in the run directory. No service can be cut back to a checkpoint. A resumed
    run compares the record there with `metrics.csv` and `system.csv`, by name, step and value, and sends the rows that
    are missing. A step that the run makes again is sent again only if its values differ: then the newest value of a
    step is the run's, which one warning says, and the hyperparameter `lumen/recorded_again_from_step` there. A service
    that does not answer is asked again at checkpoints and at the end, and gets what it missed.

    Args:
        prefix: What the names of all values begin with, before a "-".

    Attributes:
        is_open: There is a record: in `fit`, in the first process.
    """

    #: Its name in texts, and that of the file in the run directory with the id.
    title: ClassVar[str]
    file: ClassVar[str]
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_IN_LOGGERS

    def __init__(self, prefix: str = "") -> None:
        self._prefix = f"{prefix}-" if prefix else ""
        self._directory: Path | None = None  # in fit, in the first process
        self._id: str | None = None
        self._writer: Any = None  # the object of the library; `connect` sets it
        self._step = 0
        self._is_resumed = False
        self._names: dict[str, str] = {}  # the name here of each name there
        self._later: dict[tuple[str, int], set[float | None]] = {}  # values there that metrics.csv does not have
        self._checkpoints_behind = 0
        self.is_open = self._is_behind = self._is_marked = self._has_failed = self._has_warned = False
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
    def recorded(self, directory: Path) -> Iterable[tuple[str, int, Any]]:
        """Name, step and value of everything that the service has, of all parts of the run."""

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

    def clean(self, name: str) -> str:
        """The name without characters that the service does not allow."""
        return name

    def key(self, name: str) -> str:
        """The name that a value has there.

        Raises:
            ConfigError: A value of a different name here has that name there.
        """
        key = self.clean(f"{self._prefix}{name}")
        if (other := self._names.setdefault(key, name)) != name:
            raise ConfigError(f"{self.title} has one name, {key!r}, for {other!r} and {name!r}. Rename one of the two.")
        return key

    def confirm(self) -> None:
        """Wait until what was sent is recorded."""

    def open(self, directory: Path, *, resumed: bool) -> None:
        """See `Logger.open`.

        Raises:
            ConfigError: A run that is new cannot begin its record.
        """
        self._directory, self._is_resumed = directory, resumed
        self._step, self._names, self._later, self._checkpoints_behind = 0, {}, {}, 0
        self.is_open = self._is_behind = self._is_marked = self._has_failed = False
        if resumed:
            self._is_behind = not self.attempt(self._connect)
            return
        try:
            self._connect()
        except Exception as error:
            self._directory = None
            raise ConfigError(f"{self.title} does not begin a run: {error}") from error

    @property
    def version(self) -> int | str | None:
        """The id of the run there; None before `fit`, and in all processes but the first."""
        return self._id

    @property
    def experiment(self) -> Any:
        """The object of the library; outside of `fit`, and in all processes but the first, calls on it do nothing."""
        if self.is_open:
            return self._writer
        if self.run_directory is None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s.experiment is used before fit, where there is no record: calls on it do nothing. What is given to "
                "log_hyperparams before is recorded once fit begins.", type(self).__name__,
            )  # fmt: skip
        return Nothing()

    @told
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Logger.log_metrics`."""
        self._log("", metrics, step)

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger.log_system`; their names begin with `system/`."""
        self._log("system/", values, step)

    @told
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """See `Logger.log_hyperparams`; what is given before `fit` is recorded once that begins."""
        given = masked(params if isinstance(params, Mapping) else vars(params))
        if self.is_open:
            self.attempt(self.send_hyperparams, given)
        else:
            self._before_fit |= given

    def record(self, call: Callable[..., None], *args: Any) -> None:
        """Call the service if there is a record."""
        if self.is_open:
            self.attempt(call, *args)

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
        """Record everything that was logged, and ask a service again that has not answered.

        One that could not be connected makes training wait for a time-out: it is asked at the checkpoints 1, 2, 4, 8,
        and so on after that.
        """
        self._checkpoints_behind += not self.is_open
        if not self._checkpoints_behind & (self._checkpoints_behind - 1):
            self._save()

    def state_dict(self) -> dict[str, Any]:
        """Up to which step values were given."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Send what the record lacks of the values up to the checkpoint, to which the CSV files are cut back."""
        self._step = state["step"]
        if self.is_open:
            self._is_behind = not self.attempt(self._catch_up)

    def finalize(self, status: str) -> None:
        """See `Logger.finalize`."""
        self._save()
        if self.is_open:
            if status == "success" and any(step > self._step for _, step in self._later):
                self._mark(self._step + 1)
            self.attempt(self.disconnect, status)
            self._before_fit = {}
        self._directory, self.is_open = None, False

    def _connect(self) -> None:
        assert self._directory is not None
        place = self._directory / self.file
        known = json.loads(place.read_text())["id"] if place.exists() else None
        kept = known if self._is_resumed else None
        self._id = self.connect(self._directory, kept)
        if known not in (None, self._id):
            self.abandon(known)
        if kept is None:
            with replaced(place) as beside:
                beside.write_text(json.dumps({"id": self._id}) + "\n")
        self.is_open = True
        if self._before_fit:
            self.attempt(self.send_hyperparams, self._before_fit)

    def _save(self) -> None:
        if self._directory is None or not (self.is_open or self.attempt(self._connect)):
            return
        self._is_behind = not self.attempt(self.confirm) or self._is_behind
        if self._is_behind and self.attempt(self._catch_up):
            self._is_behind = not self.attempt(self.confirm)

    def _log(self, above: str, values: Mapping[str, float], step: int) -> None:
        self._step = step
        row = self._row(above, values)
        if self.is_open and not self.attempt(self._send_new, row, step, above):
            self._is_behind = True

    def _row(self, above: str, values: Mapping[str, Any]) -> dict[str, float]:
        return {self.key(f"{above}{name}"): float(value) for name, value in values.items()}

    def _send_new(self, row: Mapping[str, float], step: int, above: str) -> None:
        """Send the values of a row that are not there; what is measured is there if any value of its step is."""
        there = {name for name in row if (name, step) in self._later}
        again = {name for name in there if not above and _finite(row[name]) not in self._later[name, step]}
        if again:
            self._mark(step)
        if new := {name: value for name, value in row.items() if name not in there - again}:
            self.send(new, step)

    def _mark(self, step: int) -> None:
        """Say that values from a step on are of a part of the run that was given up."""
        if not self._is_marked:
            self._is_marked = True
            _log.warning(
                "%s keeps values from step %d on of a part of the run that was given up: where a step has several, the "
                "newest is that of metrics.csv.", self.title, step,
            )  # fmt: skip
            self.send_hyperparams({"lumen": {"recorded_again_from_step": step}})

    def _catch_up(self) -> None:
        """Send what the run's own record has and the service does not."""
        assert self._directory is not None
        self._later = {}
        for name, step, value in self.recorded(self._directory):
            self._later.setdefault((name, step), set()).add(_finite(value))
        own: set[tuple[str, int]] = set()
        tables = {"": self._directory / "metrics.csv", "system/": self._directory / "system.csv"}
        rows = [(step, above, values) for above, path in tables.items() for step, values in rows_in(path)]
        for step, above, values in sorted(rows, key=itemgetter(0)):
            row = self._row(above, values)
            self._send_new(row, step, above)
            own |= {(name, step) for name in row}
        self._later = {pair: values for pair, values in self._later.items() if pair not in own}


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < _LARGEST else None
