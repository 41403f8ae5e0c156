"""`lumen replay` and `lumen diff` of a run on several processes."""

import json
import subprocess
import sys

import pytest
import yaml

from lumen.cli import main

CONFIG = {
    "seed_everything": 1,
    "model": {"class_path": "tests.helpers.tasks.Regression", "init_args": {"dropout": 0.2}},
    "data": {"class_path": "tests.helpers.recorded_trainings.Points"},
    "trainer": {
        "max_steps": 3, "log_every_n_steps": 1, "val_check_interval": 3, "num_sanity_val_steps": 0, "devices": 2,
        "accelerator": "cpu", "accumulate_grad_batches": 2, "enable_progress_bar": False,
    },
}  # fmt: skip


SCHEDULE = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 2}}}


@pytest.mark.parametrize(
    "accumulation",
    [{}, pytest.param({"accumulate_grad_batches": 1, "callbacks": [SCHEDULE]}, marks=pytest.mark.slow)],
    ids=["setting", "callback"],
)
@pytest.mark.usefixtures("program_directory")
def test_one_process_replays_micro_batches_of_two(tmp_path, capsys, accumulation):
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": CONFIG["trainer"] | accumulation}))
    subprocess.run([sys.executable, "-m", "lumen", "fit", "--config", "line.yaml"], check=True, capture_output=True)
    main(["replay", "runs/line", "--step=2"])
    out = capsys.readouterr().out
    assert "the run used 2 processes, but this training uses one" in out
    assert out.count("share of the loss") == 3  # of the 7 in the epoch
    assert "more than rounding" not in out
    assert "the step is bitwise identical to the record: loss" in out or ": rounding)" in out


@pytest.mark.slow
@pytest.mark.usefixtures("program_directory")
def test_checkpoints_of_other_processes_are_compared_by_tensors(tmp_path, capsys):
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"accumulate_grad_batches": 1}}
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(config))
    subprocess.run([sys.executable, "-m", "lumen", "fit", "--config", "line.yaml"], check=True, capture_output=True)
    changes = "--trainer.devices=1", "--trainer.accumulate_grad_batches=2", "--trainer.name=one"
    assert main(["fit", "--config", "line.yaml", *changes]) == 0
    capsys.readouterr()
    assert main(["diff", "runs/one", "runs/line", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["checkpoint"], found["metrics"], found["trained"]) == (None, None, None)
    assert {*found["configuration"]} == {"trainer.devices", "trainer.accumulate_grad_batches"}
