"""Values of `validate` and `test` in the loggers that the user gave."""

import logging
import shutil
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lumen
from tests.helpers.loggers import read_csv, read_hyperparameters, read_scalars, read_table
from tests.helpers.services import make_mlflow_client, read_wandb
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Writing(Regression):
    """Task that also writes to the experiment of its first logger."""

    def on_test_epoch_end(self):
        if hasattr(self.logger.experiment, "add_scalar"):
            self.logger.experiment.add_scalar("own", 1.0, self.global_step)


def fit(folder, logger, steps=4, **options):
    trainer = quiet_trainer(folder, max_steps=steps, log_every_n_steps=2, logger=logger, **options)
    trainer.fit(Writing(), loader(), val_dataloaders=loader(20, shuffle=False))
    return trainer


def evaluate(trainer, task=None):
    return {
        **trainer.validate(task or trainer.model, loader(20, shuffle=False), verbose=False)[0],
        **trainer.test(trainer.model, loader(20, shuffle=False), verbose=False)[0],
    }


def make_loggers():
    return [lumen.TensorBoardLogger(), lumen.CSVLogger(), lumen.WandbLogger(offline=True)]


def read_rows(path):
    return [line for line in (path / "metrics.csv").read_text().splitlines() if line]


@pytest.mark.slow
def test_evaluations_after_fit_continue_its_record(tmp_path):
    trainer = fit(tmp_path, make_loggers())
    values = evaluate(trainer)
    assert values.keys() == {"val_loss", "test_loss"}
    rows, events, sent = (
        read_csv(trainer.run_directory),
        read_scalars(trainer.run_directory),
        read_wandb(tmp_path / "runs/run"),
    )
    for name, value in values.items():
        assert sent[name] == [(4, value)]
        assert rows[name] == events[name] == [(4, float(torch.tensor(value)))]
    assert events["own"] == [(4, 1.0)]
    assert len(events["loss"]) == len(sent["loss"]) == 2
    assert len({*(tmp_path / "runs/run/wandb").glob("offline-run-*")}) == 3


@pytest.mark.slow
def test_evaluations_before_fit_share_a_record(tmp_path):
    trainer = quiet_trainer(tmp_path, logger=make_loggers())
    values = evaluate(trainer, Writing())
    directory = tmp_path / "runs/run-eval"
    assert [*(tmp_path / "runs").iterdir()] == [directory]
    assert trainer.log_dir == trainer.logger.log_dir == str(directory)
    sent = read_wandb(directory)
    assert {name: sent[name] for name in values} == {name: [(0, value)] for name, value in values.items()}
    assert read_scalars(directory).keys() == values.keys() | {"own"}
    assert "model.lr" in read_hyperparameters(directory)
    other = quiet_trainer(tmp_path, logger="csv")
    other.test(Writing(), loader(8), verbose=False)
    assert other.log_dir == str(tmp_path / "runs/run-eval-2")


@pytest.mark.parametrize("logger", [True, False])
def test_default_logger_gets_no_values_of_evaluations(tmp_path, logger):
    trainer = quiet_trainer(tmp_path, logger=logger)
    trainer.test(Regression(), loader(8), verbose=False)
    assert not (tmp_path / "runs").exists()
    trainer = quiet_trainer(tmp_path, logger=logger, max_steps=2)
    trainer.fit(Regression(), loader())
    files = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    trainer.test(Regression(), loader(8), verbose=False)
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == files


def test_failed_evaluation_leaves_no_empty_directory(tmp_path):
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(tmp_path, logger="csv").test(Failing(), loader(8), verbose=False)
    assert not [*(tmp_path / "runs").iterdir()]


class Failing(Regression):
    def test_step(self, batch):
        return 1 / 0


@pytest.mark.slow
def test_resumed_run_repeats_no_value_of_an_evaluation(tmp_path):
    """A program that fits and tests is started again twice: longer, and without anything left to train."""
    whole = fit(tmp_path / "whole", make_loggers(), 8)
    evaluate(whole)
    for steps in (4, 8, 8):
        trainer = fit(tmp_path, make_loggers(), steps, resume="auto")
        evaluate(trainer)
    assert read_rows(trainer.run_directory) == read_rows(whole.run_directory)
    assert [step for step, _ in read_scalars(trainer.run_directory)["test_loss"]] == [8]
    sent = read_wandb(trainer.run_directory)
    assert {name: [step for step, _ in sent[name]] for name in ("loss", "test_loss")} == {
        "loss": [2, 4, 6, 8], "test_loss": [4, 8],
    }  # fmt: skip
    assert [step for step, _ in sent["val_loss"]] == [4, 7, 8]


