"""Training, evaluation, resuming, sweeps and two processes."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from src.eval import evaluate
from src.train import train

HOME = Path(__file__).parents[1]


@pytest.fixture
def composed(tmp_path):
    """Return a function that composes a config, as a run in a temporary folder."""

    def make(name="train.yaml", *overrides):
        with initialize(version_base="1.3", config_path="../configs"):
            cfg = compose(name, return_hydra_config=True, overrides=[*overrides])
        with open_dict(cfg):
            cfg.paths.root_dir = cfg.paths.output_dir = cfg.paths.log_dir = str(tmp_path)
        HydraConfig().set_config(cfg)
        return cfg

    yield make
    GlobalHydra.instance().clear()


def start(folder, *words):
    """Run the training as a program; its logs are in the folder."""
    command = [sys.executable, str(HOME / "src/train.py"), *words, f"paths.log_dir={folder}"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def values_of(directory, name):
    """Return the written values of a metric."""
    (path,) = directory.rglob("metrics.csv")
    return [float(row[name]) for row in csv.DictReader(path.open()) if row.get(name)]


def test_train_learns_and_saves_the_best(composed):
    metrics, objects = train(composed())
    trainer = objects["trainer"]
    assert metrics["val/acc"] > 0.85
    assert metrics["test/acc"] > 0.85
    assert {"train/loss", "val/loss", "test/loss", "val/acc_best"} <= {*metrics}
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.exists()
    assert best.parent == Path(objects["cfg"].paths.output_dir, "checkpoints")
    assert trainer.checkpoint_callback.best_model_score == metrics["val/acc_best"]
    assert len(trainer.loggers) == 1


def test_eval_gives_the_metrics_of_the_training(composed):
    metrics, objects = train(composed())
    cfg = composed("eval.yaml", f"ckpt_path={objects['trainer'].checkpoint_callback.best_model_path}")
    again, _ = evaluate(cfg)
    assert again["test/acc"] == metrics["test/acc"]


def test_training_resumes_from_the_last_checkpoint(composed):
    first, objects = train(composed("train.yaml", "trainer.max_epochs=2"))
    assert objects["trainer"].current_epoch == 2
    path = objects["trainer"].checkpoint_callback.last_model_path
    resumed, objects = train(composed("train.yaml", "trainer.max_epochs=3", f"ckpt_path={path}"))
    assert objects["trainer"].current_epoch == 3
    assert objects["trainer"].global_step == 3 * 21
    assert resumed["train/loss"] < first["train/loss"]


@pytest.mark.parametrize("choice", ["csv", "tensorboard", "many_loggers"])
def test_loggers_are_built_from_the_config(composed, choice):
    metrics, objects = train(composed("train.yaml", f"logger={choice}", "trainer.max_epochs=1"))
    assert len(objects["trainer"].loggers) == 1 + (choice == "many_loggers")
    assert metrics["val/acc"] > 0


def test_experiment_accumulates_and_debug_run_writes_nothing(composed, tmp_path):
    _, objects = train(composed("train.yaml", "experiment=wide", "trainer.max_epochs=2"))
    assert objects["trainer"].global_step == 2 * 11
    _, objects = train(composed("train.yaml", "debug=fdr"))
    assert objects["trainer"].global_step == 1


def test_a_sweep_has_a_folder_for_each_job(tmp_path):
    start(tmp_path, "-m", "model.optimizer.lr=0.01,0.001", "trainer.max_epochs=1", "hydra.job.chdir=true")
    (sweep,) = (tmp_path / "train/multiruns").iterdir()
    losses = [values_of(sweep / job, "val/loss") for job in "01"]
    assert losses[0] != losses[1]
    assert [len(each) for each in losses] == [1, 1]


def test_two_processes_train_in_one_folder(tmp_path):
    start(tmp_path, "trainer=ddp_sim", "trainer.max_epochs=1", "logger=[]", "~callbacks.learning_rate_monitor")
    (run,) = (tmp_path / "train/runs").iterdir()
    assert {each.name for each in run.iterdir()} >= {".hydra", "checkpoints", "train.log"}
