"""Loggers: TensorBoard's record beside the CSV files, one run after another, killed and resumed."""

import lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer


def fit(tmp_path, task=None, **options):
    """Train a small regression with both loggers and everything logged; returns its trainer."""
    options = {"max_epochs": 2, "log_every_n_steps": 1, "accelerator": "cpu"} | options
    options.setdefault("logger", [lumen.CSVLogger(), lumen.TensorBoardLogger()])
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(task or Regression(dropout=0.2), loader(), val_dataloaders=loader(20, shuffle=False))
    return trainer
