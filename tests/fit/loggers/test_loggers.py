"""Loggers: TensorBoard's record besides the CSV files, over several runs, kills and resumes."""

import csv
import io
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.cli import main
from lumen.errors import ConfigError
from lumen.run.records import RunRecords
from tests.helpers.loggers import Drawn, fit, read_csv, read_events, read_hyperparameters, read_scalars, read_table
from tests.helpers.tasks import Regression, loader, quiet_trainer


class During(lumen.Callback):
    """Callback that calls a function with the trainer when training starts."""

    def __init__(self, action):
        self.action = action

    def on_train_start(self, trainer, task):
        self.action(trainer)


def read_contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*tfevents*")}


# ---------------------------------------------------------------------- recorded values


def test_the_record_is_that_of_the_csv_files(tmp_path):
    directory = fit(tmp_path).run_directory
    record = read_scalars(directory)
    assert record == read_csv(directory)
    assert [step for step, _ in record["loss"]] == list(range(1, 15))
    assert [step for step, _ in record["val_loss"]] == [7, 14]
    assert {"system/time_s", "system/samples_per_s", "system/memory_mb"} <= record.keys()


def test_values_are_on_disk_during_the_run(tmp_path):
    class Reading(lumen.Callback):
        steps = ()

        def on_step_end(self, trainer, task):
            self.steps = [step for step, _ in read_scalars(trainer.run_directory)["loss"]]
            assert self.steps == list(range(1, trainer.global_step + 1))

    reading = Reading()
    fit(tmp_path, max_steps=4, callbacks=[reading])
    assert reading.steps == [1, 2, 3, 4]


class Ending(lumen.Callback):
    """Callback that ends a run in or after step 3."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if self.how == "by an error" and trainer.global_step == 3:
            raise InterruptedError

    def on_step_end(self, trainer, task):
        if self.how == "by a signal" and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


class Both(Regression):
    """Task that logs each step's value and an epoch's mean."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("how", ["by an error", "by a signal", "at its limit"])
def test_last_step_is_written_however_run_ends(tmp_path, monkeypatch, how):
    monkeypatch.setattr(RunRecords, "is_asynchronous", True)  # as on CUDA
    ends_early = how != "at its limit"
    with pytest.raises((InterruptedError, SystemExit)) if ends_early else nullcontext():
        fit(tmp_path, Both(), callbacks=[Ending(how)], max_steps=100 if ends_early else 3, enable_checkpointing=False)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs" / "run" / "metrics.csv").read_text())))
    names = [(int(row["step"]), [name for name in row if "both" in name and row[name]]) for row in rows]
    last = 4 if how == "by a signal" else 3  # the run checks for signals before it calls the hooks at the end of a step
    whole_epoch = [] if ends_early else [(3, ["both_epoch"])]
    assert names == [(step, ["both_step"]) for step in range(1, last + 1)] + whole_epoch


def test_images_are_read_back_pixel_by_pixel(tmp_path):
    grey = torch.tensor([[0.0, 0.5], [1.0, 2.0], [-1.0, 0.25]])
    images = {
        "grey": (grey, [[0, 127], [255, 255], [0, 63]]),
        "bf16": (grey[None].bfloat16(), [[0, 127], [255, 255], [0, 63]]),
        "bool": (grey > 0.3, [[0, 255], [255, 255], [0, 0]]),
        "rgb": (np.arange(18, dtype=np.uint8).reshape(3, 3, 2), np.arange(18).reshape(3, 3, 2).transpose(1, 2, 0)),
        "rgba": (torch.full((4, 1, 1), 7, dtype=torch.uint8), [[[7, 7, 7, 7]]]),
    }

    def log(trainer):
        for name, (image, _) in images.items():
            trainer.logger.log_image(name, image, step=3)

    found = read_events(fit(tmp_path, logger=lumen.TensorBoardLogger(), callbacks=[During(log)]).run_directory)
    for name, (_, expected) in images.items():
        (event,) = found.Images(name)
        assert event.step == 3
        picture = Image.open(io.BytesIO(event.encoded_image_string))
        pixels = np.asarray(picture.convert("L") if np.ndim(expected) == 2 else picture)
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(
    "image", [torch.zeros(2, 5, 5), torch.zeros(5), torch.zeros(1, 3, 5, 5), torch.zeros(5, 5, dtype=torch.int64)]
)
def test_what_is_no_image_is_named(tmp_path, image):
    with pytest.raises(
        ConfigError, match=r"log_image\('picture'\): expected .*; found shape \(.*\) of torch\."
    ) as caught:
        fit(tmp_path, callbacks=[During(lambda trainer: trainer.loggers[1].log_image("picture", image, 0))])
    assert str(tuple(image.shape)) in str(caught.value)


