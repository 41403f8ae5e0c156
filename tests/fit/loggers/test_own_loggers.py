"""Loggers written by users for Lightning, and the names of loggers."""

import os
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from lumen.loggers.base import NullWriter
from tests.helpers.services import of_csv
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, loader, quiet_trainer


class LogsRows(Regression):
    """Task that gives the CSV logger values of its own."""

    def __init__(self, metrics):
        super().__init__()
        self.metrics = metrics

    def on_train_end(self):
        self.trainer.loggers[0].log_metrics(self.metrics, torch.tensor(3))


def test_csv_logger_writes_numbers_in_tensors(tmp_path):
    values = {"a": torch.tensor(0.1, requires_grad=True), "b": np.float32(0.5), "c": torch.tensor([2]), "d": 1}
    trainer = quiet_trainer(tmp_path, max_steps=1, logger=[lumen.CSVLogger()])
    trainer.fit(LogsRows(values), loader())
    *_, last = read_rows(trainer.run_directory / "metrics.csv")
    expected = {"step": "3", "a": repr(torch.tensor(0.1).item()), "b": "0.5", "c": "2", "d": "1"}
    assert {name: text for name, text in last.items() if text} == expected


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"a": torch.ones(2)}, r"a has shape \(2,\); expected one number"),
        ({"epoch": 1}, "epoch is a column of its own"),
    ],
)
def test_csv_logger_refuses_what_is_no_number(tmp_path, metrics, message):
    with pytest.raises(ConfigError, match=message):
        quiet_trainer(tmp_path, max_steps=1, logger=[lumen.CSVLogger()]).fit(LogsRows(metrics), loader())


def test_writer_of_other_processes_accepts_every_use():
    writer = NullWriter()
    with writer.train() as inner:
        assert inner.config["lr"] is writer
    assert list(writer.history) == []


class Ported(lumen.Logger):
    """Logger for Lightning's `Logger`: name, version, log_metrics(metrics, step), log_hyperparams, finalize."""

    def __init__(self):
        super().__init__()
        self.rows, self.params, self.statuses, self.saved = [], [], [], []

    @property
    def name(self):
        return "ported"

    @property
    def version(self):
        return "3"

    @property
    def experiment(self):
        return self.rows

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.params.append(params)

    def after_save_checkpoint(self, checkpoint_callback):
        self.saved.append((checkpoint_callback.last_model_path, checkpoint_callback.best_model_path))

    def finalize(self, status):
        self.statuses.append(status)


class Least(lumen.Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step, epoch):
        self.rows.append((step, epoch, *metrics))


def fit(tmp_path, task=None, **options):
    trainer = quiet_trainer(tmp_path, **{"max_epochs": 2, "log_every_n_steps": 1} | options)
    trainer.fit(task or Regression(), loader(), val_dataloaders=loader(20))
    return trainer


def test_a_logger_that_was_written_for_lightning_works(tmp_path):
    ported, least = Ported(), Least()
    assert (ported.log_dir, ported.save_dir, ported.root_dir, least.name) == (None, None, None, None)
    trainer = fit(tmp_path, logger=[ported, least])
    own = of_csv(trainer.run_directory)
    assert [(step, values["loss"]) for step, values in ported.rows if "loss" in values] == own["loss"]
    assert [(step, epoch) for step, epoch, name in least.rows if name == "val_loss"] == [(7, 0), (14, 1)]
    assert [params["model"]["lr"] for params in ported.params] == [0.01]
    assert ported.statuses == ["success"]
    assert (trainer.logger, trainer.loggers) == (ported, [ported, least])
    assert (ported.name, ported.version, ported.experiment) == ("ported", "3", ported.rows)
    for logger in trainer.loggers:
        assert logger.log_dir == logger.root_dir == str(trainer.run_directory)
        assert logger.save_dir == str(tmp_path / "runs")
    assert (least.name, least.version) == ("run", None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_logger_is_notified_of_each_committed_checkpoint(tmp_path, asynchronous):
    ported = Ported()
    saver = lumen.ModelCheckpoint(every_n_epochs=1, monitor="val_loss", keep_last=-1, asynchronous=asynchronous)
    fit(tmp_path, logger=ported, callbacks=[saver], max_epochs=3)
    place = tmp_path / "runs/run/checkpoints"
    assert [last for last, _ in ported.saved] == [str(place / f"step-{step:08d}") for step in (7, 14, 21)]
    assert ported.saved[-1][1] == saver.best_model_path


@pytest.mark.parametrize(
    ("how", "status"), [(None, "success"), ("error", "failed"), ("exit", "failed"), ("signal", "interrupted")]
)
def test_a_logger_is_told_how_the_run_ended(tmp_path, how, status):
    class Ending(lumen.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if trainer.global_step == 2 and how == "error":
                raise InterruptedError
            if trainer.global_step == 2 and how == "exit":
                raise SystemExit(3)
            if trainer.global_step == 2 and how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)

    ported = Ported()
    with nullcontext() if how is None else pytest.raises((InterruptedError, SystemExit)):
        fit(tmp_path, logger=ported, callbacks=[Ending()])
    assert ported.statuses == [status]


def test_failing_logger_open_leaves_no_directory(tmp_path):
    class Refusing(Ported):
        def open(self, directory, *, resumed):
            raise ConfigError(f"no record in {directory.name}, resumed={resumed}")

    with pytest.raises(ConfigError, match="no record in run, resumed=False"):
        fit(tmp_path, logger=Refusing())
    assert not (tmp_path / "runs/run").exists()


# ---------------------------------------------------------------------- choice of loggers


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("csv", ["CSVLogger"]),
        ("tensorboard", ["TensorBoardLogger"]),
        (["csv", "wandb", Ported()], ["CSVLogger", "WandbLogger", "Ported"]),
        (["mlflow", "tensorboard"], ["MLFlowLogger", "TensorBoardLogger"]),
    ],
)
def test_loggers_may_be_names_or_objects(given, kinds):
    assert [type(each).__name__ for each in lumen.Trainer(logger=given).loggers] == kinds


