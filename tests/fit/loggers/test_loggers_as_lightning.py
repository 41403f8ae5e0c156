"""Constructors and calls of Lightning's loggers that Lumen's loggers accept with the same meaning."""

import argparse
import logging

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.loggers import read_csv, read_hyperparameters
from tests.helpers.services import read_wandb, read_wandb_records
from tests.helpers.tasks import Regression, loader

BRIEF = {
    "max_steps": 2, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0, "enable_checkpointing": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(logger, task=None, **options):
    trainer = lumen.Trainer(logger=logger, **BRIEF | options)
    trainer.fit(task or Regression(), loader())
    return trainer


# ---------------------------------------------------------------------- directories


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
@pytest.mark.parametrize(
    ("arguments", "directories"),
    [
        ({"save_dir": "logs", "name": "x"}, ["logs/x", "logs/x-2"]),
        ({"save_dir": "logs"}, ["logs/regression", "logs/regression-2"]),
        ({"save_dir": "logs", "name": None, "version": None}, ["logs/regression"]),
        ({"save_dir": "logs", "name": "", "version": ""}, ["logs/regression"]),
        ({"save_dir": "logs", "name": "x", "version": 3}, ["logs/x/version_3"]),
        ({"save_dir": "logs", "name": "x", "version": "a"}, ["logs/x/a", "logs/x/a-2"]),
        ({"save_dir": ""}, ["regression"]),
    ],
)
def test_logger_arguments_choose_the_run_directory(tmp_path, kind, arguments, directories):
    for directory in directories:
        logger = getattr(lumen, kind)(**arguments)
        theirs = getattr(pl.loggers, kind)(**arguments)
        if arguments["save_dir"]:
            assert logger.save_dir == theirs.save_dir
        if arguments.get("name"):
            assert logger.name == theirs.name
        if arguments.get("version"):
            assert (logger.version, theirs.log_dir) == (theirs.version, directories[0])
        trainer = fit(logger)
        assert str((tmp_path / trainer.log_dir).relative_to(tmp_path)) == logger.log_dir == directory
        assert len(read_csv(trainer.run_directory)["loss"]) == 2


def test_trainer_arguments_precede_logger_arguments(tmp_path, caplog):
    logger = lumen.TensorBoardLogger("logs", name="x")
    assert fit([logger, lumen.CSVLogger("other", "y")], default_root_dir="here", name="z").log_dir == "here/z"
    assert "a logger's save_dir logs is not used: Trainer has default_root_dir=here" in caplog.text
    assert "a logger's name 'x' is not used: Trainer has name='z'" in caplog.text
    caplog.clear()
    trainer = fit(logger, enable_checkpointing=True)
    assert trainer.log_dir == "logs/x"
    # This is the continuation that the end of a run prints.
    assert fit(logger, name="x", resume="auto", max_steps=4, enable_checkpointing=True).log_dir == "logs/x"
    assert "is not used" not in caplog.text


def test_logger_name_in_a_config_names_the_run(tmp_path):
    (tmp_path / "file.yaml").write_text(
        """
model: {class_path: tests.helpers.cli_tasks.Line}
data: {class_path: tests.helpers.cli_tasks.Points}
trainer:
  max_steps: 1
  enable_progress_bar: false
  logger:
    - class_path: lumen.CSVLogger
      init_args: {save_dir: logs, name: wine, version: null, prefix: "", flush_logs_every_n_steps: 10}
    - class_path: lumen.TensorBoardLogger
      init_args: {save_dir: logs, name: other, log_graph: false, default_hp_metric: true, sub_dir: null}
"""
    )
    assert main(["fit", "--config", "file.yaml"]) == 0
    assert {each.name for each in (tmp_path / "logs").iterdir()} == {"wine"}
    assert (tmp_path / "logs/wine/tensorboard").is_dir()


# ---------------------------------------------------------------------- calls


class Calling(Regression):
    """Task that logs with loggers as tasks of Lightning do."""

    def training_step(self, batch):
        for logger in self.trainer.loggers:
            logger.log_metrics({"own": 1.0 + self.global_step})
            logger.log_metrics({"at": 2.0}, step=self.global_step)
        return super().training_step(batch)


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_values_without_step_get_the_runs_step(tmp_path, kind):
    directory = fit(kind, Calling()).run_directory
    if kind == "csv":
        found = read_csv(directory)
        assert found["own"] == [(0, 1.0), (1, 2.0)]
    else:
        record = EventAccumulator(str(directory / "tensorboard")).Reload()
        assert [(each.step, each.value) for each in record.Scalars("own")] == [(0, 1.0), (1, 2.0)]


PARAMETERS = {
    "dictionary": {"lr": 0.1, "net": {"width": 3}},
    "namespace": argparse.Namespace(lr=0.1, net={"width": 3}),
    "omegaconf": OmegaConf.create({"lr": 0.1, "net": {"width": 3}}),
}


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_hyperparameters_given_before_fit_are_recorded(tmp_path, parameters):
    logger = lumen.TensorBoardLogger("logs", "x")
    with pytest.raises(ConfigError, match=r"expected a dictionary or a namespace, found int\. Write logger\.log_hyper"):
        logger.log_hyperparams(3)
    logger.log_hyperparams(None)
    logger.log_hyperparams(parameters, {"hp/acc": 0.5})
    logger.experiment.add_text("note", "before", 0)
    directory = fit(logger).run_directory
    hyperparameters = read_hyperparameters(directory)
    assert {"lr": 0.1, "net.width": 3.0}.items() <= hyperparameters.items()
    assert "model.lr" in hyperparameters
    record = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in record.Scalars("hp/acc")] == [(0, 0.5)]
    assert record.Tags()["tensors"] == ["note/text_summary"]


