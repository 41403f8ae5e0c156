"""Aim: one run in Aim for all parts of a Lumen run."""

import json
import os
import signal

import numpy as np
import pytest

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.loggers import fit
from tests.helpers.services import CallAtSteps, Everything, list_aim_runs, of_csv, read_aim

pytest.importorskip("aim", reason="no Aim for this version of Python")
EVERY_STEP = {"max_epochs": None, "val_check_interval": 4}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:aim")


@pytest.mark.slow
def test_aim_records_metrics_hyperparameters_and_media(tmp_path):
    class Nested(Everything):
        def __init__(self, nested):
            super().__init__(lr=0.125, dropout=0.2)
            self.save_hyperparameters()

    logger = lumen.AimLogger(experiment="lines", tags=["first"], prefix="a")
    trainer = fit(tmp_path, Nested({"depth": {"first": None}, "sizes": [1, 2]}), max_steps=6, logger=logger)
    (run,) = list_aim_runs(tmp_path / "runs")
    assert (logger.version, logger.name) == (run.hash, run.experiment) == (run.hash, "lines")
    assert json.loads((trainer.run_directory / "aim.json").read_text()) == {"id": run.hash}
    assert (run.name, run.tags, run["status"]) == ("run", ["first"], "success")
    own = of_csv(logger.log_dir)
    assert read_aim(run) == {f"a-{name}": rows for name, rows in own.items()}
    assert [step for step, _ in own["loss"]] == [1, 2, 3, 4, 5, 6]
    params = run["model"]
    assert (params["lr"], params["nested"]) == (0.125, {"depth": {"first": None}, "sizes": [1, 2]})
    from aim.storage.context import Context

    nowhere = Context({})
    image = run.get_image_sequence("weights", nowhere)
    histogram, text = run.get_distribution_sequence("layer", nowhere), run.get_text_sequence("note", nowhere)
    steps, (images, *_) = image.data.items_list()
    assert steps == [0, 2, 4]
    assert set(np.unique(np.asarray(images[1].to_pil_image()))) == {0, 7}
    assert histogram.data.items_list()[0] == [0, 2, 4]
    steps, (texts, *_) = text.data.items_list()
    assert [each.data for each in texts] == [f"step *{step}*" for step in (0, 2, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_aim_records_status_and_resumes_without_duplicate_steps(tmp_path, status):
    def end(trainer):
        if status == "failed":
            raise InterruptedError
        os.kill(os.getpid(), signal.SIGTERM)

    saver = lumen.ModelCheckpoint(every_n_train_steps=4, at_end=False)
    options = {"max_steps": 9, "logger": "aim", "resume": "auto"} | EVERY_STEP
    with pytest.raises((InterruptedError, SystemExit)):
        fit(tmp_path, callbacks=[CallAtSteps(step_6=end), saver], **options)
    (run,) = list_aim_runs(tmp_path / "runs")
    assert run["status"] == status
    assert len(read_aim(run)["loss"]) > 4
    trainer = fit(tmp_path, callbacks=[saver], **options)
    (run,) = list_aim_runs(tmp_path / "runs")
    record, own = read_aim(run), of_csv(trainer.run_directory)
    assert run["status"] == "success"
    assert {name: record[name] for name in ("loss", "val_loss")} == {name: own[name] for name in ("loss", "val_loss")}
    assert [step for step, _ in record["system/time_s"]] == list(range(1, 10))


@pytest.mark.slow
def test_restarted_run_archives_the_previous_one(tmp_path):
    def end(trainer):
        raise InterruptedError

    options = {"max_steps": 6, "logger": "aim", "resume": "auto"} | EVERY_STEP
    with pytest.raises(InterruptedError):
        fit(
            tmp_path,
            callbacks=[CallAtSteps(step_3=end), lumen.ModelCheckpoint(every_n_train_steps=100, at_end=False)],
            **options,
        )
    fit(tmp_path, **options)
    runs = list_aim_runs(tmp_path / "runs")
    assert [(run["status"], run.archived) for run in runs] == [("interrupted", True), ("success", False)]


@pytest.mark.slow
def test_aim_resumes_from_command_line_and_by_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["fit", "--model", "tests.helpers.cli_tasks.Line", "--data", "tests.helpers.cli_tasks.Points"]
    command += ["--trainer.name", "line", "--trainer.logger", "aim", "--trainer.resume", "auto"]
    command += ["--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "1"]
    for steps in ("3", "6"):
        assert main([*command, "--trainer.max_steps", steps]) == 0
    (run,) = list_aim_runs("runs")
    own = of_csv(tmp_path / "runs/line")
    assert read_aim(run) == own
    fit(tmp_path, max_steps=2, logger=lumen.AimLogger(run_hash=run.hash, run_name="other"))
    assert [each.hash for each in list_aim_runs("runs")] == [run.hash]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"repo": 3}, "repo"),
        ({"capture_terminal_logs": True}, "run.log in the run directory"),
        ({"context_prefixes": {}}, "the name of a value is the logged name"),
    ],
)
def test_arguments_that_are_wrong_are_named(arguments, said):
    with pytest.raises(ConfigError, match=said):
        lumen.AimLogger(**arguments)
