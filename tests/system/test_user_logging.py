"""Messages of a user's program and of Lumen, as the program shows them."""

import re

import pytest

from tests.helpers.programs import run_python
from tests.helpers.user_logging import filter_messages

SCRIPT = """
import logging
{setup}
from tests.helpers.user_logging import fit_with_messages
from pathlib import Path
fit_with_messages(Path("."), "mine")
"""


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("", ["mine: said at 20", "warning: mine: said at 30"]),
        ("logging.basicConfig(level='INFO')", ["INFO:mine:said at 20", "WARNING:mine:said at 30"]),
        ("logging.basicConfig()", ["WARNING:mine:said at 30"]),
        pytest.param(
            "h = logging.StreamHandler(); logging.getLogger('mine').addHandler(h)",
            ["said at 20", "said at 30"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_user_messages_are_shown_once_despite_user_handlers(tmp_path, setup, shown):
    _, found = run_python("-c", SCRIPT.format(setup=setup), cwd=tmp_path)
    assert [line for line in found.splitlines() if "said" in line] == shown
    log = (tmp_path / "runs/run/run.log").read_text()
    assert filter_messages(log.splitlines()) == ["INFO mine: said at 20", "WARNING mine: said at 30"]


def test_run_log_has_warnings_and_progress_lines(tmp_path):
    script = """
import warnings
from pathlib import Path
from tests.helpers.tasks import Regression, loader, quiet_trainer
import lumen

class Warns(Regression):
    def training_step(self, batch):
        if self.global_step == 1:
            warnings.warn("said by the task")
        return super().training_step(batch)

bar = lumen.ProgressBar(plain_every_s=0.0)
quiet_trainer(Path("."), log_level="INFO", max_steps=3, callbacks=bar, enable_progress_bar=True).fit(Warns(), loader())
warnings.warn("after the run")
"""
    _, found = run_python("-c", script, cwd=tmp_path)
    log = (tmp_path / "runs/run/run.log").read_text()
    assert found.count("UserWarning: said by the task") == log.count("UserWarning: said by the task") == 1
    assert re.search(r"^[-0-9]+ [:,0-9]+ WARNING py\.warnings: .*: UserWarning: said by the task$", log, re.MULTILINE)
    assert "after the run" in found
    assert "after the run" not in log
    steps = re.findall(r"^step \d/3 .*$", found, re.MULTILINE)
    assert len(steps) == 3
    assert re.findall(r"INFO (step \d/3 .*)$", log, re.MULTILINE) == steps
