"""A run whose display goes away."""

import os
import pty
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.run_ends import names

TALKING = """
import time
from pathlib import Path
import lumen
from tests.helpers.tasks import Regression, loader

class Talking(Regression):
    def training_step(self, batch):
        time.sleep(0.01)
        self.print("step", self.global_step)
        return super().training_step(batch)

def on_train_epoch_end(trainer, task):
    while not Path("closed").exists():
        time.sleep(0.01)

lumen.Trainer(
    max_epochs=4, name="run", profiler="simple", logger=[lumen.CSVLogger()],
    callbacks=[lumen.ProgressBar(plain_every_s=0), lumen.LambdaCallback(on_train_epoch_end=on_train_epoch_end)],
).fit(Talking(), loader(), val_dataloaders=loader())
"""


@pytest.mark.parametrize(
    "display",
    [pytest.param("pipe", marks=pytest.mark.slow), "terminal", pytest.param("closed", marks=pytest.mark.slow)],
)
def test_a_display_that_is_gone_does_not_end_the_run(tmp_path, display):
    ours, theirs = pty.openpty() if display == "terminal" else os.pipe()
    words = [sys.executable, "-c", TALKING]
    if display == "closed":  # from the beginning
        words = ["bash", "-c", 'exec "$@" >&- 2>&-', "bash", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while shown.count(b"\n") < 2 and display != "closed":
            shown += os.read(ours, 100)
        os.close(ours)
        (tmp_path / "closed").touch()
    assert process.returncode == 0
    said = (tmp_path / "runs/run/run.log").read_text()
    assert "finished: max_epochs=4 reached at step 28, epoch 4" in said
    assert names(tmp_path)[-1] == "step-00000028"
