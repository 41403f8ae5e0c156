"""A TAB in real shells, where importing torch would be an error."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.shells import completed

pytestmark = pytest.mark.usefixtures("for_programs")

TASK = """\
import torch

class Net(torch.Task):
    def __init__(self, width: int, *, learning_rate=0.1): ...
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in ("runs/line/checkpoints", "runs/lines", "configs", "notes", "slow"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs/line/run.log").touch()
    (tmp_path / "configs/mine.yaml").write_text("model: {class_path: net.Net}\n")
    (tmp_path / "configs/mine.txt").touch()
    (tmp_path / "net.py").write_text(TASK)
    for name in ("torch", "jsonargparse"):
        (tmp_path / f"slow/{name}.py").write_text("raise SystemExit('this takes seconds')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'slow'}:{ROOT}")
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_what_lumen_takes_without_torch(shell, project):
    script = project / f"completion.{shell}"
    with script.open("w") as file:
        subprocess.run([sys.executable, "-m", "lumen", "completion", shell], stdout=file, check=True)
    assert "# to install: " in script.read_text().splitlines()[1]
    fit = "lumen fi\t --con\t con\tmi\t --trainer.prec\t bf16-t\t --trainer.accelerator=cp\t --model.lear\t 1"
    assert completed(shell, fit, project, script).split() == [
        "lumen", "fit", "--config", "configs/mine.yaml", "--trainer.precision", "bf16-true",
        "--trainer.accelerator=cpu", "--model.learning_rate", "1",
    ]  # fmt: skip
    report = "cd . && lumen repo\t ru\tli\t --outp\t x.html --verb\t"
    joined = "cd . && lumen report runs/line --output x.html --verbose"
    assert completed(shell, report, project, script).split() == joined.split()


def test_who_has_no_argcomplete_is_told_what_to_install(project):
    (project / "slow/argcomplete.py").write_text("raise ImportError('not here')\n")
    words = [sys.executable, "-m", "lumen", "completion", "bash"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Install it with: pip install 'lumen[completion]'" in done.stderr
    asked = os.environ | {"COMP_LINE": "lumen ", "COMP_POINT": "6", "_ARGCOMPLETE": "1"}
    silent = subprocess.run(words[:3], capture_output=True, text=True, check=False, env=asked)
    assert (silent.returncode, silent.stdout, silent.stderr) == (1, "", "")
