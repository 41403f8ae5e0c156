"""Helpers for loggers."""

import csv

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer


def fit(tmp_path, task=None, **options):
    """Train a small regression with both loggers and everything logged; return its trainer."""
    options = {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": "cpu"} | options
    options.setdefault("logger", [lumen.CSVLogger(), lumen.TensorBoardLogger()])
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(task or Regression(dropout=0.2), loader(), val_dataloaders=loader(20, shuffle=False))
    return trainer


EVERYTHING = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)


def read_events(directory):
    """Open a run's event files with TensorBoard's reader, which shows repeated values too."""
    found = EventAccumulator(str(directory / "tensorboard"), size_guidance=EVERYTHING, purge_orphaned_data=False)
    return found.Reload()


def read_scalars(directory):
    """Return {name: [(step, value), ...]} as TensorBoard reads it."""
    found = read_events(directory)
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def read_table(path, prefix=""):
    """Return {name: [(step, value), ...]} of a CSV file, rounded to float32 like TensorBoard's scalars."""
    columns = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    columns.setdefault(prefix + name, []).append((int(row["step"]), float(np.float32(value))))
    return columns


def read_csv(directory):
    return read_table(directory / "metrics.csv") | read_table(directory / "system.csv", "system/")


def read_hyperparameters(directory):
    """Return the data of the dashboard HPARAMS."""
    content = read_events(directory).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


class Drawn(Regression):
    """Task that logs an image, a histogram and a text in every training step."""

    def training_step(self, batch, batch_idx):
        weights = self.net[0].weight
        for logger in self.trainer.loggers:
            logger.log_image("weights", weights.detach().sigmoid(), self.global_step)
            logger.log_histogram("first layer", weights, self.global_step)
            logger.log_text("note", f"step *{self.global_step}*", self.global_step)
        return super().training_step(batch)