@pytest.mark.slow
def test_other_weights_at_the_same_step_are_sent(tmp_path, caplog):
    for _ in range(2):
        trainer = fit(tmp_path, [lumen.WandbLogger(offline=True)], resume="auto")
    evaluate(trainer)
    evaluate(trainer, Writing(lr=1.0))
    nn.init.zeros_(trainer.model.net[0].weight)
    evaluate(trainer)
    assert len(read_wandb(trainer.run_directory)["test_loss"]) == 3
    assert "discarded part" not in caplog.text


def test_removed_run_directory_is_no_error(tmp_path, caplog):
    trainer = fit(tmp_path, "csv", log_level="WARNING")
    shutil.rmtree(tmp_path / "runs")
    assert evaluate(trainer).keys() == {"val_loss", "test_loss"}
    assert "the loggers get no values of this test: cannot use the run directory" in caplog.text
    assert not (tmp_path / "runs").exists()


def test_names_and_steps_are_those_of_lightning(tmp_path):
    class Theirs(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def training_step(self, batch):
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def test_step(self, batch):
            self.log("test_loss", 0.5)
            self.log("by_batch", 1.0, on_step=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Ours(lumen.TaskModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        training_step, test_step = Theirs.training_step, Theirs.test_step
        configure_optimizers = Theirs.configure_optimizers

    found = []
    for library, task in ((pl, Theirs()), (lumen, Ours())):
        logger = (
            library.loggers.CSVLogger(tmp_path / "pl", "x") if library is pl else lumen.CSVLogger(tmp_path / "l", "x")
        )
        options = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = library.Trainer(max_steps=4, accelerator="cpu", logger=logger, **options)
            trainer.fit(task, loader())
            trainer.test(task, loader(8), verbose=False)
        table = read_table(Path(logger.log_dir) / "metrics.csv")
        found.append({name: table[name] for name in table if "loss" in name or "batch" in name})
    assert found[0]["test_loss"] == found[1]["test_loss"] == [(4, 0.5)]
    assert found[0].keys() == found[1].keys()


# ---------------------------------------------------------------------- after a run


@pytest.mark.parametrize(
    ("make", "use", "words"),
    [
        (lumen.TensorBoardLogger, lambda of: of.experiment.add_scalar("x", 1.0),
         r"TensorBoardLogger\.experiment does nothing here, because the run has ended\. Call it in a hook of fit, "
         r"validate or test, such as on_fit_end or on_test_end, or write torch\.utils\.tensorboard\.SummaryWriter\('"),
        (lambda: lumen.WandbLogger(offline=True), lambda of: of.experiment.log({"x": 1}),
         r"or write wandb\.init\(id='\w+', resume='allow', .*project='lumen', dir='"),
        (lumen.CSVLogger, lambda of: of.log_metrics({"x": 1}), r"CSVLogger\.log_metrics does.*on_test_end\.$"),
    ],
    ids=["tensorboard", "wandb", "csv"],
)  # fmt: skip
def test_calls_after_the_run_warn_once(tmp_path, make, use, words):
    logger = make()
    trainer = fit(tmp_path, logger)
    with pytest.warns(UserWarning, match=words) as caught:
        use(logger)
    assert len(caught) == 1
    use(logger)
    trainer.test(trainer.model, loader(8), verbose=False)
    with pytest.warns(UserWarning, match="does nothing here"):
        use(logger)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # a warning of SQLAlchemy about MLflow
def test_mlflow_experiment_works_after_the_run(tmp_path):
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logger = lumen.MLFlowLogger()
    trainer = fit(tmp_path, logger)
    value = evaluate(trainer)["test_loss"]
    logger.experiment.log_metric(logger.run_id, "late", 2.0)
    run = make_mlflow_client(f"sqlite:///{tmp_path / 'runs/mlflow.db'}").get_run(logger.run_id)
    assert (run.data.metrics["test_loss"], run.data.metrics["late"]) == (value, 2.0)
    assert run.info.status == "FINISHED"
