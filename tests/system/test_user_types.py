"""Types of users: annotations with public names pass a strict type checker."""

import pytest

from tests.helpers.programs import run_python


@pytest.mark.slow
@pytest.mark.time_limit(900)
def test_users_types_pass_strict_checks():
    """Hooks take `trainer: lumen.Trainer`, which Lumen's classes do not import, and keep their types."""
    assert run_python("-m", "mypy", "--strict", "tests/projects/typed/project.py")[0].startswith("Success")
