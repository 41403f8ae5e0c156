"""Core of Lumen: it works without the command line, the tools and the integrations."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.architecture import AROUND_THE_CORE

#: Tests of a step, a save, a load, hooks and arguments, which use only the core.
TESTS = (
    "fit/trainer/test_arguments.py",
    "fit/task/test_hooks.py",
    "fit/checkpoint/test_load.py",
    "fit/loop/test_loop.py",
    "fit/loop/test_manual_optimization.py",
    "fit/checkpoint/test_optimizer_state.py",
    "fit/checkpoint/test_resume.py",
    "fit/loop/test_validation.py",
    "promises/test_hand_written_loop.py",
    "unit/checkpoint/test_storage.py",
)
#: Hook that blocks an editable installation, which would find the missing packages in the repository.
NO_REPOSITORY = f"""
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.rpartition(".")[0] == "lumen" and name.rpartition(".")[2] in {AROUND_THE_CORE}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
"""


@pytest.mark.time_limit(600)
def test_the_core_passes_its_tests_alone(tmp_path):
    def leave_out(folder, names):
        return [name for name in names if folder == str(ROOT / "lumen") and name in AROUND_THE_CORE]

    shutil.copytree(ROOT / "lumen", tmp_path / "lumen", ignore=leave_out)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("projects", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(NO_REPOSITORY)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    place = [sys.executable, "-c", "import lumen, sys; print(lumen.__file__); import lumen.tools"]
    found = subprocess.run(place, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == str(tmp_path / "lumen/__init__.py")
    assert "No module named 'lumen.tools'" in found.stderr
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not torture"]
    words += [f"tests/{name}" for name in TESTS]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
