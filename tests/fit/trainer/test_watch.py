"""Hang watch: a process that makes no progress reports its location, even if no other waits; a slow run continues."""

import re
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import lumen
from lumen.cli import main
from tests.helpers.tasks import Regression, loader, quiet_trainer
from tests.helpers.watch import WHERE, Stuck, fit_until_stuck


@pytest.mark.parametrize("workers", [0, 1])
def test_stalled_data_reports_where_it_waits(tmp_path, workers):
    steps, texts = fit_until_stuck(tmp_path, workers, lumen.SingleDevice(timeout_s=1.2, startup_timeout_s=60))
    assert steps == 8  # the run continued once the sample arrived
    worker = r"waits for its data worker \d+, which " if workers else ""
    place = rf"rank 0 {worker}is in user code: \S+{WHERE.pattern}"
    assert re.match(
        rf"no step and no batch was done for [\d.]+ s: {place}\. Lumen ends the job after [\d.]+ s", texts[0]
    )


def test_busy_worker_is_named_not_an_idle_one(tmp_path):
    """The first worker is idle: the last batch is the second one's."""
    _, texts = fit_until_stuck(tmp_path, 2, lumen.SingleDevice(timeout_s=4, startup_timeout_s=60), indices=(14,))
    assert re.search(rf"waits for its data worker \d+, which is in user code: \S+{WHERE.pattern}", texts[0])


def test_progressing_run_reports_nothing_and_leaves_no_thread(tmp_path, caplog):
    before = threading.active_count()
    quiet_trainer(tmp_path, max_epochs=2).fit(Regression(), DataLoader(Stuck(tmp_path), 2))
    assert "no step and no batch was done" not in caplog.text
    assert threading.active_count() == before


class Slow(Regression):
    """Task whose steps each take longer than `timeout_s`."""

    def training_step(self, batch):
        time.sleep(0.3)
        return super().training_step(batch)


def test_slow_steps_extend_the_limit(tmp_path):
    """The first step has startup_timeout_s; later steps may take five times the longest one before."""
    strategy = lumen.SingleDevice(timeout_s=0.2, startup_timeout_s=20)
    trainer = quiet_trainer(tmp_path, max_steps=3, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.fit(Slow(), loader())
    assert trainer.global_step == 3


def test_limits_may_be_infinite_in_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(
        "model: {class_path: tests.helpers.cli_tasks.Line, init_args: {lr: 0.05}}\n"
        "data: tests.helpers.cli_tasks.Points\n"
        "trainer:\n  max_steps: 2\n  enable_progress_bar: false\n"
        "  strategy: {class_path: lumen.SingleDevice, init_args: {timeout_s: .inf, startup_timeout_s: .inf}}\n"
    )
    assert main(["fit", "--config", "run.yaml"]) == 0


def test_debugged_run_is_not_ended(tmp_path, caplog):
    class Waiting(lumen.Callback):
        def on_train_batch_end(self, *_):
            while "Lumen does not end an interactive or debugged run" not in caplog.text:
                time.sleep(0.02)

    strategy = lumen.SingleDevice(timeout_s=0.5, startup_timeout_s=0.5)
    before = sys.gettrace()
    sys.settrace(lambda *_: None)  # like a debugger
    try:
        trainer = quiet_trainer(tmp_path, max_steps=1, strategy=strategy, callbacks=[Waiting()], log_level="WARNING")
        trainer.fit(Regression(), loader())
    finally:
        sys.settrace(before)
    assert "rank 0 is in user code" in caplog.text
