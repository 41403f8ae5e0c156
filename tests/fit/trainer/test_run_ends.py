"""End of a run, and interruptions near it: in the middle of a step, an epoch or a validation."""

import io
import math
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torchmetrics import MeanSquaredError

import lumen
import lumen.console
from lumen.cli import main
from lumen.errors import ConfigError, RunDirectoryError
from tests.helpers.ending_run import HOOKS, KINDS, Ended, read_final_state, train_run
from tests.helpers.run_ends import list_checkpoints
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, loader, quiet_trainer
from tests.helpers.working_directory import LINE


class Logging(Regression):
    """Task that logs an epoch's value and a metric object in a validation, at whose end it may send itself a signal."""

    def __init__(self, stop_in_validation_of=None):
        super().__init__()
        self.error = MeanSquaredError()
        self.stop_in_validation_of = stop_in_validation_of

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch)
        self.error.update(self(batch[0]), batch[1])
        if self.global_step == self.stop_in_validation_of and batch_idx == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def on_validation_epoch_end(self):
        self.log("val_error", self.error)


def fit(tmp_path, task=None, **options):
    trainer = quiet_trainer(tmp_path, **{"log_every_n_steps": 1, "resume": "auto", **options})
    trainer.fit(task or Logging(), loader(40, 8), val_dataloaders=loader(20, 8, shuffle=False))
    return trainer


def rows(tmp_path):
    return read_rows(tmp_path / "runs/run/metrics.csv")


def test_repeated_run_keeps_its_last_row(tmp_path):
    fit(tmp_path, max_steps=7)
    before = rows(tmp_path)
    assert before[-1]["epoch_loss"]
    fit(tmp_path, max_steps=7)
    assert rows(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_started_again_ends_alike(tmp_path, kind):
    ended = read_final_state(*train_run(tmp_path, kind))
    for _ in range(2):
        trainer, task, called = train_run(tmp_path, kind)
        assert called == [name for name in HOOKS if name != "on_train_epoch_end" or trainer.progress.in_epoch]
        assert read_final_state(trainer, task, called) == ended


@pytest.mark.parametrize("is_new", [False, True], ids=["same task", "new task"])
@pytest.mark.parametrize("kind", ["plain", "average", "mean", "middle of an epoch", "stopped early", "by hand"])
def test_a_second_fit_of_a_trainer_ends_alike(tmp_path, kind, is_new):
    trainer, task, called = train_run(tmp_path, kind)
    ended = read_final_state(trainer, task, called)
    called.clear()
    task = Ended(by_hand=kind == "by hand") if is_new else task
    trainer.fit(task, loader(32, 8), val_dataloaders=loader(16, shuffle=False))
    assert read_final_state(trainer, task, called) == ended


def test_kills_between_two_last_saves_are_mended(tmp_path):
    def begin_again():
        savers = [lumen.ModelCheckpoint(tmp_path / part, monitor="val_loss") for part in "ab"]
        fit(tmp_path, max_epochs=2, callbacks=savers)
        return [(sorted(saver.dirpath.iterdir()), saver.best_model_path, saver.best_k_models) for saver in savers]

    ended = begin_again()
    assert ended[1][1] == str(tmp_path / "b/step-00000010")
    shutil.rmtree(ended[1][1])  # as if the kill had come before the save
    assert begin_again() == ended


def test_runs_from_finished_checkpoints_end_in_new_directories(tmp_path):
    first, task, _ = train_run(tmp_path, "average")
    again = lumen.EMA(0.8)
    trainer = fit(
        tmp_path, copy := Ended(), resume=first.checkpoint_callback.last_model_path, max_epochs=2, callbacks=[again]
    )
    assert all(map(torch.equal, task.state_dict().values(), copy.state_dict().values()))
    assert list_checkpoints(tmp_path) == ["step-00000008"]
    assert trainer.callback_metrics == first.callback_metrics


@pytest.mark.parametrize("last", [5, 7], ids=["at an epoch's end", "inside an epoch"])
def test_stop_in_last_validation_repeats_it_on_resume(tmp_path, last):
    whole = fit(tmp_path / "whole", max_steps=last, val_check_interval=last)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Logging(stop_in_validation_of=last), max_steps=last, val_check_interval=last)
    assert list_checkpoints(tmp_path)[-1] == f"step-{last:08d}-validating"
    resumed = fit(tmp_path, max_steps=last, val_check_interval=last)
    assert rows(tmp_path) == rows(tmp_path / "whole")
    assert resumed.callback_metrics["val_error"] == whole.callback_metrics["val_error"]
    assert list_checkpoints(tmp_path)[-1] == f"step-{last:08d}"
    assert not list((tmp_path / "runs/run/checkpoints").glob("*damaged*"))


