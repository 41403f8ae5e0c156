"""Records of services, read back without the network."""

import os
import shutil
import warnings
from pathlib import Path

import torch

import lumen
from tests.helpers.tasks import Regression

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_X_DISABLE_STATS": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
os.environ.update(OFFLINE)


def read_wandb(directory, values=True):
    """Return {name: [(step, value), ...]} of all offline parts of a run, in the order of `wandb sync`."""
    from lumen.integrations.wandb_files import read_history

    found, numbers = {}, []
    for path in sorted(Path(directory).glob("wandb/offline-run-*/run-*.wandb")):
        for number, row in read_history(path):
            numbers.append(number)
            step = row.pop("trainer/global_step")
            for name, value in row.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((step, value) if values else step)
    assert numbers == sorted(set(numbers))
    return found


def read_wandb_records(directory):
    """Return all other records of the newest part, as the library describes them."""
    from wandb.proto.wandb_internal_pb2 import Record

    from lumen.integrations.wandb_files import _iterate_records

    path = sorted(Path(directory).glob("wandb/offline-run-*/run-*.wandb"))[-1]
    return [Record.FromString(each) for each in _iterate_records(path.read_bytes())]


def make_mlflow_client(uri):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``noload`` loader")  # a warning of SQLAlchemy about MLflow
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=uri)


def list_mlflow_runs(uri):
    """Return all runs, the oldest first."""
    client = make_mlflow_client(uri)
    return client.search_runs(
        [each.experiment_id for each in client.search_experiments()], order_by=["attributes.start_time ASC"]
    )


def read_mlflow(uri, run_id):
    """Return {name: [(step, value), ...]} of a run, in the order of its record."""
    client = make_mlflow_client(uri)
    return {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        for name in client.get_run(run_id).data.metrics
    }


def list_aim_runs(place):
    """Return all runs, the oldest first; opened for writing, since a server must index a read-only store first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SQLAlchemy
        import aim
    options = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
    hashes = aim.Repo.from_path(str(place)).list_all_runs()
    return sorted((aim.Run(each, repo=str(place), **options) for each in hashes), key=lambda run: run.creation_time)


def read_aim(run):
    """Return {name: [(step, value), ...]} of a run, in the order of steps."""
    found = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.numpy()
        found[metric.name] = sorted(zip(steps.tolist(), values.tolist(), strict=True))
    return found


class Databases:
    """Copies of an empty MLflow database, which takes seconds to create."""

    def __init__(self, folder):
        self._first = folder / "mlflow.db"
        make_mlflow_client(f"sqlite:///{self._first}")

    def uri(self, folder):
        """Return the URI of a new database, where a run in `folder / "runs"` looks for it."""
        place = folder / "runs" / "mlflow.db"
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            shutil.copy(self._first, place)
        return f"sqlite:///{place}"


def of_csv(directory):
    """Return {name: [(step, value), ...]} of `metrics.csv` and `system.csv`, with every digit."""
    import csv

    found = {}
    for file, prefix in (("metrics.csv", ""), ("system.csv", "system/")):
        with (Path(directory) / file).open(newline="") as rows:
            for row in csv.DictReader(rows):
                for name, value in row.items():
                    if value and name not in ("step", "epoch"):
                        found.setdefault(prefix + name, []).append((int(row["step"]), float(value)))
    return found


class Everything(Regression):
    """Task that gives each logger an image, a histogram and a text at every second step."""

    def training_step(self, batch):
        if self.global_step % 2 == 0:
            weights = self.net[0].weight.detach()
            for logger in self.trainer.loggers:
                logger.log_image("weights", (weights > 0).to(torch.uint8) * 7, self.global_step)
                logger.log_histogram("layer", weights, self.global_step)
                logger.log_text("note", f"step *{self.global_step}*", self.global_step)
        return super().training_step(batch)


class CallAtSteps(lumen.Callback):
    """Callback that calls a function when a step begins."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("step_")): action for name, action in actions.items()}

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if action := self.actions.pop(trainer.global_step, None):
            action(trainer)
