"""A process that gets no further says where it stands, also where no other one waits for it."""

import logging
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.distributed.processes import Processes
from tests.helpers.tasks import Regression, quiet_trainer

WHERE = re.compile(r'test_watch\.py", line \d+ in __getitem__')


class Stuck(Dataset):
    """Some samples are there once somebody has said where the run stands."""

    def __init__(self, said, indices=(5,)):
        self.said, self.indices = said, indices

    def __len__(self):
        return 16

    def __getitem__(self, index):
        while index in self.indices and not self.said.exists():
            time.sleep(0.01)
        return torch.ones(6), torch.ones(1)


class Said(logging.Handler):
    def __init__(self, path):
        super().__init__()
        self.path, self.texts = path, []

    def emit(self, record):
        if "has done no step" in (text := record.getMessage()) and WHERE.search(text):
            self.texts.append(text)
            self.path.touch()


def stuck_fit(folder, workers, strategy, indices=(5,)):
    said = Said(folder / f"said-{time.monotonic_ns()}")
    logging.getLogger("lumen").addHandler(said)
    try:
        trainer = quiet_trainer(
            folder, max_epochs=1, strategy=strategy, enable_checkpointing=False, logger=False, log_level="WARNING"
        )
        trainer.fit(Regression(), DataLoader(Stuck(said.path, indices), 2, num_workers=workers))
    finally:
        logging.getLogger("lumen").removeHandler(said)
    return trainer.global_step, said.texts


@pytest.mark.parametrize("workers", [0, 1])
def test_one_process_whose_data_does_not_come_says_where_it_waits(tmp_path, workers):
    strategy = lumen.SingleDevice()
    strategy.processes = Processes()
    strategy.processes.timeout_s = strategy.processes.startup_timeout_s = 0.5
    steps, texts = stuck_fit(tmp_path, workers, strategy)
    assert steps == 8  # it went on once the sample came
    assert "rank 0 has done no step and no batch for 0.5 s" in texts[0]
    main, *worker = texts[0].split("a data worker:\n")
    assert WHERE.search(worker[0] if workers else main)


def stuck_on_ranks(folder):
    steps, texts = stuck_fit(Path(folder), 0, lumen.DDP(timeout_s=5, startup_timeout_s=5), range(16))
    return steps, bool(texts) and bool(WHERE.search(texts[0]))


@pytest.mark.slow
def test_processes_that_all_wait_for_data_say_where(tmp_path, group):
    assert group(2).run(stuck_on_ranks, str(tmp_path)) == [(4, True)] * 2


def test_a_run_that_gets_on_says_nothing_and_leaves_no_thread(tmp_path, caplog):
    before = threading.active_count()
    quiet_trainer(tmp_path, max_epochs=2).fit(Regression(), DataLoader(Stuck(tmp_path), 2))
    assert "has done no step" not in caplog.text
    assert threading.active_count() == before
