"""Examples for two devices: a GPT with a killed and restarted worker, and the digits with DDP tricks."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers.jobs import ROOT, end_processes, find_processes
from tests.helpers.tables import read_rows

SHORT = ["--trainer.max_steps=30", "--trainer.val_check_interval=10", "--trainer.log_every_n_steps=1",
         "--trainer.callbacks.snapshots.every_n_train_steps=5", "--model.warmup_steps=5"]  # fmt: skip


# -------------------------------------------------------------------- minGPT under torchrun


class Job:
    """Command that the example shows, run in a temporary directory with the snapshots at a URL."""

    def __init__(self, home, *options):
        self.home = home
        home.mkdir()
        for name in ("models", "datamodules"):
            (home / name).symlink_to(ROOT / name)
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        fit = ["-m", "lumen", "fit", "--config", "models/mingpt.yaml"]
        snapshots = ["--trainer.callbacks.snapshots.dirpath", f"file://{home}/snapshots"]
        with (home / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *agent, *fit, *snapshots, *options], cwd=home, stdout=output, stderr=output,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    @property
    def output(self):
        return (self.home / "output").read_text()

    def kill_after_a_snapshot(self, rank):
        """Kill a worker after a snapshot, like the system when memory is full."""
        deadline_s = time.monotonic() + 120
        while not list(self.home.glob("snapshots/step-*/manifest.json")):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.02)
        here = f"\0RANK={rank}\0".encode()
        (worker,) = (pid for pid in find_processes(self.home) if here in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(worker, signal.SIGKILL)

    def rows(self):
        """Return the logged rows after the run."""
        try:
            assert self.process.wait(timeout=240) == 0, self.output
        finally:
            end_processes(self.home)
        return read_rows(self.home / "runs/mingpt/metrics.csv")


@pytest.mark.slow
@pytest.mark.time_limit(500)
def test_losses_of_restarted_workers_are_undisturbed(tmp_path, monkeypatch, capsys):
    """The test also generates text with the command in the config's header."""
    killed = Job(tmp_path / "killed", *SHORT)
    killed.kill_after_a_snapshot(rank=1)
    rows = killed.rows()
    assert "(exitcode: -9) local_rank: 1" in killed.output
    assert killed.output.count("resuming from ") == 1
    assert [row["step"] for row in rows if row["train_loss"]] == [str(step) for step in range(1, 31)]
    assert rows == Job(tmp_path / "undisturbed", *SHORT).rows()
    check_writing(killed, monkeypatch, capsys)


@pytest.mark.torture
@pytest.mark.time_limit(500)
def test_a_killed_run_restarts_learns_and_writes(tmp_path, monkeypatch, capsys):
    """The whole example runs: torchrun, a killed worker, a loss of 2, and text by the command in the config."""
    job = Job(tmp_path / "job")
    job.kill_after_a_snapshot(rank=1)
    assert float(job.rows()[-1]["val_loss"]) <= 2.0
    assert "(exitcode: -9) local_rank: 1" in job.output
    assert job.output.count("resuming from ") == 1
    check_writing(job, monkeypatch, capsys)


def check_writing(job, monkeypatch, capsys):
    monkeypatch.chdir(job.home)
    capsys.readouterr()
    (shown,) = re.findall("^#   lumen (predict .*)", Path("models/mingpt.yaml").read_text(), re.M)
    words = shlex.split(shown)
    assert main([*words, f"--trainer.callbacks.snapshots.dirpath=file://{job.home}/snapshots"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text.startswith(words[-1])
    assert len(text) == len(words[-1]) + 200


# -------------------------------------------------------------------- tricks of DDP


@pytest.mark.slow
@pytest.mark.time_limit(400)
def test_digits_on_two_ranks_reach_97_percent(tmp_path):
    """The rate falls, and 12 epochs are enough; `test_digits.py` shows that the run stops early."""
    words = ["--config", "models/digits_ddp.yaml", "--trainer.default_root_dir", str(tmp_path)]
    fit = [sys.executable, "-m", "lumen", "fit", *words, "--trainer.devices", "2", "--trainer.max_epochs", "12"]
    done = subprocess.run(fit, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rates = [float(row["lr/decay"]) for row in read_rows(tmp_path / "digits_ddp/metrics.csv") if row["lr/decay"]]
    assert max(rates) == 0.05
    assert rates[-1] <= 0.01
    assert main(["validate", *words, "--ckpt_path=best", f"--output={tmp_path}/values.json"]) == 0
    assert json.loads((tmp_path / "values.json").read_text())[0]["val_acc"] >= 0.97
