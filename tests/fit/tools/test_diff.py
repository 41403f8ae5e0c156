"""`lumen diff` and `lumen replay`: the first difference of two runs, and one step of a run computed again."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from lumen.cli import main
from tests.helpers.tasks import Regression, loader, quiet_trainer

SAVING = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 2, "keep_last": 9}}
CONFIG = {
    "seed_everything": 1,
    "model": {"class_path": "tests.helpers.recorded_trainings.Deep"},
    "data": {"class_path": "tests.helpers.recorded_trainings.Points"},
    "trainer": {
        "max_steps": 8,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
        "callbacks": [SAVING],
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    },
}
pytestmark = pytest.mark.usefixtures("config_directory")


def fit(*words):
    """Train `line.yaml`; return the run's directory."""
    before = {*Path("runs").glob("*")} if Path("runs").exists() else set()
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    (run,) = {*Path("runs").glob("*")} - before
    return str(run)


@pytest.fixture
def run_command(capsys):
    """Return the stdout of a command and its exit code."""

    def run(*words):
        capsys.readouterr()
        code = main([*words])
        return code, capsys.readouterr().out

    return run


@pytest.fixture
def run_diff(run_command):
    """Return the JSON of `lumen diff` and its exit code."""

    def run(*words):
        code, out = run_command("diff", *words, "--json")
        return code, json.loads(out)

    return run


def read_contents(folder):
    return {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in Path(folder).rglob("*")}


def change_record(run, step, name, factor):
    """Change a value in the record of a run."""
    table = Path(run, "metrics.csv")
    head, *rows = (row.split(",") for row in table.read_text().splitlines())
    at = head.index(name)
    (row,) = [each for each in rows if each[0] == str(step) and each[at]]
    row[at] = repr(float(row[at]) * factor)
    table.write_text("\n".join(map(",".join, [head, *rows])) + "\n")


# ---------------------------------------------------------------------- diff


def test_equal_runs_are_equal_without_retraining(run_command, run_diff):
    a, b = fit(), fit()
    code, record = run_diff(a, b)
    assert (code, record["equal"], record["trained"], record["configuration"]) == (0, True, None, {})
    code, out = run_command("diff", a, b)
    assert code == 0
    assert out.endswith("A and B are equal.\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kind", "step", "place", "begin"),
    [
        (["--model=tests.helpers.recorded_trainings.OtherLayer"], "initial parameter", 1, "net.4.bias", 1),
        (["--model=tests.helpers.recorded_trainings.OtherDropout"], "random", 2, "training_step", 1),
        (["--model=tests.helpers.recorded_trainings.OtherRate"], "setting", 3, "groups[0].lr", 3),
        (["--data.changed=30"], "batch", None, "", None),
    ],
)
def test_first_difference_is_found_from_newest_equal_checkpoint(run_diff, words, kind, step, place, begin):
    a, b = fit(), fit(*words)
    untouched = read_contents("runs")
    code, record = run_diff(a, b)
    difference = record["difference"]
    assert code == 1
    assert (difference["key"]["kind"], difference["key"]["place"]) == (kind, place)
    assert step in (None, difference["step"])
    assert begin in (None, record["trained"][0])
    assert record["metrics"][0]["step"] >= difference["step"] >= record["trained"][0]
    assert record["configuration"]
    assert read_contents("runs") == untouched


@pytest.mark.slow
def test_nondeterminism_is_distinguished_from_settings(run_command, run_diff):
    a, b = (fit("--model=tests.helpers.recorded_trainings.WithUnkeyed") for _ in range(2))
    code, record = run_diff(a, b)
    assert (code, record["configuration"], record["difference"]["repeats"]) == (1, {}, False)
    assert record["unlike_record"].keys() == {"A", "B"}
    code, out = run_command("diff", a, b)
    assert "first differs step 1: the output of net.2, from the same input\n" in out
    assert "first operator with a different result: aten.add.Tensor" in out
    assert "no seed or setting determines it" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, "no setting explains the different records: the cause is the code, the data or the machine\n"),
        ({"processes": 2, "strategy": "DDP"}, "the different records come from the environment: strategy, processes\n"),
    ],
    ids=["same environment", "processes"],
)
def test_differing_records_of_equal_trainings_are_explained(run_command, change, cause):
    a, b = (fit("--trainer.global_batch_size=8") for _ in range(2))
    shutil.rmtree(f"{b}/checkpoints")
    change_record(b, 1, "loss", 2.0)
    environment = Path(b, "environment.json")
    environment.write_text(json.dumps(json.loads(environment.read_text()) | change))
    code, out = run_command("diff", a, b)
    assert code == 1
    assert "both are bitwise identical" in out
    assert cause in out
    assert "B does not reproduce its record from step 1 on" in out
    assert "A does not" not in out


@pytest.mark.slow
def test_two_configs_are_compared_without_a_run(run_diff):
    Path("b.yaml").write_text(
        yaml.safe_dump(CONFIG | {"model": {"class_path": "tests.helpers.recorded_trainings.OtherRate"}})
    )
    code, record = run_diff("line.yaml", "b.yaml", "--steps=4")
    assert (code, record["trained"], record["difference"]["step"]) == (1, [1, 4], 3)
    assert record["configuration"] == {
        "model.class_path": ["tests.helpers.recorded_trainings.Deep", "tests.helpers.recorded_trainings.OtherRate"]
    }
    code, record = run_diff("line.yaml", "line.yaml", "--steps=2")
    assert (code, record["equal"], record["trained"]) == (0, True, [1, 2])
    assert not Path("runs").exists()