def test_monitor_is_not_missing_before_first_validation(tmp_path):
    monitors = [lumen.EarlyStopping("val_loss", patience=9), lumen.ModelCheckpoint(monitor="val_loss")]
    fit(tmp_path, max_steps=12, check_val_every_n_epoch=2, callbacks=monitors)
    assert monitors[1].best_model_path.endswith("step-00000010")
    saving = lumen.ModelCheckpoint(monitor="epoch_loss")
    fit(tmp_path / "b", max_steps=4, val_check_interval=3, callbacks=[saving])
    assert list_checkpoints(tmp_path / "b") == ["step-00000004"]


@pytest.mark.parametrize("callback", [lumen.EarlyStopping, lumen.ModelCheckpoint])
def test_misspelled_monitor_raises_without_validation_too(tmp_path, callback):
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=[callback(monitor="los")])
    with pytest.raises(ConfigError, match="'los' was never logged"):
        trainer.fit(Logging(), loader())
    assert list_checkpoints(tmp_path)[-1] == "step-00000007"


def test_epoch_with_skipped_last_update_is_saved(tmp_path):
    class SkipsTheLast(Regression):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 4 else super().training_step(batch)

    saving = [lumen.ModelCheckpoint(every_n_train_steps=4, keep_last=-1)]
    fit(tmp_path, SkipsTheLast(), max_epochs=1, callbacks=saving, log_level="CRITICAL")
    assert list_checkpoints(tmp_path) == ["step-00000004", "step-00000004-1"]
    assert fit(tmp_path, SkipsTheLast(), max_epochs=1).current_epoch == 1


class Impatient(io.StringIO):
    """Terminal whose user presses Ctrl-C again while Lumen prints the answer to the first one."""

    def write(self, text):
        written = super().write(text)
        if "a second signal stops at once" in text and self.getvalue().count("a second signal") == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return written


class Pressed(Regression):
    def training_step(self, batch):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch)


def test_second_interrupt_during_message_stops_after_it(tmp_path, monkeypatch):
    """No message is printed twice."""
    assert lumen.console.console is not None  # the handler of rich, as with a progress bar
    terminal = Impatient()
    monkeypatch.setattr(sys, "stderr", terminal)
    task = Pressed()
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(tmp_path, max_steps=9, log_level="INFO").fit(task, loader())
    assert terminal.getvalue().splitlines()[-2:] == [
        "SIGINT: finishing this step; a second signal stops at once",
        "stopped at once: SIGINT",
    ]
    assert terminal.getvalue().count("SIGINT") == 2
    assert task.global_step == 2


class Slow(io.StringIO):
    """Terminal whose user presses Ctrl-C twice more before Lumen has printed the answer to the first one."""

    presses, answered = 0, False

    def write(self, text):
        if "a second signal stops at once" in text and self.presses == 0:
            for self.presses in (1, 2):
                os.kill(os.getpid(), signal.SIGINT)
            self.answered = True
        return super().write(text)


def test_third_interrupt_stops_at_once(tmp_path, monkeypatch):
    terminal = Slow()
    monkeypatch.setattr(sys, "stderr", terminal)
    task, before = Pressed(), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        quiet_trainer(tmp_path, max_steps=9, log_level="INFO").fit(task, loader())
    assert (terminal.presses, terminal.answered, task.global_step) == (2, False, 2)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped at once: SIGINT" in (tmp_path / "runs/run/run.log").read_text()


