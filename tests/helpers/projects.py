"""Projects for Lightning in `tests/projects`: their copies, and the commands in them."""

import os
import re
import shutil
import subprocess
import sys

from tests.helpers import ROOT

PROJECTS = ROOT / "tests/projects"
LIGHTNING = re.compile(r"\b(pytorch_)?lightning\b")


def copy_project(name, to):
    """Return a copy of a project, with its repository."""
    shutil.copytree(PROJECTS / name, to, ignore=shutil.ignore_patterns("__pycache__"))
    git(to, "init", "-q")
    git(to, "add", ".")
    git(to, "commit", "-qm", "written for Lightning")
    return to


def git(path, *words):
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=path, check=True, capture_output=True
    )


def lumen(directory, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lumen", *words]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
