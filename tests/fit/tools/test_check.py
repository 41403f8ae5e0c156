"""`lumen check`: names an existing mistake, and reports none in a correct training."""

import json
import re

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli import write_config
from tests.helpers.faulty_trainings import check, make_config
from tests.helpers.tables import read_rows


@pytest.fixture
def check_settings(tmp_path, monkeypatch, capsys):
    """Check settings in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words, **settings):
        return check(write_config("mine.yaml", make_config(**settings)), capsys, *words)

    return run


CLEAN = {
    "a classifier": {},
    "every sample is read": {"of_data": {"mistake": "copies"}},
    "accumulating": {"accumulate_grad_batches": 3},
    "a global batch": {"global_batch_size": 32},
    "a warm-up": {"task": "Scheduled", "model": {"kind": "sound"}},
    "a warm-up from 0": {"task": "Scheduled", "model": {"kind": "warmup"}},
    "a cosine": {"task": "Scheduled", "model": {"length": 20}},
    "by hand": {"task": "Two", "data": "NoValidation"},
    "a stream": {"data": "Stream"},
    "a stream with max_steps": {"data": "Stream", "max_epochs": None, "max_steps": 30},
    "several loaders": {"task": "Both", "data": "Several"},
    "no validation wanted": {"data": "NoValidation", "limit_val_batches": 0},
    "bf16": {"precision": "bf16"},
    "a large batch": {"of_data": {"batch_size": 80}},
    "by time": {"max_epochs": None, "max_time": "00:00:10:00"},
    "without checkpoints": {"enable_checkpointing": False},
    "a monitor": {"callbacks": [{"class_path": "lumen.EarlyStopping", "init_args": {"monitor": "val_loss"}}]},
}


@pytest.mark.parametrize("settings", CLEAN.values(), ids=CLEAN)
def test_what_is_clean_is_not_suspected(check_settings, settings):
    found = check_settings("--strict", **settings)
    assert (found.suspicious, found.code) == (set(), 0), found.out


PLANTED = {
    "labels.constant": {"of_data": {"mistake": "one label"}},
    "inputs.scale": {"of_data": {"mistake": "scale"}},
    "inputs.constant": {"of_data": {"mistake": "constant inputs"}},
    "training.order": {"of_data": {"shuffle": False}},
    "global_batch_size.divides": {"global_batch_size": 20},
    "loss.by_chance": {"model": {"scale": 100.0}},
    "loss.input": {"model": {"mistake": "ignores"}},
    "gradients.zero": {"model": {"mistake": "dead"}},
    "gradients.none": {"model": {"mistake": "unused"}},
    "gradients.explode": {"model": {"scale": 1e4}},
    "parameters.unheld": {"model": {"mistake": "unheld"}},
    "validation.loader": {"data": "NoValidation"},
    "validation.step": {"task": "Unvalidated"},
    "validation.never": {"check_val_every_n_epoch": 3},
    "monitor": {"callbacks": [{"class_path": "lumen.EarlyStopping", "init_args": {"monitor": "val_los"}}]},
    "rates.first": {"task": "Scheduled", "model": {"kind": "warmup", "interval": "epoch"}},
    "rates.idle": {"task": "Scheduled", "model": {"kind": "idle"}},
    "schedule.length": {"task": "Scheduled", "model": {"length": 30}},
    "warning": {"task": "Scheduled", "model": {"length": 90}},
    "loader.slow": {"of_data": {"mistake": "slow", "samples": 48}},
}


@pytest.mark.parametrize(("name", "settings"), PLANTED.items(), ids=PLANTED)
def test_a_mistake_is_named_with_what_to_do(check_settings, name, settings):
    found = check_settings("--strict", **settings)
    assert name in found.suspicious, found.out
    assert found.code == 1
    assert all(each["advice"] for each in found.findings if each["name"] == name != "warning")


@pytest.mark.parametrize(
    ("kind", "interval", "advice"),
    [
        ("own", "step", "start=0.01, or the key warmup_start."),
        ("warmup", "step", "(step + 1) / n in place of step / n."),
        ("warmup", "epoch", '(step + 1) / n in place of step / n. Or set its interval to "step".'),
    ],
)
def test_advice_on_warmup_fits_the_schedule(check_settings, kind, interval, advice):
    found = check_settings(task="Scheduled", model={"kind": kind, "interval": interval})
    assert found.text("rates.first").endswith(f"Begin the warm-up above 0: {advice}")


@pytest.mark.parametrize(("mistake", "told"), [("leaks numbers", "5 of 85"), ("leaks contents", "20 of 100")])
def test_training_samples_in_validation_are_counted(check_settings, mistake, told):
    found = check_settings(of_data={"mistake": mistake})
    assert found.suspicious == {"leak"}
    assert told in found.text("leak")
    assert found.code == 0  # without --strict


def test_large_dataset_is_compared_by_few_samples(check_settings):
    found = check_settings("--samples", "30", "--trainer.limit_val_batches=2", of_data={"mistake": "long"})
    assert "30 validation samples compared with 30 of 80 training samples" in found.text("leak")


def test_how_many_samples_were_compared_is_said(check_settings):
    found = check_settings("--samples", "30", of_data={"mistake": "copies"})
    assert "30 validation samples compared with 30 of 80 training samples" in found.text("leak")
    assert not check_settings("--samples=0", of_data={"mistake": "copies"}).text("leak")


def test_out_of_range_labels_are_named(check_settings):
    found = check_settings(of_data={"mistake": "labels from 1"})
    assert found.code == 2
    assert re.search(r"labels range from \d to 5, but the output has 5 classes: 0 to 4", found.text("labels.range"))
    assert ", in validation_step\n" in found.err


def test_failing_step_shows_traceback_and_earlier_findings(check_settings):
    found = check_settings(model={"mistake": "fails"})
    assert found.code == 2
    assert found.named("wrong") == {"failed"}
    assert "training.batch" in found.named("ok")
    assert 'raise RuntimeError("this model cannot count")' in found.err


def test_a_loss_that_is_not_finite_is_wrong(check_settings):
    found = check_settings(model={"mistake": "nan"})
    assert (found.code, found.named("wrong")) == (2, {"loss.finite"})
    assert "training.nan" in check_settings(of_data={"mistake": "nan"}).suspicious


def test_a_wrong_configuration_is_the_error_of_fit(check_settings, capsys):
    told = []
    for command in ("check", "fit"):
        write_config("mine.yaml", make_config(max_epoch=3))
        assert main([command, "--config", "mine.yaml"]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert "max_epochs" in told[0]


def test_a_place_that_cannot_be_written_is_wrong(check_settings, tmp_path):
    (tmp_path / "file").touch()
    found = check_settings(default_root_dir=str(tmp_path / "file" / "runs"))
    assert (found.code, found.named("wrong")) == (2, {"checkpoints.writable"})


def test_a_disk_that_is_too_small_is_suspicious(check_settings):
    keep = {"class_path": "lumen.ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "keep_last": -1}}
    found = check_settings(callbacks=[keep], max_epochs=None, max_steps=8 * 10**11)
    assert found.suspicious == {"checkpoints.room"}


def test_nothing_is_left_behind(check_settings, tmp_path):
    callbacks = [{"class_path": "lumen.LearningRateMonitor"}, {"class_path": "lumen.OnExceptionCheckpoint"}]
    check_settings(callbacks=callbacks, logger=[{"class_path": "lumen.CSVLogger"}], profiler="simple")
    check_settings(model={"mistake": "fails"}, callbacks=callbacks)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.yaml"]


def test_what_is_foretold_comes_true(check_settings, tmp_path):
    settings = {
        "task": "Scheduled",
        "model": {"length": 60},
        "callbacks": [{"class_path": "lumen.LearningRateMonitor"}],
    }
    settings |= {"log_every_n_steps": 1, "global_batch_size": 20, "val_check_interval": 3, "enable_progress_bar": False}
    facts = check_settings(**settings).facts
    assert main(["fit", "--config", "mine.yaml"]) == 0
    rows = read_rows(tmp_path / "runs/mine/metrics.csv")
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    validated = [row for row in rows if row["val_loss"]]
    assert facts["steps"] == max(int(row["step"]) for row in rows)
    assert facts["validations"] == len(validated)
    (drawn,) = facts["rates"].values()
    assert (drawn["first"], drawn["last"]) == pytest.approx((rates[0], rates[-1]))
    newest = sorted((tmp_path / "runs/mine/checkpoints").iterdir())[-1]
    tensors = sum(path.stat().st_size for path in newest.rglob("*.safetensors"))
    assert facts["checkpoint_bytes"] == pytest.approx(tensors, abs=2000)


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 0.3, "max_epochs": 3},
        {"check_val_every_n_epoch": 2, "max_epochs": 5, "max_steps": 43},
        {"val_check_interval": 3, "check_val_every_n_epoch": 2, "max_epochs": 5},
        {"val_check_interval": 0.25, "global_batch_size": 24, "max_epochs": None, "max_steps": 6},
    ],
    ids=["fractions", "epochs", "steps of epochs", "cut short"],
)
def test_validations_and_checkpoints_are_as_many_as_foretold(check_settings, tmp_path, settings):
    keep = {"class_path": "lumen.ModelCheckpoint", "init_args": {"every_n_epochs": 1, "keep_last": -1}}
    facts = check_settings(**settings, callbacks=[keep], enable_progress_bar=False).facts
    assert main(["fit", "--config", "mine.yaml"]) == 0
    assert facts["validations"] == sum(bool(row["val_loss"]) for row in read_rows(tmp_path / "runs/mine/metrics.csv"))
    assert facts["checkpoints"][0]["saves"] == len(list((tmp_path / "runs/mine/checkpoints").iterdir()))


def test_resumable_run_is_checked_without_touching_it(check_settings, tmp_path, capsys):
    write_config("mine.yaml", make_config(enable_progress_bar=False))
    assert main(["fit", "--config", "mine.yaml"]) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    words = ["--trainer.resume", "auto", "--trainer.max_epochs", "3"]
    found = check("mine.yaml", capsys, *words)
    assert "30 steps: 3 epochs of 10 steps, 20 of them done" in found.text("length")
    assert "nothing to do" in check("mine.yaml", capsys, *words[:2]).text("finished")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_steps_account_for_several_processes(check_settings):
    facts = check_settings(devices=2, strategy="ddp").facts
    assert (facts["steps"], facts["processes"]) == (10, 2)
    assert check_settings(devices=2, global_batch_size=8).suspicious == {"global_batch_size.processes"}


def test_accumulation_schedule_is_checked_on_several_processes(check_settings):
    schedule = {"class_path": "GradientAccumulationScheduler", "init_args": {"scheduling": {0: 2}}}
    facts = check_settings(devices=2, strategy="ddp", callbacks=[schedule]).facts
    assert facts["steps"] == check_settings(devices=2, strategy="ddp", accumulate_grad_batches=2).facts["steps"] == 6


def test_output_fits_80_columns_without_user_output(check_settings, tmp_path, capsys):
    write_config("mine.yaml", make_config(model={"mistake": "prints"}, global_batch_size=20))
    assert main(["check", "--config", "mine.yaml"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("lumen check: mine\n")
    assert "\n! global_batch_size 20 is not a multiple" in out
    assert out.endswith("1 suspicious\n")
    assert "a word of the user's" in err
    assert "a word of the user's" not in out


def test_json_has_no_numbers_that_json_lacks(check_settings):
    def refuse(text):
        raise AssertionError(text)

    json.loads(check_settings(model={"mistake": "nan"}).out, parse_constant=refuse)


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes"])
def test_examples_are_clean(name, tmp_path, capsys):
    assert check(ROOT / "models" / f"{name}.yaml", capsys, f"--trainer.default_root_dir={tmp_path}").suspicious == set()


def test_what_it_takes_is_said(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--help"])
    assert "lumen check --config FILE" in capsys.readouterr().out
    assert main(["check", "--samples", "few"]) == 2
    assert "error: --samples: expected a whole number, found 'few'. Usage: lumen check " in capsys.readouterr().err
