"""Helper for tests of the hang watch."""

import logging
import re
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lumen.trainer import hang_watch
from tests.helpers.tasks import Regression, quiet_trainer

WHERE = re.compile(r"helpers/watch\.py:\d+ in __getitem__")


class Stuck(Dataset):
    """Data set of which some samples arrive only after the report of a location."""

    def __init__(self, said, indices=(5,)):
        self.said, self.indices = said, indices

    def __len__(self):
        return 16

    def __getitem__(self, index):
        while index in self.indices and not self.said.exists():
            time.sleep(0.01)
        return torch.ones(6), torch.ones(1)


class ReportFile(logging.Handler):
    def __init__(self, path):
        super().__init__()
        self.path, self.texts = path, []

    def emit(self, record):
        if "no step and no batch was done" in (text := record.getMessage()):
            self.texts.append(text)
            self.path.touch()


def fit_until_stuck(folder, workers, strategy, indices=(5,), **options):
    said = ReportFile(folder / f"said-{time.monotonic_ns()}")
    logging.getLogger("lumen").addHandler(said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            hang_watch, "in_notebook", True
        )  # the watch only warns, so it never ends the process of the tests
        trainer = quiet_trainer(
            folder, max_epochs=1, strategy=strategy, enable_checkpointing=False, logger=False, log_level="WARNING",
            **options,
        )  # fmt: skip
        trainer.fit(Regression(), DataLoader(Stuck(said.path, indices), 2, num_workers=workers))
    logging.getLogger("lumen").removeHandler(said)
    return trainer.global_step, said.texts
