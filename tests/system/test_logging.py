"""Logged messages that a user's program shows."""

import re

import pytest

from tests.helpers.programs import run_python


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("logging.basicConfig()", "INFO:lumen:"),
        pytest.param("logging.basicConfig(filename='mine.log')", "", marks=pytest.mark.slow),
        pytest.param(
            "logging.basicConfig(handlers=[rich.logging.RichHandler()])", "INFO INFO:lumen:", marks=pytest.mark.slow
        ),
        ("pass", ""),
    ],
)
def test_messages_are_shown_once_in_format_of_program(tmp_path, setup, shown):
    script = f"""
import logging, sys
import rich.logging
{setup}
from tests.helpers.tasks import Regression, loader, quiet_trainer
from pathlib import Path
quiet_trainer(Path("."), log_level="INFO", max_steps=1).fit(Regression(), loader())
"""
    found = "".join(run_python("-c", script, cwd=tmp_path, COLUMNS="200"))
    (line,) = [line for line in found.splitlines() if "the run is in" in line]
    assert re.search(rf"^(\[.*\] |){shown}the run is in runs/run", re.sub(" +", " ", line))
    assert (tmp_path / "runs/run/run.log").read_text().count("finished: ") == 1
    if "mine.log" in setup:
        assert (tmp_path / "mine.log").read_text().count("INFO:lumen:the run is in") == 1
