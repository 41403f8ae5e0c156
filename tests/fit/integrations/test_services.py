"""Weights & Biases and MLflow: one run in the service for all parts of a Lumen run."""

import json
import os
import re
import shutil
import signal
import sqlite3
from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from PIL import Image

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from lumen.integrations.wandb_files import wait_for_end
from tests.helpers.loggers import fit
from tests.helpers.services import (
    CallAtSteps,
    Databases,
    Everything,
    list_aim_runs,
    list_mlflow_runs,
    make_mlflow_client,
    of_csv,
    read_aim,
    read_mlflow,
    read_wandb,
    read_wandb_records,
)
from tests.helpers.tasks import Regression

pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader"),  # a warning of SQLAlchemy about MLflow
    pytest.mark.filterwarnings("ignore::DeprecationWarning:aim"),
]
EVERY_STEP = {"max_epochs": None, "val_check_interval": 4}


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    return Databases(tmp_path_factory.mktemp("mlflow"))


@pytest.fixture
def database_uri(databases, tmp_path):
    return databases.uri(tmp_path)


# ---------------------------------------------------------------------- MLflow


@pytest.mark.slow
def test_mlflow_records_metrics_hyperparameters_and_media(tmp_path, database_uri):
    class Long(Everything):
        def __init__(self, nested, text):
            super().__init__(lr=0.125, dropout=0.2)
            self.save_hyperparameters()

        def training_step(self, batch):
            self.log("odd@name [0]", self.global_step)
            return super().training_step(batch)

    logger = lumen.MLFlowLogger(experiment_name="lines", tags={"who": "me"}, prefix="a")
    trainer = fit(tmp_path, Long({"depth": {"first": None}, "sizes": [1, 2]}, "x" * 7000), max_steps=6, logger=logger)
    (run,) = list_mlflow_runs(database_uri)
    assert (logger.version, logger.name) == (run.info.run_id, run.info.experiment_id)
    assert json.loads((trainer.run_directory / "mlflow.json").read_text()) == {"id": run.info.run_id}
    assert (run.info.run_name, run.info.status, run.data.tags["who"]) == ("run", "FINISHED", "me")
    assert make_mlflow_client(database_uri).get_experiment(run.info.experiment_id).name == "lines"
    clean = {f"a-{name.replace('@', '_').replace('[0]', '_0_')}": rows for name, rows in of_csv(logger.log_dir).items()}
    assert read_mlflow(database_uri, run.info.run_id) == clean
    assert [step for step, _ in clean["a-loss"]] == [1, 2, 3, 4, 5, 6]
    assert run.data.params == {
        "model/lr": "0.125", "model/dropout": "0.2", "model/text": "x" * 6000, "model/dtype": "torch.float32",
        "model/nested/depth/first": "None", "model/nested/sizes": "[1, 2]", "model/optimizer": "AdamW",
    }  # fmt: skip
    files = tmp_path / "runs/mlartifacts" / run.info.run_id / "artifacts"
    assert (files / "note/00000004.md").read_text() == "step *4*"
    assert sorted(path.name for path in (files / "weights").iterdir()) == [f"{step:08d}.png" for step in (0, 2, 4)]
    assert set(np.unique(np.asarray(Image.open(files / "weights/00000002.png")))) == {0, 7}


def test_mlflow_resumes_one_run_and_records_changed_hyperparameters(tmp_path, database_uri):
    for steps, rate in ((5, 0.125), (9, 0.25), (12, 0.25)):
        task = Regression(lr=rate, dropout=0.2)
        trainer = fit(tmp_path, task, max_steps=steps, resume="auto", logger="mlflow", log_level="ERROR", **EVERY_STEP)
    (run,) = list_mlflow_runs(database_uri)
    assert read_mlflow(database_uri, run.info.run_id) == of_csv(trainer.run_directory)
    assert run.data.params["model/lr"] == "0.125"
    assert run.data.tags["changed/model/lr"] == "0.125 → 0.25"


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_mlflow_records_status_and_resumes_without_duplicate_steps(tmp_path, database_uri, status):
    def end(trainer):
        if status == "KILLED":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise InterruptedError

    saver = lumen.ModelCheckpoint(every_n_train_steps=4, at_end=False)
    options = {"max_steps": 9, "logger": lumen.MLFlowLogger(), "resume": "auto"} | EVERY_STEP
    with pytest.raises((InterruptedError, SystemExit)):
        fit(tmp_path, callbacks=[CallAtSteps(step_6=end), saver], **options)
    (run,) = list_mlflow_runs(database_uri)
    assert run.info.status == status
    lost = read_mlflow(database_uri, run.info.run_id)["loss"]
    assert len(lost) > 4
    trainer = fit(tmp_path, callbacks=[saver], **options)
    (run,) = list_mlflow_runs(database_uri)
    record, own = read_mlflow(database_uri, run.info.run_id), of_csv(trainer.run_directory)
    assert run.info.status == "FINISHED"
    assert {name: record[name] for name in ("loss", "val_loss")} == {name: own[name] for name in ("loss", "val_loss")}
    assert [step for step, _ in record["system/time_s"]] == list(range(1, 10))


