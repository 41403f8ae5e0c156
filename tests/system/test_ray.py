"""Ray Train: a run with a killed worker resumes, reports to Ray, and computes the uninterrupted results."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lumen.checkpoint import Checkpoint
from tests.helpers import ROOT
from tests.helpers.engine_tasks import CONFIG, check_epochs, count_started_steps, read_record
from tests.helpers.jobs import find_free_port
from tests.helpers.slurm import wait_until

pytest.importorskip("ray.train", reason="needs lumen-train[ray], 240 MB: pip install 'ray[train]'")
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(400)]
FIT = ["fit", "--config", "run.yaml"]
OWN = """
import json, os, sys
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

HERE = sys.argv[1]

def train():
    import torch
    import lumen
    from tests.helpers.engine_tasks import Numbered, Recorded

    os.chdir(HERE)
    lumen.seed_everything(7)
    trainer = lumen.Trainer(
        name="run", max_epochs=3, global_batch_size=4, accelerator="cpu", seed=7, resume="auto",
        callbacks=[lumen.ModelCheckpoint(every_n_train_steps=2),
                   lumen.RayTrainReportCallback(every_n_train_steps=5, preemption_every_n_steps=3)],
    )
    task = Recorded()
    trainer.fit(task, Numbered(), configure_optimizers=lambda: torch.optim.AdamW(task.parameters(), lr=0.01))

result = TorchTrainer(
    train, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="own", storage_path=os.path.join(HERE, "ray"), failure_config=FailureConfig(max_failures=1)
    ),
).fit()
with open(os.path.join(HERE, "result.json"), "w") as file:
    json.dump({"metrics": result.metrics, "checkpoint": result.checkpoint.path}, file)
"""


def make_environment(pause_s):
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LUMEN_TEST_PAUSE_S": str(pause_s)}


def run(directory, command, *, kill):
    """Run a driver of Ray, and kill one worker in the middle of its training."""
    (directory / "run.yaml").write_text(CONFIG)
    with (directory / "out.txt").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, *command], cwd=directory, env=make_environment(0.1 if kill else 0), stdout=out, stderr=out
        )
    try:
        if kill:
            wait_until(lambda: count_started_steps(directory) > 20, "step 20")
            workers = re.findall(r"pid=(\d+)\) world_rank=1", (directory / "out.txt").read_text())
            os.kill(int(workers[-1]), signal.SIGKILL)
        assert driver.wait(240) == 0, (directory / "out.txt").read_text()[-5000:]
    finally:
        driver.terminate()
        driver.wait(60)
    found = read_record(directory)
    check_epochs(found)
    assert [path.name for path in (directory / "runs").iterdir()] == ["run"]
    return found


@pytest.fixture(scope="module")
def uninterrupted_losses(tmp_path_factory):
    """Return the losses of two processes without Ray, by the command and by a script."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "run.yaml").write_text(CONFIG)
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port",
        str(find_free_port()),
        "-m",
        "lumen",
    ]
    subprocess.run([sys.executable, *command, *FIT], cwd=directory, env=make_environment(0), check=True)
    return read_record(directory)


def test_submitted_ray_job_survives_killed_worker(uninterrupted_losses, tmp_path):
    command = ["-m", "lumen", "submit", "--on", "ray", "--gpus-per-node", "0", "--tasks-per-node", "2", "--", *FIT]
    assert run(tmp_path, command, kill=True) == uninterrupted_losses
    assert "resuming from" in (tmp_path / "runs/run/run.log").read_text()


def test_user_ray_trainer_survives_killed_worker_and_reports(uninterrupted_losses, tmp_path):
    """The user's trainer reports metrics and checkpoints to Ray."""
    (tmp_path / "own.py").write_text(OWN)
    assert run(tmp_path, ["own.py", str(tmp_path)], kill=True) == uninterrupted_losses
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["metrics"]["epoch"], result["metrics"]["step"]) == (3, 48)
    errors = [loss for (step, _), loss in uninterrupted_losses.items() if step >= 32]  # of the last epoch
    assert result["metrics"]["error"] == pytest.approx(sum(errors) / len(errors), rel=1e-12)
    assert result["checkpoint"].startswith(f"{tmp_path}/ray/own/")
    assert Checkpoint.open(Path(result["checkpoint"])).info["step"] == 48
