"""Working directories for the command line and programs, without settings from the environment."""

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers import ROOT

LINE = """\
seed_everything: 7
model: {class_path: tests.helpers.cli_tasks.Line, init_args: {lr: 0.05}}
data: {class_path: tests.helpers.cli_tasks.Points}
trainer:
  max_steps: 2
  callbacks: {spy: tests.helpers.cli_tasks.Spy}
  enable_progress_bar: false
  enable_model_summary: false
"""

CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": "tests.helpers.cli_tasks.Line", "init_args": {"lr": 0.05}},
    "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 12}},
    "trainer": {
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "callbacks": {"spy": "tests.helpers.cli_tasks.Spy"},
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


def find_commands(text):
    """Return every command that a run has printed, by the word before it."""
    return dict(re.findall(r"^(\w+): ((?:lumen|python\S*) .*)$", text, re.MULTILINE))


def clear_environment(monkeypatch):
    """Remove settings of Lumen and launchers from the environment; new processes find the checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in os.environ:
        if name.startswith(("LUMEN_", "SLURM_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


@pytest.fixture
def program_directory(tmp_path, monkeypatch):
    """Change to a temporary working directory for the programs that a test starts."""
    monkeypatch.chdir(tmp_path)
    clear_environment(monkeypatch)


@pytest.fixture
def config_directory(request, tmp_path, monkeypatch):
    """Change to a temporary working directory with the module's CONFIG as line.yaml, and clear the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in os.environ:
        if name.startswith("LUMEN_"):
            monkeypatch.delenv(name)
    config = request.module.CONFIG
    Path("line.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    from tests.helpers.cli_tasks import Spy  # imported after torch, which conftest configures first

    Spy.trainer = Spy.task = None
