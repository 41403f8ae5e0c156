"""Programs of the guides on learning rates, memory and loss spikes: each prints what its guide shows."""

import os
import re
import subprocess
import sys

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.pages import find_programs
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401

SPIKES = (ROOT / "docs/guides/loss-spikes.md").read_text()


def run_programs(tmp_path, page, *numbers):
    """Run programs of a page in order in a new process. Return their output."""
    programs = find_programs(f"docs/guides/{page}.md")
    (tmp_path / "train.py").write_text("".join(programs[number] for number in numbers))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_finds_a_learning_rate(tmp_path):
    said = run_programs(tmp_path, "find-a-learning-rate", 0)
    suggested, given = re.search(r"suggested: (\S+) set: (\S+)", said).groups()
    assert float(suggested) == float(given)
    assert 0.01 < float(given) < 10
    assert (tmp_path / "lr_find.png").stat().st_size > 1000


def test_the_page_finds_a_batch_size(tmp_path):
    assert "micro-batches of 128" in run_programs(tmp_path, "out-of-memory", 0, 1)
    assert (tmp_path / "runs/halved/checkpoints").exists()


@pytest.mark.parametrize(("page", "finder"), [("find-a-learning-rate", "LearningRate"), ("out-of-memory", "BatchSize")])
def test_finders_are_set_by_options_of_their_page(config_directory, page, finder):
    text = (ROOT / f"docs/guides/{page}.md").read_text()
    words = re.search(rf"`(--trainer\.[^`]*\+={finder}Finder[^`]*)`", text)[1].split()
    assert main(["fit", "--config", "line.yaml", *words, "--trainer.max_steps=0"]) == 0
    assert f"{finder}Finder" in [type(each).__name__ for each in Spy.trainer.callbacks]


@pytest.mark.parametrize(
    ("number", "said"), [(0, "1 spike, 49 updates of 50 batches"), (1, "[[16, 23]] 43 updates of 50 batches")]
)
def test_the_page_skips_and_rolls_back_spikes(tmp_path, number, said):
    assert said in SPIKES
    assert said in run_programs(tmp_path, "loss-spikes", number)


def test_spike_detection_is_named_on_the_command_line(config_directory):
    words = re.search(r"`(--trainer\.callbacks\+=SpikeDetection [^`]*)`", SPIKES)[1].split()
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    (detection,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == "SpikeDetection")
    assert detection.rtol == 5.0
