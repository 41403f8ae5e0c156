"""Files of the working directory: Lumen's processes do not import them in place of needed modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.interpreters import SHADOWS, shadow_modules

pytestmark = pytest.mark.usefixtures("program_directory")

SCRIPT = """
import lumen
from tests.helpers.tasks import Regression, loader
import beside

if __name__ == "__main__":
    trainer = lumen.Trainer(
        max_steps=2, devices=2, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False
    )
    trainer.fit(Regression(), loader(16, 4))
    assert trainer.world_size == beside.WORLD
"""


def test_launcher_imports_nothing_of_the_working_directory():
    shadow_modules(*SHADOWS)
    Path("project").mkdir()
    Path("project/train.py").write_text(SCRIPT)
    Path("project/beside.py").write_text("WORLD = 2")
    command = [sys.executable, "project/train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr


def test_variants_of_verify_are_isolated_from_the_directory():
    """The command imports all of them except `mine` before it looks for the modules of the user."""
    Path("mine.py").write_text("from tests.helpers.verified_tasks import Clean, Data")
    Path("mine.yaml").write_text("{seed_everything: 1, model: mine.Clean, data: mine.Data, trainer: {max_epochs: 3}}")
    shadow_modules(*SHADOWS)
    command = [sys.executable, "-P", "-m", "lumen", "verify", "--config", "mine.yaml", "--only", "again"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert "imported" not in done.stdout + done.stderr