def test_fast_dev_run_touches_no_run_directory(tmp_path):
    fit(tmp_path, max_steps=2)
    before = sorted(tmp_path.rglob("*"))
    fit(tmp_path, fast_dev_run=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_trainer_has_no_training_outside_fit(tmp_path):
    trainer = quiet_trainer(tmp_path)
    for _ in range(2):
        assert (trainer.optimizers, trainer.lr_scheduler_configs, trainer.datamodule) == ([], [], None)
        assert (trainer.num_training_batches, trainer.is_last_batch) == (math.inf, False)
        trainer.validate(Regression(), loader())
    with pytest.raises(ConfigError, match="during fit"):
        trainer.save_checkpoint(tmp_path / "c")


def test_a_sparse_buffer_is_refused_before_training(tmp_path):
    task = Regression()
    task.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(lumen.LumenError, match="sparse"):
        fit(tmp_path, task, max_steps=1)


# ---------------------------------------------------------------------- a removed directory


def replace(directory):
    directory.rename(directory.with_name("elsewhere"))
    (directory / "checkpoints").mkdir(parents=True)
    (directory / ".lock").write_text("{}")


@pytest.mark.parametrize("act", [shutil.rmtree, replace, lambda directory: (directory / ".lock").unlink()])
@pytest.mark.parametrize("options", [{"enable_checkpointing": False}, {}], ids=["records alone", "checkpoints"])
@pytest.mark.parametrize("log_every_n_steps", [1, 50])
def test_run_with_removed_or_replaced_directory_fails(tmp_path, caplog, act, options, log_every_n_steps):
    def at_the_third_step(trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            act(trainer.run_directory)

    options |= {"callbacks": [lumen.LambdaCallback(on_train_batch_end=at_the_third_step)]}
    with pytest.raises(RunDirectoryError, match=r"was (removed.*[Ss]tart the run again|moved to .*resume the run)"):
        fit(tmp_path, Regression(), max_steps=6, log_every_n_steps=log_every_n_steps, **options)
    assert "finished" not in caplog.text


def test_a_moved_directory_is_named_with_its_place(tmp_path):
    def move(trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.run_directory.rename(tmp_path / "elsewhere")

    moved = {"callbacks": [lumen.LambdaCallback(on_train_batch_end=move)], "max_steps": 3}
    with pytest.raises(RunDirectoryError, match=r"runs/run was moved to .*/elsewhere while.*Move the directory back"):
        fit(tmp_path, Regression(), **moved)
    (tmp_path / "elsewhere").rename(tmp_path / "runs/run")
    assert fit(tmp_path, Regression(), max_steps=3).global_step == 3


def test_removed_checkpoints_are_noticed_and_new_ones_saved(tmp_path, caplog):
    def remove(trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            shutil.rmtree(trainer.run_directory / "checkpoints")

    saver = lumen.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    removing = lumen.LambdaCallback(on_train_batch_end=remove)
    trainer = fit(tmp_path, Regression(), max_steps=6, callbacks=[removing, saver], log_level="WARNING")
    told = [record.message for record in caplog.records if "checkpoints was removed during the run" in record.message]
    assert len(told) == 1
    names = {path.name for path in (trainer.run_directory / "checkpoints").iterdir()}
    assert names == {"step-00000004", "step-00000006"}


class Full(lumen.Callback):
    """Callback that makes the disk refuse a file of several hundred bytes, from the beginning of `setup` on."""

    def setup(self, trainer, task, stage):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("name", ["environment.json", "script.yaml", "config.yaml"])
def test_full_disks_name_the_path(tmp_path, name, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("line.yaml").write_text(LINE)
    full = f"{Full.__module__}.Full"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if name == "config.yaml":
            assert main(["fit", "--config", "line.yaml", "--trainer.callbacks.full", full]) == 1
            said = capsys.readouterr().err
        else:
            if name == "environment.json":
                Full().setup(None, None, "fit")
            with pytest.raises(RunDirectoryError) as caught:
                fit(tmp_path, Regression(), max_steps=1, callbacks=[Full()])
            said = str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        f"/{name} cannot be written: File too large. Check the permissions and the disk, then resume the run." in said
    )


def test_unwritable_record_is_one_named_error(tmp_path):
    def obstruct(trainer, task):
        (tmp_path / "runs/run/metrics.csv").mkdir()

    with pytest.raises(RunDirectoryError, match=r"metrics\.csv cannot be written: Is a directory.*resume the run"):
        fit(tmp_path, max_steps=2, callbacks=[lumen.LambdaCallback(on_train_start=obstruct)])


def test_unwritable_log_warns_once_and_training_continues(tmp_path, capfd):
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    (run / "run.log").symlink_to("/dev/full")
    trainer = quiet_trainer(tmp_path, max_steps=3, resume="auto", log_level="INFO")
    trainer.fit(Regression(), loader())
    assert trainer.global_step == 3
    told = [line for line in capfd.readouterr().err.splitlines() if "cannot write" in line]
    assert told == [f"warning: cannot write {run / 'run.log'}: [Errno 28] No space left on device"]
