"""Settings of scripts: a run records the settings of a script like the settings of a config."""

from datetime import timedelta
from pathlib import Path

import torch
import yaml

import lumen
from lumen.cli import main
from tests.helpers.cli import write_config
from tests.helpers.cli_tasks import Line, Points
from tests.helpers.tasks import Regression, bare_trainer, loader
from tests.helpers.working_directory import CONFIG


def read_recorded_config(directory):
    return yaml.safe_load((Path(directory) / "script.yaml").read_text())


def test_trainer_arguments_hyperparameters_and_classes_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = lumen.Trainer(
        max_steps=2, max_time=timedelta(minutes=5), gradient_clip_val=0.5, callbacks=[lumen.EMA()], name="mine",
        enable_progress_bar=False, seed=3, strategy=lumen.SingleDevice(),
    )  # fmt: skip
    trainer.fit(Regression(lr=0.25), loader())
    found = read_recorded_config("runs/mine")
    assert found["seed_everything"] == 3
    assert found["model"] == {
        "class_path": "tests.helpers.tasks.Regression",
        "init_args": {"lr": 0.25, "dropout": 0.0, "dtype": "torch.float32", "optimizer": "AdamW"},
    }
    assert "data" not in found
    settings = found["trainer"]
    assert (settings["max_steps"], settings["max_time"], settings["gradient_clip_val"]) == (2, "0:05:00", 0.5)
    assert [each["class_path"].rpartition(".")[2] for each in settings["callbacks"]] == ["EMA"]
    assert settings["strategy"]["class_path"].endswith(".SingleDevice")
    assert (settings["precision"], settings["name"]) == ("fp32", "mine")  # including defaults
    assert not (tmp_path / "runs/mine/config.yaml").exists()


def test_a_data_module_is_recorded_with_its_hyperparameters(tmp_path):
    class Saved(Points):
        def __init__(self, samples=12, device=torch.device("cpu")):  # noqa: B008
            super().__init__(samples=samples)
            self.save_hyperparameters()

    trainer = bare_trainer(tmp_path, max_steps=1, logger=True)
    trainer.fit(Line(width=3), datamodule=Saved(24))
    data = read_recorded_config(tmp_path / "runs/run")["data"]
    assert data["class_path"].endswith("Saved")
    assert data["init_args"]["samples"] == 24
    assert data["init_args"]["device"] == "cpu"


def test_environment_setting_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("LUMEN_TRAINER__MAX_STEPS", "2")
    bare_trainer(tmp_path, logger=True).fit(Regression(), loader())
    assert read_recorded_config(tmp_path / "runs/run")["trainer"]["max_steps"] == 2


def test_hyperparameters_hidden_from_loggers_are_not_recorded(tmp_path):
    class Secret(Regression):
        def __init__(self, token="secret"):
            super().__init__()
            self.save_hyperparameters("token", logger=False)

    bare_trainer(tmp_path, max_steps=1, logger=True).fit(Secret(), loader())
    assert "secret" not in (tmp_path / "runs/run/script.yaml").read_text()


def test_command_line_run_has_only_config_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", write_config("line.yaml", CONFIG), "--trainer.max_epochs=1"]) == 0
    assert Path("runs/line/config.yaml").exists()
    assert not Path("runs/line/script.yaml").exists()


def test_resumed_settings_are_recorded(tmp_path):
    for steps in (1, 2):
        trainer = bare_trainer(tmp_path, max_steps=steps, logger=True, enable_checkpointing=True, resume="auto")
        trainer.fit(Regression(), loader())
        assert read_recorded_config(tmp_path / "runs/run")["trainer"]["max_steps"] == steps
    assert "resume" not in read_recorded_config(tmp_path / "runs/run")["trainer"]
