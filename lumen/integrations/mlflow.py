"""Logger for MLflow."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, final

from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, expand_path
from lumen.integrations.service import UPLOADING, Service
from lumen.internals.optional_packages import import_optional
from lumen.loggers.base import Array, as_uint8_image, explain_wrong_calls, flatten_entries

_FORBIDDEN_CHARACTERS = re.compile(r"[^\w/. -]")
_MAX_NAME_LENGTH, _MAX_VALUE_LENGTH, _MAX_BATCH_SIZE = 250, 6000, 100  # MLflow's limits for parameters
_STATUS_NAMES = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@final
class MLFlowLogger(Service):
    """Logger for MLflow: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows the run.

    Metrics are plotted over the step; timings and memory have names that begin with `system/`. A character that MLflow
    does not allow in a name becomes "_"; two names that become equal raise an error. Hyperparameters are parameters:
    `lr` of the task is `model/lr`. MLflow never changes a parameter. If a resumed run has changed hyperparameters, they
    become tags, `changed/model/lr`. Images and texts are artifacts; histograms are ignored.

    The file `mlflow.json` in the run directory stores the run's id; a resumed run continues the same MLflow run, see
    `Service`.

    `experiment` is an `mlflow.tracking.MlflowClient`, `name` the id of the experiment, `version` the id of the run.

    Args:
        experiment_name: The experiment of the run; it is created if it does not exist.
        run_name: Name of the run. Default: the name of the run directory.
        tracking_uri: Storage of MLflow: `sqlite:///PATH`, a directory (`file:PATH`) or a server. Default: the variable
            MLFLOW_TRACKING_URI, else the file `mlflow.db` in `save_dir`.
        tags: Tags of the MLflow run, by name.
        save_dir: Directory of `mlflow.db` and `mlartifacts`, without a `tracking_uri`. Default: the parent of the run
            directory.
        prefix: Prefix of all value names, before a "-".
        artifact_location: Location of the artifacts of a new experiment. Default: MLflow's default; without a
            `tracking_uri` the directory `mlartifacts` next to `mlflow.db`.
        run_id: Id of an MLflow run to continue, instead of the one in the run directory.
        synchronous: False: a thread sends values; each checkpoint waits for the thread.

    Raises:
        ConfigError: MLflow is not installed.
    """

    title = "MLflow"
    file = "mlflow.json"
    has_client = True
    INSTEAD: ClassVar[Mapping[str, str]] = {"log_model": UPLOADING}

    @check_arguments
    def __init__(
        self,
        experiment_name: str = "lumen",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | Path | None = None,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool = True,
    ) -> None:
        super().__init__(prefix)
        self._make_client = import_optional("mlflow.tracking", "MLFlowLogger", "mlflow").MlflowClient
        self._experiment_name, self._run_name, self._run_id = experiment_name, run_name, run_id
        self._tracking_uri, self._artifact_location = tracking_uri, artifact_location
        self._tags, self._is_synchronous = tags or {}, synchronous
        self._place = None if save_dir is None else expand_path(save_dir)
        self._experiment_id: str | None = None
        self._sending: list[Any] = []

    def connect(self, directory: Path, kept: str | None) -> str:
        """Begin or resume an MLflow run."""
        place = directory.parent.absolute() if self._place is None else self._place.absolute()
        uri, artifacts = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), self._artifact_location
        if uri is None:
            place.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{place / 'mlflow.db'}", artifacts or (place / "mlartifacts").as_uri()
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # It logs every table that it creates.
        self._writer, self._sending = self._make_client(tracking_uri=uri), []
        run_id = self._run_id or kept
        if run_id is not None:
            self._writer.update_run(run_id, status="RUNNING")
            self._experiment_id = str(self._writer.get_run(run_id).info.experiment_id)
            return run_id
        if (known := self._writer.get_experiment_by_name(self._experiment_name)) is not None:
            self._experiment_id = str(known.experiment_id)
        else:
            self._experiment_id = self._writer.create_experiment(self._experiment_name, artifact_location=artifacts)
        run = self._writer.create_run(self._experiment_id, run_name=self._run_name or directory.name, tags=self._tags)
        return str(run.info.run_id)

    def abandon(self, kept: str) -> None:
        """Mark the previous MLflow run as killed."""
        self._writer.set_terminated(kept, "KILLED")

    def clean(self, name: str) -> str:
        """Return the name with `_` in place of characters that MLflow does not allow."""
        return _clean_name(name)

    def recorded(self, directory: Path) -> Iterator[tuple[str, int, Any]]:
        """Yield name, step and value of all metrics of the MLflow run."""
        for name in self._writer.get_run(self.version).data.metrics:
            for metric in self._writer.get_metric_history(self.version, name):
                yield name, metric.step, metric.value

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Log values in batches."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        for first in range(0, len(metrics), _MAX_BATCH_SIZE):
            some = metrics[first : first + _MAX_BATCH_SIZE]
            sending = self._writer.log_batch(self.version, metrics=some, synchronous=self._is_synchronous)
            if sending is not None:
                self._sending.append(sending)

    def confirm(self) -> None:
        """Wait until all sent values are recorded."""
        sending, self._sending = self._sending, []
        with ExitStack() as stack:  # Wait for all before raising an error: otherwise a pending row would be sent twice.
            for each in sending:
                stack.callback(each.wait)

    def send_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log new hyperparameters as parameters, and changed ones as tags."""
        from mlflow.entities import Param

        hyperparams = {
            _clean_name(name)[:_MAX_NAME_LENGTH]: str(value)[:_MAX_VALUE_LENGTH]
            for name, value in flatten_entries(params, "/")
        }
        known = self._writer.get_run(self.version).data.params
        new = [Param(name, value) for name, value in hyperparams.items() if name not in known]
        for first in range(0, len(new), _MAX_BATCH_SIZE):
            self._writer.log_batch(self.version, params=new[first : first + _MAX_BATCH_SIZE])
        for name, value in hyperparams.items():
            if known.get(name, value) != value:
                self._writer.set_tag(self.version, f"changed/{name}", f"{known[name]} → {value}")

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Log an image as an artifact."""
        self.record(self._log_artifact, "log_image", as_uint8_image(name, image), f"{name}/{step:08d}.png")

    @explain_wrong_calls
    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text as an artifact."""
        self.record(self._log_artifact, "log_text", text, f"{name}/{step:08d}.md")

    def _log_artifact(self, method: str, content: Any, path: str) -> None:
        getattr(self._writer, method)(self.version, content, _clean_name(path))

    @property
    def name(self) -> str | None:
        """Id of the experiment; None before `fit`, and in all processes but the first."""
        return self._experiment_id

    experiment_id = name

    @property
    def run_id(self) -> str:
        """Id of the MLflow run, as `version`.

        Raises:
            ConfigError: The run does not exist yet; or this is not the first process.
        """
        if self._id is None and self._run_id is None:
            raise ConfigError(
                "MLFlowLogger.run_id: the MLflow run begins with fit, in the first process. Read it in on_fit_start or "
                "later, where self.trainer.is_global_zero. Before fit, call log_hyperparams."
            )
        return str(self._id or self._run_id)

    def disconnect(self, status: str) -> None:
        """Set the final status of the MLflow run."""
        self._writer.set_terminated(self.version, _STATUS_NAMES.get(status, "FINISHED"))


def _clean_name(name: str) -> str:
    return posixpath.normpath(_FORBIDDEN_CHARACTERS.sub("_", name)).lstrip("./") or "_"
