"""What docs/guides/finders.md shows works as shown."""

import os
import re
import subprocess
import sys

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401

PAGE = (ROOT / "docs/guides/finders.md").read_text()


def run_block(tmp_path, heading, number=0):
    """Run one piece of Python of a section in a process of its own. Returns what it printed."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    script = re.findall(r"```python\n(.*?)```", section, re.S)[number]
    (tmp_path / "train.py").write_text(script)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_finds_a_learning_rate(tmp_path):
    suggested, given = re.search(r"suggested: (\S+) set: (\S+)", run_block(tmp_path, "A learning rate")).groups()
    assert float(suggested) == float(given)
    assert 0.01 < float(given) < 10
    assert (tmp_path / "lr_find.png").stat().st_size > 1000


def test_the_page_finds_a_batch_size(tmp_path):
    assert "micro-batches of 128" in run_block(tmp_path, "A batch size")


def test_the_page_skips_a_spike(tmp_path):
    assert "1 spike, 49 updates of 50 batches" in run_block(tmp_path, "Spikes")


def test_the_page_goes_back_behind_a_spike(tmp_path):
    assert "[[16, 23]] 43 updates of 50 batches" in run_block(tmp_path, "Spikes", 1)


def test_spike_detection_is_named_on_the_command_line(config_directory):
    words = re.search(r"`(--trainer\.callbacks\+=SpikeDetection [^`]*)`", PAGE)[1].split()
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    (detection,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == "SpikeDetection")
    assert detection.rtol == 5.0