def test_restarted_run_leaves_the_previous_one_killed(tmp_path, database_uri):
    for _ in range(2):
        fit(tmp_path, max_steps=3, resume="auto", logger="mlflow", enable_checkpointing=False)
    first, second = list_mlflow_runs(database_uri)
    assert (first.info.status, second.info.status) == ("KILLED", "FINISHED")
    assert [step for step, _ in read_mlflow(database_uri, second.info.run_id)["loss"]] == [1, 2, 3]


def test_restart_needs_no_previous_run_in_service(tmp_path, database_uri, caplog):
    options = {"max_steps": 3, "resume": "auto", "logger": "mlflow", "enable_checkpointing": False}
    fit(tmp_path, **options)
    (first,) = list_mlflow_runs(database_uri)
    make_mlflow_client(database_uri).delete_run(first.info.run_id)
    trainer = fit(tmp_path, **options, log_level="WARNING")
    assert f"MLflow cannot mark the previous run {first.info.run_id} as ended" in caplog.text
    (second,) = list_mlflow_runs(database_uri)
    assert json.loads((trainer.run_directory / "mlflow.json").read_text()) == {"id": second.info.run_id}


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
def test_mlflow_catches_up_after_an_outage(tmp_path, database_uri, caplog, synchronous):
    place = tmp_path / "runs/mlflow.db"

    def lose(trainer):
        trainer.logger.save()  # values that a thread has sent
        place.rename(tmp_path / "away")
        place.mkdir()

    def find(trainer):
        trainer.logger.save()  # no thread has the file open meanwhile
        place.rmdir()
        (tmp_path / "away").rename(place)

    logger = lumen.MLFlowLogger(synchronous=synchronous)
    trainer = fit(
        tmp_path, logger=logger, max_steps=12, max_epochs=None, log_level="WARNING",
        callbacks=[CallAtSteps(step_3=lose, step_9=find), lumen.ModelCheckpoint(every_n_train_steps=5)],
    )  # fmt: skip
    (run,) = list_mlflow_runs(database_uri)
    record = read_mlflow(database_uri, run.info.run_id)
    assert {name: sorted(rows) for name, rows in record.items()} == of_csv(trainer.run_directory)
    assert (trainer.run_directory / "run.log").read_text().count("MLflow failed, and training continues") == 1


def test_mlflow_gets_rows_lost_in_transit(tmp_path, database_uri):
    def statement(text):
        with closing(sqlite3.connect(tmp_path / "runs/mlflow.db")) as database:
            database.execute(text)
            database.commit()

    losing = "CREATE TRIGGER lose BEFORE INSERT ON metrics WHEN NEW.step = 3 BEGIN SELECT RAISE(ABORT, 'lost'); END"

    def find(trainer):
        trainer.logger.save()
        statement("DROP TRIGGER lose")

    trainer = fit(
        tmp_path, logger=lumen.MLFlowLogger(synchronous=False), max_steps=7, log_level="ERROR",
        callbacks=[CallAtSteps(step_1=lambda _: statement(losing), step_5=find)],
    )  # fmt: skip
    (run,) = list_mlflow_runs(database_uri)
    record = read_mlflow(database_uri, run.info.run_id)
    assert {name: sorted(rows) for name, rows in record.items()} == of_csv(trainer.run_directory)


def test_names_that_collide_in_mlflow_are_refused(tmp_path, database_uri):
    class Twice(Regression):
        def training_step(self, batch):
            self.log_dict({"acc@1": 1.0, "acc_1": 5.0})
            return super().training_step(batch)

    with pytest.raises(ConfigError, match=r"MLflow: 'acc@1' and 'acc_1' both become 'acc_1'\. Rename"):
        fit(tmp_path, Twice(), max_steps=1, logger="mlflow", enable_checkpointing=False)