def test_hyperparameters_of_a_hook_are_added(tmp_path):
    class Notes(Regression):
        def on_train_start(self):
            self.logger.log_hyperparams({"width": 3})

    logger = lumen.TensorBoardLogger()
    directory = fit(logger, Notes(lr=0.1)).run_directory
    record = EventAccumulator(str(directory / "tensorboard")).Reload()
    (event,) = record.Tensors("hyperparameters/text_summary")
    assert event.tensor_proto.string_val[0].decode() == "added:\n\n* `width`: 3"
    assert logger.state_dict()["hyperparameters"].items() >= {"model.lr": 0.1, "width": 3}.items()


@pytest.mark.slow
def test_wandb_watches_a_task_in_each_run(tmp_path):
    logger, task = lumen.WandbLogger(project="p", offline=True), Regression()
    logger.watch(task, log_freq=1)
    trainer = fit(logger, task)
    directories = [trainer.run_directory]
    trainer.validate(task, loader())
    logger.watch(task, log_freq=1)
    trainer.fit(task, loader())
    for directory in (*directories, trainer.run_directory):
        assert any(name.startswith("gradients/") for name in read_wandb(directory))


def test_wandb_calls_before_fit_wait_for_fit(tmp_path):
    logger = lumen.WandbLogger(project="p", offline=True)
    logger.experiment.config.update({"a": 1})
    logger.experiment.config["b"] = 2
    logger.experiment.notes = "early"
    logger.log_hyperparams(argparse.Namespace(c=3))
    with pytest.raises(ConfigError, match=r"WandbLogger\.experiment\.config has no value before fit"):
        logger.experiment.config["b"]
    with pytest.raises(ConfigError, match=r"WandbLogger\.experiment\.id has no value before fit\. Read it in on_fit"):
        f"checkpoints/{logger.experiment.id}"
    directory = fit(logger).run_directory
    updates = [one for record in read_wandb_records(directory) for one in record.run.config.update]
    updates += [one for record in read_wandb_records(directory) for one in record.config.update]
    assert {one.key: one.value_json for one in updates if one.key in "abc"} == {"a": "1", "b": "2", "c": "3"}
    assert len(read_wandb(directory)["loss"]) == 2


class Graphed(Regression):
    """Task whose forward draws random numbers and changes a buffer."""

    def __init__(self):
        super().__init__()
        self.example_input_array = torch.zeros(3, 6)
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout()

    def forward(self, inputs):
        return super().forward(self.dropout(self.norm(inputs)))


def test_log_graph_records_the_graph_and_changes_nothing(tmp_path):
    plain, graphed = Graphed(), Graphed()
    graphed.load_state_dict(plain.state_dict())
    fit("csv", plain, seed=1)
    logger = lumen.TensorBoardLogger(log_graph=True)
    directory = fit(logger, graphed, seed=1).run_directory
    assert EventAccumulator(str(directory / "tensorboard")).Reload().Tags()["graph"]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, graphed.state_dict()[name]), name
    with pytest.raises(ConfigError, match=r"has no example_input_array\. Set self\.example_input_array in __init__"):
        fit(logger, Regression())
    lumen.CSVLogger().log_graph(graphed, torch.zeros(1, 6))  # other loggers ignore graphs


@pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # a warning of SQLAlchemy about MLflow
def test_mlflow_run_id_is_known_in_fit(tmp_path):
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logger = lumen.MLFlowLogger()
    with pytest.raises(ConfigError, match=r"MLFlowLogger\.run_id: the MLflow run begins with fit.*Read it in on_fit_s"):
        _ = logger.run_id
    fit(logger)
    assert (logger.run_id, logger.experiment_id) == (logger.version, logger.name)
