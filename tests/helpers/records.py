"""Helpers for the records of a run."""

import os
import signal

import pytest

import lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer


def fit(tmp_path, task=None, **options):
    options = {"log_every_n_steps": 4, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(task or Regression(), loader(40, 8), val_dataloaders=loader(20, 8, shuffle=False))
    return trainer


class CutInValidation(Regression):
    """Task that requests a stop in the validation of a step."""

    def __init__(self, step=None):
        super().__init__()
        self.step = step

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch)
        if (self.global_step, batch_idx) == (self.step, 0):
            os.kill(os.getpid(), signal.SIGTERM)


def record_until_plateau(folder, step, strategy):
    """Return the record of a run that a plateau ends after its second validation, perhaps interrupted in one."""
    options = {
        "max_epochs": 9, "log_every_n_steps": 4, "val_check_interval": 3, "gradient_clip_val": 1.0,
        "strategy": strategy,
    }  # fmt: skip

    def stopping():
        return [lumen.EarlyStopping("val_loss", patience=1, min_delta=1e9)]

    if step is not None:
        with pytest.raises(SystemExit):
            fit(folder, CutInValidation(step), **options, callbacks=stopping())
    trainer = fit(folder, CutInValidation(), **options, callbacks=stopping(), resume="auto")
    return (trainer.run_directory / "metrics.csv").read_text()