@pytest.mark.slow
def test_resumed_runs_connect_to_mlflow_later(tmp_path, database_uri):
    there = lumen.MLFlowLogger(tracking_uri=database_uri)
    fit(tmp_path, max_steps=3, logger=there, **EVERY_STEP)
    (tmp_path / "text").write_text("This is no database. " * 100)
    nowhere = lumen.MLFlowLogger(tracking_uri=f"sqlite:///{tmp_path}/text")
    with pytest.raises(ConfigError, match="MLflow cannot begin a run: "):
        fit(tmp_path, max_steps=3, logger=nowhere)
    assert not (tmp_path / "runs/run-2").exists()
    options = {"resume": "auto", "log_level": "WARNING"} | EVERY_STEP
    answering = CallAtSteps(step_5=lambda _: shutil.copy(tmp_path / "runs/mlflow.db", tmp_path / "text"))
    trainer = fit(tmp_path, max_steps=6, logger=nowhere, callbacks=[answering], **options)
    assert "MLflow failed, and training continues: " in (trainer.run_directory / "run.log").read_text()
    assert read_mlflow(f"sqlite:///{tmp_path}/text", nowhere.version) == of_csv(trainer.run_directory)
    fit(tmp_path, max_steps=9, logger=there, **options)
    (run,) = list_mlflow_runs(database_uri)
    assert read_mlflow(database_uri, run.info.run_id)["loss"] == of_csv(trainer.run_directory)["loss"]


def test_mlflow_file_store_works_where_allowed(tmp_path, monkeypatch):
    logger = lumen.MLFlowLogger(tracking_uri=f"file:{tmp_path}/mlruns")
    with pytest.raises(ConfigError, match="MLFLOW_ALLOW_FILE_STORE"):
        fit(tmp_path, max_steps=3, logger=logger)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for steps in (3, 7):
        trainer = fit(tmp_path, Everything(), max_steps=steps, resume="auto", logger=logger, **EVERY_STEP)
    (run,) = list_mlflow_runs(f"file:{tmp_path}/mlruns")
    assert read_mlflow(f"file:{tmp_path}/mlruns", run.info.run_id) == of_csv(trainer.run_directory)


# ---------------------------------------------------------------------- Weights & Biases


@pytest.mark.slow
def test_wandb_records_metrics_hyperparameters_and_media(tmp_path):
    logger = lumen.WandbLogger(project="lines", prefix="a", tags=["one"])
    task = Everything(lr=0.125)
    logger.watch(task, log="all", log_freq=2)
    logger.log_hyperparams({"mine": {"deep": 1}})
    trainer = fit(tmp_path, task, max_steps=6, logger=logger)
    directory = trainer.run_directory
    record, own = read_wandb(directory), of_csv(directory)
    assert {name: rows for name, rows in record.items() if name.removeprefix("a-") in own} == {
        f"a-{name}": rows for name, rows in own.items()
    }
    for name, kind in (("weights", "image-file"), ("note", "table-file"), ("layer", "histogram")):
        assert [(step, value["_type"]) for step, value in record[f"a-{name}"]] == [(step, kind) for step in (0, 2, 4)]
    files = directory / "wandb/latest-run/files"
    assert set(np.unique(np.asarray(Image.open(files / record["a-weights"][1][1]["path"])))) == {0, 7}
    assert json.loads((files / record["a-note"][1][1]["path"]).read_text())["data"] == [["step *2*"]]
    assert {"gradients/net", "parameters/net"} <= {name.partition(".")[0] for name in record}

    (run,) = (each.run for each in read_wandb_records(directory) if each.WhichOneof("record_type") == "run")
    assert (run.run_id, run.display_name, run.project, [*run.tags]) == (logger.version, "run", "lines", ["one"])
    assert json.loads((directory / "wandb.json").read_text()) == {"id": run.run_id}
    assert logger.name == "run"
    config = {}
    for each in read_wandb_records(directory):
        for item in [*each.config.update, *each.run.config.update]:
            config[item.key] = json.loads(item.value_json)
    assert config["mine"] == {"deep": 1}
    assert config["model"] == {"lr": 0.125, "dropout": 0.0, "dtype": "torch.float32", "optimizer": "AdamW"}


