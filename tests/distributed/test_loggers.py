"""Loggers: TensorBoard's record besides the CSV files, over several runs, kills and resumes."""

import csv
import io

import pytest
import torch

import lumen
from lumen.errors import ConfigError
from lumen.run.records import RunRecords
from tests.helpers.group import catch_message
from tests.helpers.loggers import fit, read_table
from tests.helpers.services import of_csv, read_wandb
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer


class BreakingOff(lumen.Callback):
    """Callback that records whether the row of step 2 is written at the end of that step, and fails in step 6."""

    def on_step_checkpoint(self, trainer, task):
        if trainer.global_step == 2 and trainer.is_global_zero:
            self.written = (trainer.run_directory / "metrics.csv").exists()

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 6:
            raise InterruptedError


@pytest.mark.parametrize("world", [1, 2])
def test_record_is_independent_of_delayed_values(group, tmp_path, world):
    """Values may arrive during the next step."""
    (written, now), (written_later, later) = (
        group(world).run(broken_off_and_resumed, tmp_path / name, name == "later")[0] for name in ("now", "later")
    )
    assert (written, written_later) == (True, False)
    assert later == now
    rows = list(csv.DictReader(io.StringIO(now)))
    assert [(int(row["step"]), [name for name in row if row[name]][2:]) for row in rows] == [
        (2, ["loss", "grad_norm"]), (3, ["val_loss"]), (4, ["loss", "grad_norm"]), (6, ["loss", "grad_norm"]),
        (6, ["val_loss"]), (8, ["loss", "grad_norm"]), (9, ["val_loss"]), (9, ["loss", "grad_norm"]),
    ]  # fmt: skip


def broken_off_and_resumed(folder, later):
    breaking_off = BreakingOff()
    saver = lumen.ModelCheckpoint(every_n_train_steps=4)
    options = {
        "strategy": "ddp", "max_epochs": 3, "max_steps": 9, "log_every_n_steps": 2, "logger": lumen.CSVLogger(),
        "val_check_interval": 3, "gradient_clip_val": 1.0, "resume": "auto",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if later:  # as on CUDA
            patch.setattr(RunRecords, "is_asynchronous", True)
        with pytest.raises(InterruptedError):
            fit(folder, **options, callbacks=[saver, breaking_off])
        trainer = fit(folder, **options, callbacks=[saver])
    return getattr(breaking_off, "written", None), (trainer.run_directory / "metrics.csv").read_text()


def test_sharded_model_is_trained_without_its_graph(group, tmp_path):
    assert group(2).run(record_graph, tmp_path) == [1, 1]
    assert (
        "wrote no graph, because the parameters of Regression are sharded"
        in (tmp_path / "runs/run/run.log").read_text()
    )


def record_graph(folder):
    task = Regression()
    task.example_input_array = torch.zeros(1, FEATURES)
    options = {"logger": lumen.TensorBoardLogger(log_graph=True), "log_level": "WARNING"}
    trainer = quiet_trainer(folder, strategy="fsdp", max_steps=1, **options)
    trainer.fit(task, loader())
    return trainer.global_step


# ---------------------------------------------------------------------- services


def test_only_rank_0_records_and_all_know_where(group, tmp_path):
    answers = group(2).run(recorded_by_wandb, tmp_path)
    assert answers[0][0] is not None
    assert answers[1][0] is None
    assert answers[0][1:] == answers[1][1:] == (str(tmp_path / "runs/run"), str(tmp_path / "runs"), "run")
    directory = tmp_path / "runs/run"
    assert read_wandb(directory) == of_csv(directory)
    assert len([*directory.glob("wandb/offline-run-*")]) == 1


def recorded_by_wandb(folder):
    class Using(lumen.Callback):
        def on_train_start(self, trainer, task):
            trainer.logger.experiment.config.update({"mine": trainer.global_rank})

    logger = lumen.WandbLogger()
    fit(folder, strategy="ddp", max_steps=4, logger=logger, callbacks=[Using()])
    return logger.version, logger.log_dir, logger.save_dir, logger.name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_evaluations_are_recorded_by_rank_0(group, tmp_path, strategy):
    answers = group(2).run(record_evaluations, tmp_path, strategy)
    assert answers[0] == answers[1] == (str(tmp_path / "runs/run-eval"), str(tmp_path / "runs/run"), answers[0][2])
    for directory, step in (("run-eval", 0), ("run", 4)):
        found = read_table(tmp_path / "runs" / directory / "metrics.csv")
        assert [each for each, _ in found["test_loss"]] == [step]
    assert found["test_loss"] == [(4, pytest.approx(answers[0][2]))]


def record_evaluations(folder, strategy):
    trainer = quiet_trainer(folder, strategy=strategy, max_steps=4, logger="csv", devices=2)
    trainer.test(task := Regression(), loader(20), verbose=False)
    before = trainer.log_dir
    trainer.fit(task, loader())
    return before, trainer.log_dir, trainer.test(task, loader(20), verbose=False)[0]["test_loss"]


class Refusing(lumen.Logger):
    """Logger without a place for its record."""

    def open(self, directory, *, resumed):
        raise ConfigError("there is no place for it")

    def log_metrics(self, metrics, step):
        pass


def test_failing_logger_raises_on_all_ranks(group, tmp_path):
    assert (
        group(2).run(catch_message, ConfigError, fit, tmp_path, strategy="ddp", max_steps=4, logger=Refusing())
        == ["there is no place for it"] * 2
    )
    assert not (tmp_path / "runs/run").exists()
