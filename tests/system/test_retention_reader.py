"""Checkpoints that one process reads while the run removes them: complete, or one clear error."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints, open_newest_valid
from lumen.checkpoint.format import manifest
from lumen.cli import main
from lumen.errors import CheckpointDamaged
from tests.helpers import ROOT
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Uniform(Regression):
    """Task whose checkpoint holds the step in every number, which would reveal a mixture of two checkpoints."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.zeros(64, 256)) for _ in range(8))
        self.register_buffer("last", torch.zeros(3))

    def training_step(self, batch):
        time.sleep(0.02)
        return super().training_step(batch) + 0.0 * sum(table[0, 0] for table in self.tables)


def fill(trainer, task):
    with torch.no_grad():
        for tensor in (*task.parameters(), *task.buffers()):
            tensor.fill_(trainer.global_step / 1024)


def train(folder, asynchronous):
    """Train until the process is killed."""
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=2, asynchronous=asynchronous)
    callbacks = [lumen.LambdaCallback(on_step_end=fill), saver]
    quiet_trainer(folder, max_epochs=1_000_000, callbacks=callbacks, logger=False).fit(Uniform(), loader())


@contextmanager
def start_run(folder, asynchronous=False):
    """Start a run in a separate process; yield the folder of its checkpoints."""
    code = f"from tests.system.test_retention_reader import *\ntrain(Path({str(folder)!r}), {asynchronous})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        checkpoints = folder / "runs/run/checkpoints"
        try:
            wait_until(lambda: checkpoints.is_dir() and find_checkpoints(checkpoints))
            yield checkpoints
            assert process.poll() is None  # no reader disturbs the run
        finally:
            process.kill()


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def list_checkpoints(checkpoints):
    """Return the checkpoints, oldest first; all of them may be gone at the next look."""
    while not (found := find_checkpoints(checkpoints)):
        pass
    return found


def read_checkpoint(path, after_opening):
    """Read a checkpoint completely; return the error if there is one."""
    try:
        checkpoint = Checkpoint.open(path)
        after_opening(path)
        model = dict(checkpoint.as_mapping("model"))
        moments = dict(checkpoint.as_mapping("optimizer"))
    except CheckpointDamaged as error:
        return error
    assert all((tensor == checkpoint.info["step"] / 1024).all() for tensor in model.values())
    assert len(moments) == 3 * (len(model) - 1)  # all except the buffer
    return None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoint_removed_while_reading_is_complete_or_named(tmp_path, asynchronous):
    with start_run(tmp_path, asynchronous) as checkpoints:
        wait_until(lambda: read_checkpoint(list_checkpoints(checkpoints)[-1], lambda path: None) is None)
        for which, after_opening in ((-1, wait_until_removed), (0, lambda path: None)):  # while open; at any place
            errors = []
            deadline_s = time.monotonic() + 60
            while len(errors) < 3:
                assert time.monotonic() < deadline_s
                path = list_checkpoints(checkpoints)[which]
                if error := read_checkpoint(path, after_opening):
                    assert str(path) in str(error)
                    assert "was removed while it was read" in str(error)
                    assert not path.exists()
                    errors.append(error)


def wait_until_removed(path):
    wait_until(lambda: not path.exists())


def test_newest_checkpoint_of_running_run_is_found(tmp_path, monkeypatch):
    """The newest checkpoint may be removed meanwhile."""
    digest, looked_at = manifest.compute_sha256, set()

    def waiting(path, size):
        monkeypatch.undo()
        looked_at.add(path.parent)
        wait_until_removed(path.parent)
        return digest(path, size)

    with start_run(tmp_path) as checkpoints:
        wait_until(lambda: read_checkpoint(list_checkpoints(checkpoints)[-1], lambda path: None) is None)
        for _ in range(3):
            monkeypatch.setattr(manifest, "compute_sha256", waiting)
            assert open_newest_valid(checkpoints, pytest.fail).path > max(looked_at)
    assert len(looked_at) == 3


def test_export_from_running_run_is_complete_or_absent(tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    output, codes = Path("x.safetensors"), []
    with start_run(tmp_path) as checkpoints:
        deadline_s = time.monotonic() + 60
        while codes.count(0) < 2 or codes.count(1) < 2:
            assert time.monotonic() < deadline_s
            path = list_checkpoints(checkpoints)[0]
            codes.append(main(["export", str(path), "--output", str(output)]))
            said = capsys.readouterr().err
            if codes[-1] == 0:
                values = {float(each) for tensor in load_file(output).values() for each in (tensor.min(), tensor.max())}
                assert values == {int(path.name[5:]) / 1024}
                output.unlink()
            else:
                assert said.count("error: ") == 1
                assert str(path) in said
                assert "is damaged" not in said
            assert os.listdir() == []
