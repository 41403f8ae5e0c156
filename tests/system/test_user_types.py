"""What users annotate with public names passes a strict type checker."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.slow
@pytest.mark.time_limit(900)
def test_users_types_pass_strict_checks():
    """Hooks take `trainer: lumen.Trainer`, though Lumen's own classes do not import it, and keep their types."""
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "tests/projects/typed/project.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.stdout.startswith("Success"), checked.stdout + checked.stderr
