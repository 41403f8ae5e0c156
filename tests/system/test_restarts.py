"""Restarts by Lumen's launcher after a failure: its messages, and the results."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lumen

SCRIPT = """
import os, signal, sys, time
import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, loader

MODE, DEVICES, MAX_RESTARTS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

class Task(Regression):
    def training_step(self, batch):
        step, rank = self.trainer.global_step, self.global_rank
        if MODE == "killed" and LIFE < 2 and step == 3 + 3 * LIFE and rank == LIFE % DEVICES:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "error" and step == 3 and rank == DEVICES - 1:
            raise KeyError(f"what the user did in process {os.getpid()}")
        if MODE == "in vain" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "once" and LIFE == 0 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        if MODE == "config" and step == 3:
            raise ConfigError("it cannot work")
        if MODE == "stopped" and step == 3 and not os.path.exists("asked"):
            open("asked", "w").close()
            os.kill(os.getppid(), signal.SIGTERM)
            while self.trainer.run.ending.vote.requested_signal is None:
                time.sleep(0.01)
        if MODE == "requeued" and step == 3 and not os.path.exists("asked"):
            open("asked", "w").close()
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch)

if MODE == "killed" and LIFE and os.environ["RANK"] == str(DEVICES - 1):
    time.sleep(2)  # the others are there long before
trainer = lumen.Trainer(
    max_steps=10, devices=DEVICES or None, accelerator="cpu", name="run", seed=5, max_restarts=MAX_RESTARTS,
    global_batch_size=8, callbacks=[lumen.ModelCheckpoint(every_n_train_steps=2)], log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False, resume=sys.argv[4] if len(sys.argv) > 4 else None,
)
trainer.fit(Task(), loader(40, 4))
"""
RESTARTED = (
    r"restart (\d) of (\d): rank (\d) was killed by SIGKILL; resuming from step (\d+); lost: (\d) steps?, [\d.]+ s"
)


@pytest.fixture(autouse=True)
def script(program_directory):
    Path("job.py").write_text(SCRIPT)


def run(*words):
    job = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200, check=False)
    return job.returncode, job.stdout + job.stderr


def train_uninterrupted(devices):
    assert run("job.py", "fine", str(devices), "0")[0] == 0
    rows = Path("runs/run/metrics.csv").read_bytes()
    Path("runs").rename("undisturbed")
    return rows


@pytest.mark.slow
@pytest.mark.time_limit(300)
def test_killed_ranks_are_restarted_with_exact_losses():
    expected = train_uninterrupted(2)
    code, output = run("job.py", "killed", "2", "2")
    assert code == 0, output
    said = [("1", "2", "0", "2", "1"), ("2", "2", "1", "6", "0")]
    assert re.findall(RESTARTED, output) == re.findall(RESTARTED, Path("runs/run/run.log").read_text()) == said
    assert Path("runs/run/metrics.csv").read_bytes() == expected
    assert [path.name for path in Path("runs").iterdir()] == ["run"]


@pytest.mark.slow
def test_restart_before_first_checkpoint_repeats_no_row():
    """The new run is killed before its first checkpoint, and begins again at the checkpoint of the other run."""
    train_uninterrupted(1)
    code, output = run("job.py", "once", "1", "1", "undisturbed/run/checkpoints/step-00000008")
    assert code == 0, output
    steps = [int(row.partition(",")[0]) for row in Path("runs/run/metrics.csv").read_text().splitlines()[1:]]
    assert steps == [9, 10]


PROGRAM = """
import os, signal
import lumen
from tests.helpers import cli_tasks

class Dying(cli_tasks.Line):
    def training_step(self, batch):
        if self.trainer.global_step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)

lumen.CLI(Dying, cli_tasks.Points)
"""


@pytest.mark.slow
def test_unseeded_command_is_restarted():
    Path("train.py").write_text(PROGRAM)
    saving = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2"]
    code, output = run("train.py", "fit", "--trainer.max_steps=5", "--trainer.max_restarts=1", *saving)
    assert code == 0, output
    assert "resuming from step 2" in output
    assert "finished: max_steps=5 reached at step 5" in output


@pytest.mark.slow
def test_one_process_is_started_again_too():
    code, output = run("job.py", "killed", "1", "2")
    assert code == 0, output
    assert [each[:4] for each in re.findall(RESTARTED, output)] == [("1", "2", "0", "2"), ("2", "2", "0", "6")]
    assert "finished: max_steps=10 reached at step 10" in output
    assert (spent := lumen.goodput("runs/run")).lives == 3
    assert spent.spent_s["queue"] > 0  # from each kill to the restart


@pytest.mark.slow
def test_repeated_error_ends_job_with_its_traceback_last():
    code, output = run("job.py", "error", "2", "9")
    assert code == 1
    assert len(re.findall(r"restart \d of 9: rank 1 failed: KeyError", output)) == 1
    assert "the task causes the error, not a machine: failed: KeyError" in output
    assert "twice, each time after step 3\n" in output
    assert re.search(
        r"KeyError: 'what the user did in process \d+'\nThis was in step .*\nThe tracebacks of all ranks are in .*\n"
        r"The newest checkpoint is runs/run/checkpoints/step-00000002. Resume with:\n  python job.py error 2 9 .*\n$",
        output,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "allowed", "code", "restarts", "said"),
    [
        ("in vain", 9, 128 + signal.SIGKILL, 3, "no further restart: 2 in a row did not get past step 3\n"),
        ("in vain", 1, 128 + signal.SIGKILL, 1, "no further restart: 1 were made, and max_restarts is 1\n"),
        ("config", 9, 1, 0, "ConfigError: it cannot work"),
        ("stopped", 9, 128 + signal.SIGTERM, 0, "stopped at step 4 by SIGTERM; newest checkpoint: step-00000004."),
        ("requeued", 9, 75, 0, "exit code 75: requeue the job. Resume"),
    ],
)
def test_job_is_not_restarted_in_vain_or_unasked(mode, allowed, code, restarts, said):
    found, output = run("job.py", mode, "1", str(allowed))
    assert (found, len(re.findall(r"restart \d of", output))) == (code, restarts), output
    assert said in output


@pytest.mark.slow
def test_torchrun_restart_count_overrides_max_restarts():
    """One line of output reports the restart count."""
    code, output = run("-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "2", "job.py", "fine",
                       "0", "7")  # fmt: skip
    assert code == 0, output
    assert (
        output.count("ignoring max_restarts=7: torchrun started this run, and restarts it by its own settings\n") == 1
    )


@pytest.mark.torture
@pytest.mark.time_limit(3600)
def test_killed_ranks_are_restarted_reliably():
    expected = train_uninterrupted(2)
    for _ in range(20):
        code, output = run("job.py", "killed", "2", "2")
        assert code == 0, output
        assert Path("runs/run/metrics.csv").read_bytes() == expected
        Path("runs").rename(f"runs-{len(os.listdir())}")
