"""A program that is stopped says how to go on, and goes on."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from lumen.checkpoint import Checkpoint, find_checkpoints
from tests.helpers import ROOT
from tests.helpers.resume import newest

STOPPED = """
import sys, torch, lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer, weights
from pathlib import Path
where = sys.argv[1]
class Slow(Regression):
    def training_step(self, batch):
        print("train", flush=True)
        return super().training_step(batch)
    def validation_step(self, batch):
        if not self.trainer.sanity_checking:
            print("validate", flush=True)
        return super().validation_step(batch)
trainer = quiet_trainer(Path(sys.argv[1]), max_epochs=3, log_level="INFO", log_every_n_steps=1, resume="auto",
    callbacks=[lumen.ModelCheckpoint(every_n_epochs=0)])
class Wait(lumen.Callback):
    def on_train_batch_start(self, *_):
        import time; time.sleep(0.02)
    on_validation_batch_start = on_train_batch_start
trainer.callbacks.insert(0, Wait())
task = Slow(dropout=0.3)
trainer.fit(task, loader(num_workers=2), val_dataloaders=loader(20, 4, shuffle=False))
"""


def stop_at(directory, event, occurrence, signal_number):
    """Run the script above, send a signal at an event, and return the exit code and what was shown."""
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(directory)], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:  # fmt: skip
        for line in child.stdout:
            occurrence -= line.strip() == event
            if occurrence == 0:
                os.killpg(child.pid, signal_number)  # as a terminal does: the data workers get it too
                break
        shown = child.communicate()[1]
    return child.returncode, shown


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where the script has run to its end, undisturbed."""
    directory = tmp_path_factory.mktemp("whole")
    assert stop_at(directory, "never", 1, None)[0] == 0
    return directory


@pytest.mark.parametrize(
    ("event", "occurrence", "signal_number", "code"),
    [
        pytest.param("train", 9, signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow),
        ("validate", 7, signal.SIGTERM, 143),
    ],
)
def test_a_stopped_run_saves_says_how_to_go_on_and_loses_nothing(
    tmp_path, whole, event, occurrence, signal_number, code
):
    stopped = tmp_path / "stopped"
    returned, shown = stop_at(stopped, event, occurrence, signal_number)
    assert returned == code, shown
    assert 'resume="auto"' in shown
    assert shown.count("finishing this step") == 1
    assert len(find_checkpoints(stopped / "runs/run/checkpoints")) == 1
    assert stop_at(stopped, "never", 1, None)[0] == 0
    ends = [Checkpoint.open(newest(directory)) for directory in (stopped, whole)]
    for name in ends[1].names("model"):
        assert torch.equal(ends[0].tensor("model", name), ends[1].tensor("model", name))
    assert (stopped / "runs/run/metrics.csv").read_text() == (whole / "runs/run/metrics.csv").read_text()