def test_histograms_count_the_values_that_are_finite(tmp_path):
    values = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [-3.0, 1e30]])

    def log(trainer):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            trainer.logger.log_histogram(str(dtype), values.to(dtype), step=5)
        trainer.logger.log_histogram("bool", torch.tensor([True, False, True]), step=5)
        trainer.logger.log_histogram("numpy", np.array([1, 2, -3]), step=5)
        trainer.logger.log_histogram("nothing", torch.tensor([float("nan")]), step=5)

    found = read_events(fit(tmp_path, logger=lumen.TensorBoardLogger(), callbacks=[During(log)]).run_directory)
    for name in ("torch.float32", "torch.bfloat16", "torch.float64", "numpy"):
        (event,) = found.Histograms(name)
        histogram = event.histogram_value
        assert (event.step, histogram.num, histogram.min, histogram.max, histogram.sum) == (5, 3, -3, 2, 0)
    assert found.Histograms("bool")[0].histogram_value.sum == 2
    assert "nothing" not in found.Tags()["histograms"]


def test_text_is_read_back(tmp_path):
    log = During(lambda trainer: trainer.logger.log_text("notes", "**Grüße**", step=2))
    found = read_events(fit(tmp_path, logger=lumen.TensorBoardLogger(), callbacks=[log]).run_directory)
    (event,) = found.Tensors("notes/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (2, "**Grüße**")


class Data(lumen.DataModule):
    def __init__(self, batch_size=8, options=None):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader(16, self.hparams.batch_size)


def test_hyperparameters_use_names_of_the_command_line(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1, logger=lumen.TensorBoardLogger())
    trainer.fit(Regression(lr=0.125), Data(options={"mirror": True, "sizes": (1, 2), "depth": {"first": None}}))
    assert read_hyperparameters(trainer.run_directory) == {
        "model.lr": 0.125,
        "model.dropout": 0.0,
        "model.dtype": "torch.float32",
        "model.optimizer": "AdamW",
        "data.batch_size": 8.0,
        "data.options.mirror": "True",
        "data.options.sizes": "(1, 2)",
        "data.options.depth.first": "None",
    }


# ---------------------------------------------------------------------- order and choice of loggers


def test_what_a_logger_cannot_hold_it_ignores(tmp_path):
    directory = fit(tmp_path, Drawn(), max_steps=2, logger=lumen.CSVLogger()).run_directory
    files = {path.name for path in directory.iterdir() if path.is_file()} - {".lock"}
    assert files == {"metrics.csv", "system.csv", "environment.json", "run.log", "goodput.jsonl", "script.yaml"}
    assert read_table(directory / "metrics.csv").keys() == {"loss"}


def test_prediction_writes_nothing_to_loggers(tmp_path):
    class Predicting(Regression):
        def predict_step(self, batch):
            for logger in self.trainer.loggers:
                logger.log_image("x", torch.zeros(2, 2), 0)
                logger.experiment.add_scalar("x", 1.0, 0)

    trainer = fit(tmp_path, Predicting(), logger=lumen.TensorBoardLogger())
    before = read_contents(trainer.run_directory)
    with pytest.warns(UserWarning, match="TensorBoardLogger.log_image does nothing here"):
        trainer.predict(Predicting(), loader())
    assert read_contents(trainer.run_directory) == before


def test_experiment_is_the_summary_writer_during_fit(tmp_path):
    def use(trainer):
        assert type(trainer.loggers[1].experiment).__mro__[1] is SummaryWriter
        assert trainer.loggers[0].experiment is None
        trainer.loggers[1].experiment.add_scalar("mine", 0.5, 11)

    trainer = fit(tmp_path, callbacks=[During(use)])
    with pytest.warns(UserWarning, match="does nothing here"):
        trainer.loggers[1].experiment.add_scalar("late", 0.5, 11)
    assert read_scalars(trainer.run_directory)["mine"] == [(11, 0.5)]
    assert "late" not in read_scalars(trainer.run_directory)


def test_configured_loggers_are_given_by_class_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"class_path": "tests.helpers.cli_tasks.Line", "init_args": {"lr": 0.05}},
        "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 12}},
        "trainer": {
            "max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False,
            "logger": ["CSVLogger", {"class_path": "lumen.TensorBoardLogger"}],
        },
    }  # fmt: skip
    Path("line.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "line.yaml"]) == 0
    directory = tmp_path / "runs/line"
    assert read_scalars(directory) == read_csv(directory)
    assert main(["fit", "--config", str(directory / "config.yaml"), "--trainer.max_epochs", "3",
                 "--trainer.resume", "auto"]) == 0  # fmt: skip
    assert read_scalars(directory) == read_csv(directory)
    assert read_hyperparameters(directory)["model.lr"] == 0.05


# ---------------------------------------------------------------------- resumed records


def list_event_files(directory):
    """Return the event files in the order of their names, in which TensorBoard reads them."""
    return sorted((directory / "tensorboard").iterdir())


def test_resumed_tensorboard_record_equals_uninterrupted_one(tmp_path):
    for steps in (5, 9, 12, 20):
        directory = fit(tmp_path, Drawn(dropout=0.2), max_steps=steps, max_epochs=None, resume="auto").run_directory
    whole = fit(tmp_path / "whole", Drawn(dropout=0.2), max_steps=20, max_epochs=None).run_directory
    assert len(list_event_files(directory)) == 4
    record, undisturbed = read_scalars(directory), read_scalars(whole)
    assert record == read_csv(directory)
    assert {name: record[name] for name in ("loss", "val_loss")} == {
        name: undisturbed[name] for name in ("loss", "val_loss")
    }
    assert len(read_hyperparameters(directory)) == 4
    for name, kind in (("weights", "Images"), ("first layer", "Histograms"), ("note/text_summary", "Tensors")):
        assert [event.step for event in getattr(read_events(directory), kind)(name)] == list(range(20))


def test_a_finished_run_gets_no_further_part(tmp_path):
    directory = fit(tmp_path).run_directory
    before = read_contents(directory)
    fit(tmp_path, resume="auto")
    assert read_contents(directory) == before


class Fails(Regression):
    def training_step(self, batch):
        if self.global_step == 8:
            raise RuntimeError("on purpose")
        return super().training_step(batch)


def test_removed_event_file_name_is_not_reused(tmp_path):
    """A TensorBoard that shows the run has that file open and would miss a new file of the same name."""
    fit(tmp_path, max_steps=5, max_epochs=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on purpose"):
            fit(tmp_path, Fails(dropout=0.2), max_steps=20, max_epochs=None, resume="auto", callbacks=[
                lumen.ModelCheckpoint(every_n_epochs=0)
            ])  # fmt: skip
    directory = fit(tmp_path, max_steps=20, max_epochs=None, resume="auto").run_directory
    assert [path.name.split(".")[3] for path in list_event_files(directory)] == ["00000", "00003"]
    assert read_scalars(directory) == read_csv(directory)


def test_partial_event_is_truncated(tmp_path):
    directory = fit(tmp_path, max_steps=5, max_epochs=None).run_directory
    (part,) = list_event_files(directory)
    content = part.read_bytes()
    part.write_bytes(content + content[-40:-7])
    fit(tmp_path, max_steps=9, max_epochs=None, resume="auto")
    assert part.read_bytes() == content
    assert read_scalars(directory) == read_csv(directory)


def test_restarted_run_without_checkpoint_replaces_its_record(tmp_path):
    directory = fit(tmp_path, enable_checkpointing=False).run_directory
    fit(tmp_path, resume="auto", max_epochs=1)
    assert [step for step, _ in read_scalars(directory)["loss"]] == list(range(1, 8))
    assert len(read_hyperparameters(directory)) == 4


def test_run_from_other_checkpoint_has_a_separate_record(tmp_path):
    first = fit(tmp_path, max_steps=5, max_epochs=None).run_directory
    before = read_scalars(first)
    second = fit(tmp_path, max_steps=8, max_epochs=None, resume=first).run_directory
    assert read_scalars(first) == before
    assert [step for step, _ in read_scalars(second)["loss"]] == [6, 7, 8]
    assert read_scalars(second) == read_csv(second)
    assert len(read_hyperparameters(second)) == 4


def test_added_logger_repeats_nothing_after_interruption(tmp_path):
    saving = {"callbacks": [lumen.ModelCheckpoint(every_n_epochs=0)], "max_epochs": None}
    fit(tmp_path, max_steps=5, logger=lumen.CSVLogger(), **saving)
    both = [lumen.CSVLogger(), lumen.TensorBoardLogger()]
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path, Fails(dropout=0.2), max_steps=9, resume="auto", logger=both, **saving)
    directory = tmp_path / "runs/run"
    assert [step for step, _ in read_scalars(directory)["loss"]] == [6, 7, 8]
    fit(tmp_path, max_steps=9, resume="auto", logger=both, **saving)
    assert [step for step, _ in read_scalars(directory)["loss"]] == [6, 7, 8, 9]
    assert [step for step, _ in read_table(directory / "metrics.csv")["loss"]] == list(range(1, 10))
    assert len(read_hyperparameters(directory)) == 4


def test_logger_omitted_for_a_while_keeps_its_record(tmp_path):
    parts = [(4, lumen.TensorBoardLogger()), (8, True), (12, lumen.TensorBoardLogger())]
    for steps, logger in parts:
        directory = fit(tmp_path, max_steps=steps, max_epochs=None, resume="auto", logger=logger).run_directory
    assert [step for step, _ in read_scalars(directory)["loss"]] == [1, 2, 3, 4, 9, 10, 11, 12]
    assert [step for step, _ in read_table(directory / "metrics.csv")["loss"]] == list(range(1, 13))


def test_changed_hyperparameters_are_recorded_on_resume(tmp_path):
    for steps, rate in ((4, 0.01), (8, 0.02), (12, 0.02)):
        task = Regression(lr=rate, dropout=0.2)
        directory = fit(
            tmp_path, task, max_steps=steps, max_epochs=None, resume="auto", log_level="WARNING"
        ).run_directory
    (event,) = read_events(directory).Tensors("hyperparameters/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == "changed:\n\n* `model.lr`: 0.01 → 0.02"
    assert read_hyperparameters(directory)["model.lr"] == 0.01
    assert (directory / "run.log").read_text().count("model.lr was 0.01, is 0.02") == 1


def test_nested_event_files_are_truncated_too(tmp_path):
    class Own(lumen.Callback):
        def on_step_end(self, trainer, task):
            trainer.logger.experiment.add_scalars("pair", {"one": 1.0}, trainer.global_step)

    logger = {"logger": lumen.TensorBoardLogger()}
    fit(
        tmp_path,
        max_steps=5,
        max_epochs=None,
        callbacks=[Own(), lumen.ModelCheckpoint(every_n_train_steps=2)],
        **logger,
    )
    directory = tmp_path / "runs/run"
    newest = find_checkpoints(directory / "checkpoints")[-1]
    newest.rename(tmp_path / newest.name)
    fit(tmp_path, max_steps=9, max_epochs=None, callbacks=[Own()], resume="auto", **logger)
    found = EventAccumulator(str(directory / "tensorboard/pair_one"), purge_orphaned_data=False).Reload()
    assert [event.step for event in found.Scalars("pair")] == list(range(1, 10))
