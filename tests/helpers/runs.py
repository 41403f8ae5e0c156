"""Helpers for tests of `lumen runs`."""

import json
from pathlib import Path

import pytest

from tests.helpers.working_directory import CONFIG as ONE_CALLBACK

SAVER = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss", "mode": "max"}}
TRAINER = ONE_CALLBACK["trainer"] | {"max_epochs": 3, "callbacks": [SAVER]}
CONFIG = ONE_CALLBACK | {"trainer": TRAINER}


@pytest.fixture
def show_runs(capsys):
    """Return the output of the command."""

    def run(*words, code=0):
        from lumen.cli import main  # imported here: the core's tests use this file without it

        capsys.readouterr()
        assert main(["runs", *map(str, words)]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def list_runs(show_runs):
    """Return the JSON of the command by the name of each run."""

    def run(*words, code=0):
        runs = json.loads(show_runs("--json", *words, code=code))
        found = {Path(each["path"]).name: each for each in runs}
        assert len(found) == len(runs)
        return found

    return run


def fit(*words):
    from lumen.cli import main  # imported here: the core's tests use this file without it

    assert main(["fit", "--config", "line.yaml", *words]) == 0


ENDINGS = """
import os, signal
from tests.helpers.cli_tasks import Line

class Asked(Line):
    def training_step(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch)

class AskedTwice(Line):
    def training_step(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch)

class Killed(Line):
    def training_step(self, batch):
        if self.global_step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

class Wordy(Line):
    def training_step(self, batch):
        if self.global_step == 1:
            raise RuntimeError("what is wrong\\nand what it comes from")
        return super().training_step(batch)
"""


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
