"""Hang watch: a process that makes no progress reports its location, even if no other process waits."""

import math
from pathlib import Path

import pytest

import lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer
from tests.helpers.watch import WHERE, fit_until_stuck


def fit_stuck_on_ranks(folder):
    steps, texts = fit_until_stuck(Path(folder), 0, lumen.DDP(timeout_s=10, startup_timeout_s=10), range(16))
    return steps, bool(texts) and bool(WHERE.search(texts[0]))


def fit_for_ever(folder):
    strategy = lumen.DDP(timeout_s=math.inf, startup_timeout_s=math.inf)
    trainer = quiet_trainer(Path(folder), max_steps=3, strategy=strategy)
    trainer.fit(Regression(), loader())
    return trainer.global_step


def test_limits_of_processes_may_be_infinite(tmp_path, group):
    assert group(2).run(fit_for_ever, str(tmp_path)) == [3, 3]


@pytest.mark.slow
def test_processes_that_all_wait_for_data_say_where(tmp_path, group):
    assert group(2).run(fit_stuck_on_ranks, str(tmp_path)) == [(4, True)] * 2
