"""A process that gets no further says where it stands, also where no other one waits for it."""

import threading

import pytest
from torch.utils.data import DataLoader

import lumen
from lumen.distributed.processes import Processes
from tests.helpers.tasks import Regression, quiet_trainer
from tests.helpers.watch import WHERE, Stuck, stuck_fit


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


def test_a_run_that_gets_on_says_nothing_and_leaves_no_thread(tmp_path, caplog):
    before = threading.active_count()
    quiet_trainer(tmp_path, max_epochs=2).fit(Regression(), DataLoader(Stuck(tmp_path), 2))
    assert "has done no step" not in caplog.text
    assert threading.active_count() == before
