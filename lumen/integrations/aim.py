"""Logger for Aim."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from lumen.errors.arguments import check_arguments, expand_path
from lumen.integrations.service import Service, as_plain
from lumen.internals.optional_packages import import_optional
from lumen.loggers.base import Array, as_array, as_uint8_image, explain_wrong_calls


@final
class AimLogger(Service):
    """Logger for Aim: `aim up --repo runs` shows the run.

    Metrics are plotted over the step; timings and memory have names that begin with `system/`. Hyperparameters are the
    run's parameters, nested: `lr` of the task is `run["model"]["lr"]`. Images, histograms and texts are sequences.
    `run["status"]` says how the run ended.

    The file `aim.json` in the run directory stores the run's hash; a resumed run continues the same Aim run, see
    `Service`. Aim keeps the newest value of a step.

    `experiment` is the `aim.Run`, `name` the name of the experiment, `version` the hash of the run.

    Args:
        repo: Repository of Aim: a directory, in which Aim creates `.aim`, or a server, `aim://host:port`. Default: the
            parent of the run directory.
        experiment: The experiment of the run. Default: Aim's `default`.
        run_name: Name of the run. Default: the name of the run directory.
        run_hash: Hash of an Aim run to continue, instead of the one in the run directory.
        tags: Tags of the Aim run.
        prefix: Prefix of all value names, before a "-".

    Raises:
        ConfigError: Aim is not installed.
    """

    title = "Aim"
    file = "aim.json"
    INSTEAD: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("train_metric_prefix", "val_metric_prefix", "test_metric_prefix", "context_prefixes", "context_postfixes"),
            "Leave it out: the name of a value is the logged name, without a context.",
        ),
        "system_tracking_interval": "Leave it out: callbacks=[DeviceStatsMonitor()] logs the use of devices.",
        "log_system_params": "Leave it out: environment.json in the run directory has the parameters of the system.",
        "capture_terminal_logs": "Leave it out: run.log in the run directory has the logs.",
    }

    @check_arguments
    def __init__(
        self,
        repo: str | Path | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        run_hash: str | None = None,
        tags: list[str] | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(prefix)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SQLAlchemy warns about Aim's code.
            self._aim = import_optional("aim", "AimLogger", "aim")
        self._repo, self._tags = repo, tags or []
        self._experiment, self._run_name, self._run_hash = experiment, run_name, run_hash

    def connect(self, directory: Path, kept: str | None) -> str:
        """Begin or resume an Aim run."""
        run_hash = self._run_hash or kept
        self._writer = self._open_run(directory, run_hash)
        if run_hash is None:
            self._writer.name = self._run_name or directory.name
            for tag in self._tags:
                self._writer.add_tag(tag)
        self._writer["status"] = "running"
        return str(self._writer.hash)

    def abandon(self, kept: str) -> None:
        """Archive the previous Aim run as interrupted."""
        assert self.run_directory is not None
        run = self._open_run(self.run_directory, kept)
        run["status"], run.archived = "interrupted", True
        run.close()

    def recorded(self, directory: Path) -> Iterator[tuple[str, int, Any]]:
        """Yield name, step and value of all metrics of the Aim run."""
        for metric in self._writer.metrics():
            steps, (values, *_) = metric.data.numpy()
            yield from ((metric.name, *each) for each in zip(steps.tolist(), values.tolist(), strict=True))

    def send(self, values: Mapping[str, float], step: int) -> None:
        """Track values."""
        for name, value in values.items():
            self._writer.track(value, name=name, step=step)

    def send_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Set hyperparameters as parameters of the Aim run."""
        for name, value in params.items():
            self._writer[name] = as_plain(value)

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Track an image."""
        self.record(self._track_value, self._aim.Image, as_uint8_image(name, image), name, step)

    @explain_wrong_calls
    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Track a distribution."""
        self.record(self._track_value, self._aim.Distribution, as_array(values).ravel(), name, step)

    @explain_wrong_calls
    def log_text(self, name: str, text: str, step: int) -> None:
        """Track a text."""
        self.record(self._track_value, self._aim.Text, text, name, step)

    def _track_value(self, kind: Any, value: Any, name: str, step: int) -> None:
        self._writer.track(kind(value), name=name, step=step)

    @property
    def name(self) -> str | None:
        """Name of the experiment; None: Aim's default experiment."""
        return self._experiment

    def describe_library_use(self) -> str:
        """Return how to continue the Aim run."""
        return f", or write aim.Run({self._id!r}, repo={self._repo_path!r})"

    def disconnect(self, status: str) -> None:
        """Set the status of the Aim run and close it."""
        self._writer["status"] = status
        self._writer.close()

    def _open_run(self, directory: Path, run_hash: str | None) -> Any:
        place = directory.parent.absolute() if self._repo is None else self._repo
        if not str(place).startswith("aim://"):
            place = expand_path(place)
            place.mkdir(parents=True, exist_ok=True)
        self._repo_path = str(place)
        return self._aim.Run(
            run_hash, repo=self._repo_path, experiment=self._experiment, system_tracking_interval=None,
            log_system_params=False, capture_terminal_logs=False,
        )  # fmt: skip
