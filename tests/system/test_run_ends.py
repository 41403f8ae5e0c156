"""Ends of a run: a closed display, SIGQUIT, and kills near the end."""

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.jobs import Nursery
from tests.helpers.run_ends import list_checkpoints
from tests.promises.lives import final_state

MODULE = "tests.helpers.ending_run"

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
def test_closed_terminal_or_pipe_does_not_end_run(tmp_path, display):
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
    assert list_checkpoints(tmp_path)[-1] == "step-00000028"


# ---------------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery(MODULE)
    yield nursery.start
    nursery.close()


def run_attempt(start, directory, **options):
    """Run once, until it ends or kills itself. Return its end, or None, and the contents of its checkpoints."""
    directory.mkdir(exist_ok=True)
    code, _, output = start(directory, MODULE, options).wait()
    if code:
        assert code == -signal.SIGKILL or "KeyboardInterrupt" in output or "SystemExit" in output, output
        return None
    return json.loads((directory / "end.json").read_text()), final_state(directory / "runs")


def check_lives(start, folder, *histories, **options):
    """Compare runs that are killed by their history and started twice more with an uninterrupted run."""
    whole = run_attempt(start, folder / "whole", **options)
    for history in histories:
        for strike in history:
            assert run_attempt(start, folder / "struck", strike=strike, **options) is None, strike
        for _ in range(2):
            assert run_attempt(start, folder / "struck", **options) == whole
        shutil.rmtree(folder / "struck")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["average", "mean", "middle of an epoch", "by hand"])
def test_kills_in_end_hooks_leave_no_trace(tmp_path, nursery, kind):
    check_lives(nursery, tmp_path, ["on_train_end"] * 2, ["on_fit_end"], ["teardown"], ["pruning"], kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_ranks_end_as_they_would_have(tmp_path, nursery, strategy):
    check_lives(nursery, tmp_path, ["on_train_end"], ["pruning"], kind="average", devices=2, strategy=strategy)


def test_no_validating_checkpoint_is_left(tmp_path, nursery):
    check_lives(nursery, tmp_path, ["validation", "pruning"])


QUITTING = """
import os, signal
import lumen
from tests.helpers.tasks import Regression, loader

def on_train_batch_end(trainer, task, outputs, batch, batch_idx):
    if trainer.global_step == 3 and trainer.run.checkpoint is None:
        os.kill(os.getpid(), signal.SIGQUIT)

lumen.Trainer(
    max_steps=5, name="run", resume="auto", enable_progress_bar=False,
    callbacks=[
        lumen.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1),
        lumen.LambdaCallback(on_train_batch_end=on_train_batch_end),
    ],
).fit(Regression(), loader())
"""


def test_sigquit_ends_at_once_and_saves_nothing(tmp_path):
    def run():
        return subprocess.run(
            [sys.executable, "-c", QUITTING], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
            capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        ).returncode  # fmt: skip

    assert run() == -signal.SIGQUIT
    assert list_checkpoints(tmp_path) == ["step-00000002"]
    assert run() == 0
    assert list_checkpoints(tmp_path)[-1] == "step-00000005"