@pytest.mark.parametrize("logger", ["csv", "tensorboard", Ported(), [Ported(), "tensorboard"], True])
def test_run_directory_always_has_csv_files(tmp_path, logger):
    directory = fit(tmp_path, logger=logger).run_directory
    record = of_csv(directory)
    assert [step for step, _ in record["loss"]] == list(range(1, 15))
    assert {"val_loss", "system/time_s", "system/memory_mb"} <= record.keys()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lumen.Trainer(logger="wanb"), "found 'wanb'. Did you mean wandb?"),
        (lambda: lumen.Trainer(logger=["csv", "tensorbord"]), "found ['csv', 'tensorbord']. Did you mean tensorboard?"),
        (lambda: lumen.Trainer(logger=lumen.CSVLogger), "found the class CSVLogger. Create an object: CSVLogger(...)."),
        (lambda: lumen.CSVLogger("logs", "x", 3, "p"), "CSVLogger: too many positional arguments"),
        (lambda: lumen.CSVLogger(prefix="p"), "CSVLogger has no argument prefix. Leave it out: Lumen does not change"),
        (lambda: lumen.CSVLogger(save_dir=3), "CSVLogger: save_dir: expected a string, a path or None, found 3"),
        (
            lambda: lumen.TensorBoardLogger(sub_dir="s"),
            "Leave it out: the files are in `tensorboard` in the run directory",
        ),
    ],
)
def test_invalid_logger_is_one_error_with_a_fix(make, said):
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


def test_logger_with_wrong_method_signature_is_named():
    class Other(lumen.Logger):
        def log_metrics(self, metrics):
            pass

    with pytest.raises(ConfigError, match=r"Other\.log_metrics has the signature \(metrics\)\. Write"):
        lumen.Trainer(logger=Other())


def test_lightning_loggers_in_config_are_corrected_together(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text(
        """
model: {class_path: tests.helpers.cli_tasks.Line}
data: {class_path: tests.helpers.cli_tasks.Points}
trainer:
  max_epochs: 1
  logger:
    - class_path: lightning.pytorch.loggers.CSVLogger
      init_args: {save_dir: logs, name: x, version: null, prefix: p, flush_logs_every_n_steps: 5}
    - class_path: lightning.pytorch.loggers.WandbLogger
      init_args: {project: p, log_model: all}
    - class_path: lightning.pytorch.loggers.CometLogger
"""
    )
    assert main(["fit", "--config", "old.yaml"]) == 2
    said = capsys.readouterr().err
    for part in (
        "CSVLogger is a class of Lightning. Write lumen.CSVLogger.",
        "CSVLogger has no option prefix. Leave it out: Lumen does not change logged names.",
        "WandbLogger is a class of Lightning. Write lumen.WandbLogger.",
        "WandbLogger has no option log_model. Leave it out: checkpoints are in the run directory",
        "CometLogger is a class of Lightning. Subclass lumen.Logger: docs/guides/loggers.md shows how.",
    ):
        assert part in said
