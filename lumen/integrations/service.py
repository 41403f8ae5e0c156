"""`Service`: base class of loggers that send the record to a service, such as Weights & Biases or MLflow."""

from __future__ import annotations

import json
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.lightning_names import NEUTRAL_IN_LOGGERS
from lumen.internals.atomic_files import replace_file
from lumen.internals.masking import mask_secrets
from lumen.loggers.base import DeferredWriter, Logger, as_hyperparameters, explain_wrong_calls
from lumen.loggers.csv import read_rows

UPLOADING = (
    "Leave it out: checkpoints are in the run directory, or in dirpath of ModelCheckpoint. To upload each checkpoint, "
    "add a second logger of your own class. Let its after_save_checkpoint(self, saver) upload saver.last_model_path."
)
_MAX_FLOAT = 1.7e308  # MLflow stores infinity as the largest float; a NaN never compares equal.


class Service(Logger):
    """Base class of loggers of a service. A failing service never ends a run.

    All resumed parts of a Lumen run share one run of the service. The run directory stores the id of that run. Services
    cannot cut a record back to a checkpoint. Instead, a resumed run compares the service's record with `metrics.csv`
    and `system.csv`, by name, step and value, and sends missing rows. Repeated steps are sent again only if their
    values differ. The newest value of such a step is then the valid one; a warning and the service's hyperparameter
    `lumen/recorded_again_from_step` say so. If the service does not answer, Lumen retries at checkpoints and at the end
    of the run, and sends missing rows.

    Args:
        prefix: Prefix of all value names, before a "-".

    Attributes:
        is_open: True while there is a record: in a run, in the first process.
    """

    #: Name of the service in texts, and name of the file in the run directory that stores the run's id.
    title: ClassVar[str]
    file: ClassVar[str]
    #: True if the library's object is a client, which is usable after the run too.
    has_client: ClassVar[bool] = False
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_IN_LOGGERS

    def __init__(self, prefix: str = "") -> None:
        self._prefix = f"{prefix}-" if prefix else ""
        self._directory: Path | None = None  # set in a run, in the first process
        self._id: str | None = None
        self._writer: Any = None  # the library's object, set by `connect`
        self._step = 0
        self._is_resumed = False
        self._names: dict[str, str] = {}  # Lumen's name for each name of the service
        self._pending_calls: dict[
            tuple[str, int], set[float | None]
        ] = {}  # values of the service that metrics.csv lacks
        self._missed_saves = 0
        self.is_open = self._has_missing_values = self._is_marked = self._has_failed = False
        self._before_fit: dict[str, Any] = {}
        self._deferred = DeferredWriter(type(self).__name__)

    @abstractmethod
    def connect(self, directory: Path, kept: str | None) -> str:
        """Begin a run of the service, or resume one.

        Args:
            directory: The run directory.
            kept: The id of the service's run to resume; None: begin a new one.

        Returns:
            The id of the service's run.
        """

    @abstractmethod
    def recorded(self, directory: Path) -> Iterable[tuple[str, int, Any]]:
        """Return name, step and value of everything that the service has recorded, for all parts of the run."""

    @abstractmethod
    def send(self, values: Mapping[str, float], step: int) -> None:
        """Record values."""

    @abstractmethod
    def send_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters, in nested dictionaries."""

    @abstractmethod
    def disconnect(self, status: str) -> None:
        """End the service's run; `Logger.finalize` describes `status`."""

    def abandon(self, kept: str) -> None:
        """Close the service's previous run, because the run directory was started over."""

    def clean(self, name: str) -> str:
        """Return the name without characters that the service does not allow."""
        return name

    def key(self, name: str) -> str:
        """Return the service's name for a value.

        Raises:
            ConfigError: Two names of Lumen become the same name of the service.
        """
        key = self.clean(f"{self._prefix}{name}")
        if (other := self._names.setdefault(key, name)) != name:
            raise ConfigError(f"{self.title}: {other!r} and {name!r} both become {key!r}. Rename one of the two.")
        return key

    def confirm(self) -> None:
        """Wait until all sent values are recorded."""

    def open(self, directory: Path, *, resumed: bool) -> None:
        """Connect to the service.

        Raises:
            ConfigError: The service cannot begin the record of a new run.
        """
        self._directory, self._is_resumed = directory, resumed
        self._names, self._missed_saves, self._notes_changes = {}, 0, False
        if not resumed:  # An evaluation after `fit` must not repeat values of an earlier part either.
            self._step, self._pending_calls = 0, {}
        self.is_open = self._has_missing_values = self._is_marked = self._has_failed = False
        if resumed:
            self._has_missing_values = not self.attempt(self._connect_once)
            return
        try:
            self._connect_once()
        except Exception as error:
            self._directory = None
            raise ConfigError(f"{self.title} cannot begin a run: {error}") from error

    @property
    def version(self) -> int | str | None:
        """Id of the service's run; None before `fit`, and in all processes but the first."""
        return self._id

    @property
    def experiment(self) -> Any:
        """Object of the library, in a run and in the first process.

        Calls before the run are made once it begins, and return nothing. Other calls do nothing.
        """
        is_usable = self.is_open or (self.has_client and self.has_ended)
        return self._writer if is_usable else self._get_idle_writer(self._deferred)

    @explain_wrong_calls
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send values."""
        self._log_values("", metrics, step)

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Send timings and memory, with names that begin with `system/`."""
        self._log_values("system/", values, step)

    @explain_wrong_calls
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Send hyperparameters; values given before `fit` are sent once `fit` begins."""
        hyperparams = mask_secrets(as_hyperparameters(params))
        if self.is_open:
            self.attempt(self.send_hyperparams, hyperparams)
        else:
            self._before_fit |= hyperparams

    def record(self, call: Callable[..., None], *args: Any) -> None:
        """Call the service if there is a record."""
        if self.is_open:
            self.attempt(call, *args)

    def attempt(self, call: Callable[..., None], *args: Any) -> bool:
        """Call the service, and warn at the first failure. Return True if the service has answered."""
        try:
            call(*args)
        except ConfigError:
            raise  # an error of the user, such as a wrong image
        except Exception as error:
            if not self._has_failed:
                _log.warning(
                    "%s failed, and training continues: %s: %s. Lumen sends the missing rows of metrics.csv and "
                    "system.csv later, once the service answers.", self.title, type(error).__name__, error,
                )  # fmt: skip
            self._has_failed = True
            return False
        return True

    def save(self) -> None:
        """Send everything that was logged, and retry if the service has not answered.

        If the service cannot be connected, each attempt makes training wait for a time-out. After a failed connection,
        Lumen therefore retries only at the checkpoints 1, 2, 4, 8 and so on.
        """
        self._missed_saves += not self.is_open
        if not self._missed_saves & (self._missed_saves - 1):
            self._save_pending()

    def state_dict(self) -> dict[str, Any]:
        """Return the last logged step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Send rows of the CSV files that the service lacks; the files are cut back to the checkpoint already."""
        self._step, self._notes_changes = state["step"], True
        if self.is_open:
            self._has_missing_values = not self.attempt(self._send_missing)

    def finalize(self, status: str) -> None:
        """Send the remaining values and end the service's run."""
        self._save_pending()
        if self.is_open:
            if status == "success" and any(step > self._step for _, step in self._pending_calls):
                self._mark_rollback(self._step + 1)
            self.attempt(self.disconnect, status)
            self._before_fit = {}
        self._directory, self.is_open = None, False

    def _connect_once(self) -> None:
        assert self._directory is not None
        place = self._directory / self.file
        known = json.loads(place.read_text())["id"] if place.exists() else None
        kept = known if self._is_resumed else None
        self._id = self.connect(self._directory, kept)
        if kept is None:
            with replace_file(place) as new_path:
                new_path.write_text(json.dumps({"id": self._id}) + "\n")
        self.is_open = True
        if known not in (None, self._id):
            try:
                self.abandon(known)
            except Exception as error:  # The user may have removed the run, or uses a different server now.
                _log.warning("%s cannot mark the previous run %s as ended: %s", self.title, known, error)
        if self._before_fit:
            self.attempt(self.send_hyperparams, self._before_fit)
        self.attempt(self._deferred.replay, self._writer)

    def _save_pending(self) -> None:
        if self._directory is None or not (self.is_open or self.attempt(self._connect_once)):
            return
        self._has_missing_values = not self.attempt(self.confirm) or self._has_missing_values
        if self._has_missing_values and self.attempt(self._send_missing):
            self._has_missing_values = not self.attempt(self.confirm)

    def _log_values(self, above: str, values: Mapping[str, float], step: int) -> None:
        self._step = step
        row = self._prefix_values(above, values)
        if self.is_open and not self.attempt(self._send_new, row, step, above):
            self._has_missing_values = True

    def _prefix_values(self, above: str, values: Mapping[str, Any]) -> dict[str, float]:
        return {self.key(f"{above}{name}"): float(value) for name, value in values.items()}

    def _send_new(self, row: Mapping[str, float], step: int, above: str) -> None:
        """Send the values of a row that the service lacks; timings of a step are sent only once."""
        recorded = {name for name in row if (name, step) in self._pending_calls}
        changed = {
            name for name in recorded if not above and _as_finite(row[name]) not in self._pending_calls[name, step]
        }
        if changed and self._notes_changes:
            self._mark_rollback(step)
        if new := {name: value for name, value in row.items() if name not in recorded - changed}:
            self.send(new, step)

    def _mark_rollback(self, step: int) -> None:
        """Warn that the service's values from a step on belong to a discarded part of the run."""
        if not self._is_marked:
            self._is_marked = True
            _log.warning(
                "%s keeps values of a discarded part of the run, from step %d on. If a step has several values, the "
                "newest value is valid, as in metrics.csv.", self.title, step,
            )  # fmt: skip
            self.send_hyperparams({"lumen": {"recorded_again_from_step": step}})

    def _send_missing(self) -> None:
        """Send rows of the CSV files that the service lacks."""
        assert self._directory is not None
        self._pending_calls = {}
        for name, step, value in self.recorded(self._directory):
            self._pending_calls.setdefault((name, step), set()).add(_as_finite(value))
        written: set[tuple[str, int]] = set()
        tables = {"": self._directory / "metrics.csv", "system/": self._directory / "system.csv"}
        rows = [(step, above, values) for above, path in tables.items() for step, values in read_rows(path)]
        for step, above, values in sorted(rows, key=itemgetter(0)):
            row = self._prefix_values(above, values)
            self._send_new(row, step, above)
            written |= {(name, step) for name in row}
        written = {pair for pair in written if pair[1] < self._step}  # The newest step may have more values.
        self._pending_calls = {pair: values for pair, values in self._pending_calls.items() if pair not in written}


def as_plain(value: Any) -> Any:
    """Convert a value to numbers, texts, lists and dictionaries, which services store; other objects become text."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): as_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _as_finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and abs(value) < _MAX_FLOAT else None