def test_wandb_resumes_one_run_and_restores_lost_values(tmp_path):
    options = {"resume": "auto", "logger": "wandb"} | EVERY_STEP
    directory = fit(tmp_path, Everything(), max_steps=5, **options).run_directory
    (part,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    while len(read_wandb(directory)["loss"]) > 2:  # as after a kill: some values were not written yet
        part.write_bytes(part.read_bytes()[:-99])
    fit(tmp_path, Everything(), max_steps=9, **options)
    record = read_wandb(directory)
    assert {name: record[name] for name in of_csv(directory)} == of_csv(directory)
    assert len(record["weights"]) < 5  # these values are lost
    assert len({path.name for path in directory.glob("wandb/offline-run-*/run-*.wandb")}) == 1


def test_wandb_has_no_duplicate_steps_after_interruption(tmp_path):
    def end(trainer):
        raise InterruptedError

    saver = lumen.ModelCheckpoint(every_n_train_steps=4, at_end=False)
    options = {"max_steps": 9, "logger": lumen.WandbLogger(offline=True), "resume": "auto"} | EVERY_STEP
    with pytest.raises(InterruptedError):
        fit(tmp_path, Everything(), callbacks=[CallAtSteps(step_7=end), saver], **options)
    directory = fit(tmp_path, Everything(), callbacks=[saver], **options).run_directory
    record, own = read_wandb(directory), of_csv(directory)
    assert {name: record[name] for name in ("loss", "val_loss")} == {name: own[name] for name in ("loss", "val_loss")}
    assert [step for step, _ in record["system/time_s"]] == list(range(1, 10))
    assert [step for step, _ in record["weights"]] == [0, 2, 4, 6, 8]


def test_existing_wandb_run_is_used_and_left_open(tmp_path):
    import wandb

    with wandb.init(dir=tmp_path, id="mine") as run:
        logger = lumen.WandbLogger()
        fit(tmp_path, max_steps=3, logger=logger)
        assert logger.version == "mine"
        run.log({"after": 1, "trainer/global_step": 3})
    wait_for_end(next(tmp_path.glob("wandb/*-mine/run-mine.wandb")))
    record = read_wandb(tmp_path)
    assert [step for step, _ in record["loss"]] == [1, 2, 3]
    assert record["after"] == [(3, 1)]


def test_failing_wandb_warns_once_and_training_continues(tmp_path):
    def finish(trainer):
        trainer.logger.experiment.finish()

    trainer = fit(
        tmp_path, Everything(), max_steps=8, logger="wandb", callbacks=[CallAtSteps(step_3=finish)], log_level="WARNING"
    )
    assert trainer.global_step == 8
    assert (trainer.run_directory / "run.log").read_text().count("Weights & Biases failed, and training continues") == 1
    assert len(of_csv(trainer.run_directory)["loss"]) == 8


def test_missing_lightning_logger_methods_name_their_replacement(tmp_path):
    import wandb

    class Tabled(Regression):
        def on_train_end(self):
            for name, kind in (("log_audio", "Audio"), ("log_video", "Video"), ("log_table", "Table")):
                with pytest.raises(AttributeError, match=rf"has no attribute {name}\. Write .*wandb\.{kind}\(") as said:
                    getattr(self.logger, name)("guesses", ["x"], [[1.5]])
            (written,) = re.findall(r"Write (.*) in fit\.", str(said.value))
            names = {"key": "guesses", "columns": ["x"], "data": [[1.5]]}
            eval(written, {"wandb": wandb, "logger": self.logger, "self": self, **names})

    trainer = fit(tmp_path, Tabled(), max_steps=3, logger="wandb")
    ((step, table),) = read_wandb(trainer.run_directory)["guesses"]
    assert (step, table["nrows"]) == (3, 1)


# ---------------------------------------------------------------------- both services


class Scaled(Regression):
    """Task whose loss changes at one step, as after a roll-back."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def training_step(self, batch):
        loss = super().training_step(batch) * (self.scale if self.global_step > 4 else 1)
        self.log("scaled", loss)
        return loss


@pytest.mark.slow
def test_abandoned_branches_are_sent_again_and_marked(tmp_path, database_uri):
    def end(trainer):
        raise InterruptedError

    saver = lumen.ModelCheckpoint(every_n_train_steps=4, at_end=False)
    options = {"max_steps": 9, "logger": ["wandb", "mlflow", "aim", "tensorboard"], "resume": "auto"} | EVERY_STEP
    for scale in (1, 100):
        with pytest.raises(InterruptedError) if scale == 1 else nullcontext():
            callbacks = [CallAtSteps(step_7=end), saver] if scale == 1 else [saver]
            trainer = fit(tmp_path, Scaled(scale), callbacks=callbacks, **options)
    own = {name: dict(rows) for name, rows in of_csv(trainer.run_directory).items()}
    (run,) = list_mlflow_runs(database_uri)
    (of_aims,) = list_aim_runs(tmp_path / "runs")
    records = read_mlflow(database_uri, run.info.run_id), read_wandb(trainer.run_directory), read_aim(of_aims)
    for record in records:
        assert {name: dict(record[name]) for name in ("loss", "scaled", "val_loss")} == {
            name: own[name] for name in ("loss", "scaled", "val_loss")
        }
        assert [step for step, _ in record["system/time_s"]] == list(range(1, 10))
    assert [step for step, _ in records[0]["scaled"]] == [1, 2, 3, 4, 5, 6, 7, 6, 7, 8, 9]
    assert run.data.params["lumen/recorded_again_from_step"] == "6"
    assert of_aims["lumen"] == {"recorded_again_from_step": 6}


@pytest.mark.slow
def test_configured_services_resume_from_the_command_line(tmp_path, monkeypatch, database_uri):
    monkeypatch.chdir(tmp_path)
    words = [
        "fit", "--model", "tests.helpers.cli_tasks.Line", "--data", "tests.helpers.cli_tasks.Points",
        "--model.lr", "0.05",
        "--trainer.logger", "[tensorboard, wandb, {class_path: MLFlowLogger, init_args: {tags: {a: b}}}]",
        "--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false", "--trainer.name", "line",
        "--trainer.log_every_n_steps", "1", "--trainer.resume", "auto",
    ]  # fmt: skip
    for epochs in "12":
        assert main([*words, "--trainer.max_epochs", epochs]) == 0
    (run,) = list_mlflow_runs(database_uri)
    directory = tmp_path / "runs/line"
    assert read_mlflow(database_uri, run.info.run_id) == read_wandb(directory) == of_csv(directory)
    assert (run.data.tags["a"], run.data.params["model/lr"]) == ("b", "0.05")
    assert "logger:\n  - tensorboard\n  - wandb\n" in (directory / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: lumen.WandbLogger(log_model=True), "no argument log_model. Leave it out: checkpoints"),
        (lambda: lumen.WandbLogger(id="a", version="b"), "id='a' and version='b' name two runs"),
        (lambda: lumen.MLFlowLogger(log_model="all"), "no argument log_model. Leave it out: checkpoints"),
        (lambda: lumen.MLFlowLogger(experiment="x"), "no argument experiment. Did you mean experiment_name"),
    ],
)
def test_arguments_that_are_wrong_are_named(make, said):
    with pytest.raises(ConfigError) as caught:
        make()
    assert said in str(caught.value)


PIXELS = torch.zeros(2, 2)


@pytest.mark.parametrize("kind", [lumen.CSVLogger, lumen.TensorBoardLogger, lumen.WandbLogger, lumen.MLFlowLogger])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda logger: logger.log_image(key="samples", images=[PIXELS]), "log_image(name, image, step=self."),
        (lambda logger: logger.log_image("samples", [PIXELS, PIXELS], caption=["a", "b"]), "log_image(name, image, "),
        (lambda logger: logger.log_text("samples", ["said"], [["yes"]]), "log_text(name, text, step=self.global_step)"),
        (lambda logger: logger.log_histogram("weights", PIXELS, 1.5), "log_histogram(name, values, step=self."),
        (
            lambda logger: logger.log_metrics(step=3),
            "'metrics'. Write logger.log_metrics(metrics, step=self.global_step",
        ),
        (
            lambda logger: logger.log_metrics({"loss": 1.0}, 1.5),
            "integer. Write logger.log_metrics(metrics, ",
        ),
        (lambda logger: logger.log_hyperparams(), "argument: 'params'. Write logger.log_hyperparams(params)"),
    ],
)
def test_logger_calls_of_lightning_say_what_to_write(kind, call, said):
    with pytest.raises(ConfigError) as caught:
        call(kind())
    assert str(caught.value).startswith(f"{kind.__name__}.log_")
    assert said in str(caught.value)
    assert str(caught.value).endswith("use logger.experiment.")


@pytest.mark.parametrize("kind", [lumen.TensorBoardLogger, lumen.WandbLogger, lumen.MLFlowLogger])
@pytest.mark.parametrize("image", [[PIXELS], Image.new("L", (2, 2)), Image.new("RGB", (2, 2))])
def test_invalid_images_raise_and_name_their_type(kind, image):
    with pytest.raises(ConfigError, match=rf"log_image\('samples'\): expected .*, found {type(image).__name__}\. Call"):
        kind().log_image("samples", image, 3)
