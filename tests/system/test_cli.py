"""Command line as a separate program."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli import read_saved_config, write_config
from tests.helpers.cli_tasks import Spy
from tests.helpers.working_directory import CONFIG

pytestmark = pytest.mark.usefixtures("config_directory")


def python(*words, cwd=None):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [["--help"], ["--version"], []])
def test_lumen_answers_without_torch(words):
    code = (
        f"import sys; from lumen.cli import main; code = main({words}); "
        "sys.exit(code or 'torch' in sys.modules or 'jsonargparse' in sys.modules)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lumen" in done.stdout
    assert ("validate" in done.stdout) == (words != ["--version"])


def test_classes_are_found_in_the_working_directory(tmp_path):
    write_config("my_task.py", "from tests.helpers.cli_tasks import Line\n\nclass Mine(Line):\n    pass\n")
    write_config("mine.yaml", {**CONFIG, "model": "my_task.Mine"})
    # -P: Python itself does not search the working directory
    done = python("-P", "-m", "lumen", "fit", "--config", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_saved_config("runs/mine")["model"]["class_path"] == "my_task.Mine"
    assert "finished: max_epochs=2 reached at step 6" in done.stderr


def test_command_printed_by_interrupted_run_resumes_it(tmp_path):
    words = [sys.executable, "-m", "lumen", "fit", "--config", "line.yaml", "--trainer.max_epochs", "100000000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while not list(Path("runs/line/checkpoints").glob("step-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 143
    command = shlex.split(said.splitlines()[-1])
    assert command[0] == "lumen"
    before = int(max(Path("runs/line/checkpoints").glob("step-*")).name[5:13])
    assert main([*command[1:], "--trainer.max_epochs", "null", "--trainer.max_steps", str(before + 5)]) == 0
    assert Spy.trainer.run_directory == Path("runs/line")
    assert Spy.trainer.global_step == before + 5


def test_closed_output_pipe_loses_no_results(tmp_path):
    words = [sys.executable, "-m", "lumen", "predict", "--config", "line.yaml", "--model=tests.helpers.cli_tasks.Slope"]
    words += ["--data.samples=20000", "--data.batch_size=5000", "--output=text.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, **pipes) as process:
        assert process.stdout.readline().startswith("y = ")
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert "Error" not in said
    assert len(Path("text.jsonl").read_text().splitlines()) == 20000