def test_values_filled_by_a_run_are_no_difference(run_diff):
    """The run takes an argument from its data, and draws a seed."""
    model = {"class_path": "tests.helpers.recorded_trainings.OfWidth"}
    Path("line.yaml").write_text(yaml.safe_dump(CONFIG | {"model": model, "seed_everything": None}))
    run = fit()
    config = yaml.safe_load(Path(run, "config.yaml").read_text())
    assert config["model"]["init_args"]["features"] == 6
    code, record = run_diff("line.yaml", run, "--steps=2")
    assert (code, record["configuration"], record["trained"]) == (0, {}, [1, 2])


def test_different_global_batch_is_the_first_difference(run_command):
    code, out = run_command("diff", fit(), fit("--trainer.accumulate_grad_batches=2"))
    assert code == 1
    assert "first differs step 1: the number of micro-batches\n    A  1\n    B  2\n" in out


def test_python_runs_are_compared_by_records(tmp_path, run_command, run_diff):
    for lr in (0.01, 0.02):
        quiet_trainer(tmp_path, max_steps=3, log_every_n_steps=1).fit(Regression(lr=lr), loader())
    code, out = run_command("diff", "runs/run", "runs/run-2")
    assert code == 1
    assert "configuration  not known" in out
    assert "runs/run has no config.yaml, since the run was started in Python, so nothing was trained again." in out
    code, record = run_diff(fit(), fit("--model.lr=0.02"), "--records")
    assert (code, record["trained"], record["metrics"][0]["step"]) == (1, None, 2)


def test_errors_exit_with_2_also_in_user_code(run_command, capsys):
    assert main(["diff", "line.yaml", "nowhere"]) == 2
    assert "there is no nowhere" in capsys.readouterr().err
    assert main(["diff", "line.yaml"]) == 2
    run = fit("--model=tests.helpers.recorded_trainings.Failing")
    capsys.readouterr()
    assert main(["replay", run, "--step=2"]) == 2
    assert "KeyError: 'nothing'" in capsys.readouterr().err
    assert main(["replay", run, "--step=0"]) == 2
    assert main(["replay", "line.yaml", "--step=1"]) == 2


# ---------------------------------------------------------------------- replay


@pytest.mark.parametrize(
    ("step", "origin"), [(1, "the beginning"), (4, "step-00000002"), (5, "step-00000004"), (8, "step-00000006")]
)
def test_replayed_step_equals_the_record(run_command, step, origin):
    run = fit("--trainer.gradient_clip_val=0.5")
    untouched = read_contents("runs")
    code, out = run_command("replay", run, f"--step={step}")
    assert code == 0, out
    assert f"{origin}\n" in out
    assert "the step is bitwise identical to the record: loss, grad_norm" in out
    assert ("val_loss" in out) == (step % 4 == 0)
    assert ("the checkpoint's parameters" in out) == (step % 2 == 0)
    assert "[0]  float32  8x6" in out or "[0]  float32  2x6" in out
    assert read_contents("runs") == untouched


@pytest.mark.parametrize(("factor", "judged"), [(1 + 1e-7, "rounding)"), (1.01, "more than rounding)")])
def test_differing_step_is_judged_by_its_size(run_command, factor, judged):
    run = fit()
    change_record(run, 3, "loss", factor)
    code, out = run_command("replay", run, "--step=3")
    assert code == 1
    assert judged in out
    assert "step 3, loss" in out


def test_unrecorded_step_and_later_step_are_reported(run_command, capsys):
    run = fit("--trainer.log_every_n_steps=4")
    code, out = run_command("replay", run, "--step=5")
    assert code == 0
    assert "the record has no values of this step; it has values of step 4 and of step 8" in out
    assert main(["replay", run, "--step=9"]) == 2
    assert "the training ends at step 8." in capsys.readouterr().err


def test_python_opens_in_the_step_with_its_gradients(run_command, monkeypatch):
    run = fit()
    typed = (
        "print('norm', float(task.net[0].weight.grad.norm()) > 0, trainer.global_step)\nprint('loss', loss.item())\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed + "print('shape', batch[0].shape)\n"))
    code, out = run_command("replay", run, "--step=3", "--python")
    assert code == 0
    assert "norm True 2" in out
    assert "shape torch.Size([8, 6])" in out
    logged = [row for row in Path(run, "metrics.csv").read_text().splitlines() if row.startswith("3,")]
    assert out.partition("loss ")[2].split()[0] in logged[0]


def test_checkpoints_elsewhere_are_begun_from_and_left_alone(run_command):
    saving = {"class_path": "ModelCheckpoint", "init_args": SAVING["init_args"] | {"dirpath": "kept"}}
    config = CONFIG | {"trainer": CONFIG["trainer"] | {"callbacks": {"saving": saving}}}
    Path("line.yaml").write_text(yaml.safe_dump(config))
    run = fit()
    untouched = read_contents("kept")
    code, out = run_command("replay", run, "--step=6")
    assert code == 0
    assert "from kept/step-00000004\n" in out
    assert "the checkpoint's parameters" in out
    assert read_contents("kept") == untouched
