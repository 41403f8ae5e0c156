"""Command line of the wine project: training, logs, checkpoints and predictions."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from main import cli_main

HOME = Path(__file__).parents[1]
BASE = ["--config", str(HOME / "configs/base.yaml"), "--trainer.enable_progress_bar=false"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fit(*more):
    return cli_main(["fit", *BASE, *more])


def rows_of(directory):
    """Return the rows of all written metrics, by name."""
    found = {}
    for path in directory.rglob("metrics.csv"):
        for row in csv.DictReader(path.open()):
            for name, value in row.items():
                if value:
                    found.setdefault(name, []).append(float(value))
    return found


def test_it_learns_which_wine_it_is_and_logs_it(here):
    cli = fit("--trainer.max_epochs=15", "--summary", "summary.json")
    summary = json.loads((here / "summary.json").read_text())
    assert summary["epochs"] == 15
    assert summary["val_accuracy"] > 0.9
    logged = rows_of(here)
    assert logged["train_loss_epoch"][-1] < 0.3 * logged["train_loss_epoch"][0]
    assert len(logged["val_loss"]) == 15
    assert {"confidence", "gradients/net.0.weight", "train_accuracy"} <= set(logged)
    assert list(here.rglob("events.out.tfevents*"))
    matrix = next(each for each in cli.trainer.callbacks if type(each).__name__ == "ConfusionMatrix")
    assert matrix.counts.sum() == 15 * len(cli.datamodule.sets["val"])
    assert cli.model.hparams.n_features == 13


def test_a_config_over_another_lowers_the_rate_and_averages(here):
    cli = fit("--config", str(HOME / "configs/plateau.yaml"), "--data.noise=0.5")
    assert cli.trainer.current_epoch == 6
    names = {type(each).__name__ for each in cli.trainer.callbacks}
    assert names & {"StochasticWeightAveraging", "SWA"}
    assert {"ConfusionMatrix", "ModelCheckpoint"} <= names
    assert len(cli.trainer.lr_scheduler_configs) == 1


def test_the_saved_config_repeats_the_run(here):
    first = fit("--trainer.max_epochs=2", "--trainer.default_root_dir=first", "--model.width=8")
    (saved,) = list(here.rglob("config.yaml"))
    assert yaml.safe_load(saved.read_text())["model"]["width"] == 8
    second = cli_main(["fit", "--config", str(saved), "--trainer.default_root_dir=second"])
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_best_checkpoint_is_tested_and_predicts(here):
    cli = fit("--trainer.max_epochs=8")
    best = cli.trainer.checkpoint_callback.best_model_path
    assert Path(best).exists()
    tested = cli_main(["test", *BASE, "--ckpt_path", best])
    assert tested.trainer.callback_metrics["test_accuracy"] > 0.8
    assert {"test_f1", "test_loss"} <= set(tested.trainer.callback_metrics)
    writer = "--trainer.callbacks+=wine.callbacks.JsonPredictions"
    cli_main(["predict", *BASE, "--ckpt_path", best, writer, "--trainer.callbacks.path=guesses.json"])
    guesses = json.loads((here / "guesses.json").read_text())
    assert len(guesses) == 36
    assert set(guesses) <= {0, 1, 2}


def test_a_word_that_is_no_option_ends_it_before_anything_is_built(here):
    done = subprocess.run(
        [sys.executable, str(HOME / "main.py"), "fit", *BASE, "--model.widht=3"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "widht" in done.stderr
    assert not list(here.rglob("metrics.csv"))
