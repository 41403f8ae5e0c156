"""ModelCheckpoint: when it saves, which checkpoints it keeps, and where."""

import logging
import math
import shutil
import signal
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.checkpoint.format.folder import read_info
from lumen.errors import CheckpointError, ConfigError, TrainingError
from tests.helpers.scripted_values import Scripted, fit_scripted
from tests.helpers.tasks import Regression, loader, quiet_trainer


def list_checkpoints(tmp_path, name="run"):
    return [path.name for path in sorted((tmp_path / "runs" / name / "checkpoints").iterdir())]


def list_steps(tmp_path, name="run"):
    """Return the steps of all checkpoints; any other file in their folder is an error."""
    found = list_checkpoints(tmp_path, name)
    assert found == [path.name for path in find_checkpoints(tmp_path / "runs" / name / "checkpoints")]
    return [int(each[5:]) for each in found]


# ---------------------------------------------------------------------- when and which


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 12]),
        ({"keep_last": 1}, [12]),
        ({"keep_last": -1}, [2, 4, 6, 8, 10, 12]),
        ({"keep_last": 3, "every_n_epochs": 2}, [4, 8, 12]),
        ({"every_n_train_steps": 5}, [10, 12]),
        ({"every_n_train_steps": 5, "at_end": False}, [5, 10]),
        ({"every_n_train_steps": 5, "keep_last": -1}, [5, 10, 12]),
        ({"every_n_train_steps": 5, "every_n_epochs": 2, "keep_last": -1}, [4, 5, 8, 10, 12]),
        ({"every_n_train_steps": 0, "keep_last": -1}, [12]),
        ({"train_time_interval": "01:00:00", "keep_last": -1}, [12]),
        ({"keep_every_n_steps": 4}, [4, 8, 10, 12]),
        ({"every_n_epochs": 0}, [12]),
        ({"every_n_epochs": 0, "at_end": False}, []),
        ({"monitor": "score"}, [6, 10, 12]),
        ({"monitor": "score", "save_top_k": 2}, [6, 8, 10, 12]),
        ({"monitor": "score", "save_top_k": 0}, [10, 12]),
        ({"monitor": "score", "save_top_k": -1}, [2, 4, 6, 8, 10, 12]),
        ({"monitor": "score", "save_top_k": 3, "keep_last": 0, "at_end": False}, [4, 6, 8, 12]),
        ({"monitor": "score", "mode": "max", "keep_last": 1}, [2, 12]),
        ({"monitor": "score", "every_n_epochs": 0}, [6, 12]),
        ({"monitor": "score", "every_n_epochs": 0, "on_best": False}, [12]),
    ],
)
def test_exactly_the_expected_checkpoints_are_kept(tmp_path, options, kept):
    fit_scripted(tmp_path, [9, 5, 1, 2, 8, 7], [lumen.ModelCheckpoint(**options)])
    assert list_steps(tmp_path) == kept


class Counting(Regression):
    """Task that counts steps and requests a stop at one of them."""

    def __init__(self, stops_at):
        super().__init__()
        self.stops_at = stops_at
        self.register_buffer("boundaries", torch.tensor(0))

    def on_step_end(self):
        self.boundaries += 1
        self.trainer.should_stop = self.global_step == self.stops_at


def test_checkpoint_includes_task_changes_at_its_boundary(tmp_path):
    resume = None
    for name, stops_at in (("run", 3), ("run-2", 5)):
        task = Counting(stops_at)
        quiet_trainer(tmp_path, max_epochs=1, resume=resume).fit(task, loader())
        assert task.boundaries == stops_at
        assert list_steps(tmp_path, name) == [stops_at]  # the run ends at the step of the stop
        resume = tmp_path / "runs" / name


class Interrupted(Counting):
    """Task that requests a stop in the middle of the validation after an epoch."""

    def validation_step(self, batch):
        super().validation_step(batch)
        if self.stops_at is None:
            signal.raise_signal(signal.SIGINT)


def test_stop_during_validation_leaves_boundary_to_resumed_run(tmp_path):
    counts = []
    for stops_at in (None, 8):
        task = Interrupted(stops_at)
        trainer = quiet_trainer(tmp_path, max_epochs=2, resume="auto", num_sanity_val_steps=0)
        with pytest.raises(KeyboardInterrupt) if stops_at is None else nullcontext():
            trainer.fit(task, loader(32), val_dataloaders=loader(16))
        counts.append(int(task.boundaries))
    assert counts == [3, 8]


def test_stopping_in_on_step_checkpoint_raises(tmp_path):
    stop = lumen.LambdaCallback(on_step_checkpoint=lambda trainer, task: setattr(trainer, "should_stop", True))
    with pytest.raises(TrainingError, match="Set it in on_step_end"):
        quiet_trainer(tmp_path, max_epochs=1, callbacks=[stop]).fit(Regression(), loader())
    assert not list_checkpoints(tmp_path)


def test_the_interval_counts_from_the_last_save(tmp_path):
    fit_scripted(tmp_path, [1, 2], [lumen.ModelCheckpoint(train_time_interval=timedelta(microseconds=1), keep_last=-1)])
    assert list_steps(tmp_path) == [1, 2, 3, 4]


def test_several_savers_each_keep_what_they_say(tmp_path):
    saving = [
        lumen.ModelCheckpoint(monitor="score", every_n_epochs=0, at_end=False, keep_last=0),
        lumen.ModelCheckpoint(monitor="score", mode="max", every_n_epochs=0, at_end=False, keep_last=0),
        lumen.ModelCheckpoint(every_n_train_steps=5, keep_last=1, at_end=False),
    ]
    fit_scripted(tmp_path, [9, 5, 1, 2, 8, 7], saving)
    assert list_steps(tmp_path) == [2, 6, 10]


def test_a_step_with_several_reasons_is_saved_once(tmp_path):
    written = []

    class Watching(lumen.Callback):
        def on_step_end(self, trainer, task):
            folder = trainer.run_directory / "checkpoints"
            written.append({path: (path / "manifest.json").stat().st_ino for path in find_checkpoints(folder)})

    saving = [
        lumen.ModelCheckpoint(monitor="score", every_n_train_steps=1, every_n_epochs=1, keep_last=-1),
        lumen.ModelCheckpoint(every_n_epochs=1, keep_last=-1),
    ]
    fit_scripted(tmp_path, [3, 2, 1], [Watching(), *saving])
    assert list_steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    for before, after in pairwise(written):
        assert before.items() <= after.items()


def test_nan_first_score_allows_a_later_best(tmp_path):
    saving = lumen.ModelCheckpoint(monitor="score", keep_last=1)
    fit_scripted(tmp_path, [math.nan, 3, 5], [saving])
    assert saving.best_model_score == 3
    assert saving.best_model_path.endswith("step-00000004")
    assert saving.last_model_path.endswith("step-00000006")
    assert read_info(tmp_path / "runs/run/checkpoints/step-00000006")["best"] == "step-00000004"


def test_the_callback_knows_its_best_checkpoints(tmp_path):
    saving = lumen.ModelCheckpoint(monitor="score", save_top_k=3)
    assert (saving.best_model_path, saving.kth_best_model_path, saving.last_model_path) == ("", "", "")
    assert saving.best_model_score is saving.current_score is None
    assert saving.best_k_models == {}
    folder = tmp_path / "runs/run/checkpoints"
    fit_scripted(tmp_path, [9, 5, 1, 2, 8, 7], [saving])
    assert saving.best_k_models == {
        str(folder / "step-00000006"): 1.0,
        str(folder / "step-00000008"): 2.0,
        str(folder / "step-00000004"): 5.0,
    }
    assert saving.kth_best_model_path == str(folder / "step-00000004")
    assert (saving.best_model_path, saving.best_model_score) == (str(folder / "step-00000006"), 1.0)
    assert saving.current_score == 7.0


# ---------------------------------------------------------------------- where


def test_without_monitor_best_checkpoint_is_the_newest(tmp_path):
    plain = lumen.ModelCheckpoint(every_n_epochs=2)
    assert plain.best_model_path == ""
    seen = []
    watch = lumen.LambdaCallback(on_train_epoch_start=lambda trainer, task: seen.append(plain.best_model_path[-2:]))
    trainer = fit_scripted(tmp_path, [9, 5, 1, 2], [watch, plain])
    assert seen == ["", "", "04", "04"]
    assert plain.best_model_path == plain.last_model_path == str(tmp_path / "runs/run/checkpoints/step-00000008")
    assert (plain.best_model_score, plain.best_k_models, plain.kth_best_model_path) == (None, {}, "")
    with pytest.raises(CheckpointError, match=r"no checkpoint is recorded as best.* use last or a path"):
        trainer.validate(ckpt_path="best")
    assert Checkpoint.open(Path(plain.best_model_path)).info["step"] == 8


def test_checkpoints_can_lie_elsewhere(tmp_path):
    fit_scripted(tmp_path, [1, 2], [lumen.ModelCheckpoint(dirpath=tmp_path / "elsewhere")])
    assert [path.name for path in find_checkpoints(tmp_path / "elsewhere")] == ["step-00000002", "step-00000004"]


def test_run_resumes_from_external_checkpoint_directory(tmp_path):
    def elsewhere():
        return [lumen.ModelCheckpoint(dirpath=tmp_path / "elsewhere")]

    fit_scripted(tmp_path, [1, 2], elsewhere())
    trainer = fit_scripted(tmp_path, [1, 2, 3], elsewhere(), resume="auto")
    assert trainer.global_step == 6
    rows = (tmp_path / "runs/run/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3


def test_run_resumes_after_a_change_of_dirpath(tmp_path):
    fit_scripted(tmp_path, [1, 2], [lumen.ModelCheckpoint()])
    trainer = fit_scripted(tmp_path, [1, 2, 3], [lumen.ModelCheckpoint(tmp_path / "elsewhere")], resume="auto")
    assert (trainer.ckpt_path, trainer.global_step) == (str(tmp_path / "runs/run/checkpoints/step-00000004"), 6)
    rows = (tmp_path / "runs/run/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    assert list_steps(tmp_path) == [2, 4]
    assert [path.name for path in find_checkpoints(tmp_path / "elsewhere")] == ["step-00000006"]


def test_run_keeps_out_of_a_running_ones_dirpath(tmp_path):
    """The other run has not saved yet. A run that has ended without a checkpoint does not keep a directory."""
    inner = []

    class Nesting(lumen.Callback):
        def on_train_start(self, trainer, task):
            inner.append(fit_scripted(tmp_path, [1], [lumen.ModelCheckpoint(tmp_path / "kept")], max_epochs=1))

    fit_scripted(tmp_path, [1, 2], [lumen.ModelCheckpoint(tmp_path / "kept", keep_last=-1), Nesting()])
    names = {name: [path.name for path in find_checkpoints(tmp_path / name)] for name in ("kept", "kept-2")}
    assert names == {"kept": ["step-00000002", "step-00000004"], "kept-2": ["step-00000002"]}
    for checkpoint in find_checkpoints(tmp_path / "kept"):
        shutil.rmtree(checkpoint)
    third = fit_scripted(tmp_path, [1], [lumen.ModelCheckpoint(tmp_path / "kept")])
    assert third.checkpoint_callback.dirpath == tmp_path / "kept"


def test_second_run_keeps_checkpoints_of_the_first(tmp_path, caplog):
    def elsewhere():
        return [lumen.ModelCheckpoint(dirpath=tmp_path / "kept", monitor="score")]

    fit_scripted(tmp_path, [1, 2], elsewhere())
    with caplog.at_level("WARNING", "lumen"):
        second = fit_scripted(tmp_path, [1], elsewhere(), log_level="WARNING")
    assert "kept belongs to a different run: this run saves in" in caplog.text
    assert second.checkpoint_callback.best_model_path == str(tmp_path / "kept-2/step-00000002")
    (tmp_path / "runs/run").rename(tmp_path / "runs/first")
    second.run_directory.rename(tmp_path / "runs/run")
    resumed = fit_scripted(tmp_path, [1, 2, 3], elsewhere(), resume="auto")
    assert (resumed.ckpt_path, resumed.global_step) == (str(tmp_path / "kept-2/step-00000002"), 6)
    (tmp_path / "runs/run").rename(tmp_path / "runs/second")
    (tmp_path / "runs/first").rename(tmp_path / "runs/run")
    first = fit_scripted(tmp_path, [1, 2, 3], elsewhere(), resume="auto")
    assert (first.ckpt_path, first.global_step) == (str(tmp_path / "kept/step-00000004"), 6)


def test_reused_trainer_saves_each_run_separately(tmp_path):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    for _ in range(2):
        trainer.fit(Scripted([1]), data)
    assert list_steps(tmp_path, "run") == list_steps(tmp_path, "run-2") == [2]


@pytest.mark.parametrize("dirpath", [None, "elsewhere"])
def test_trainers_sharing_a_callback_find_their_own_best(tmp_path, dirpath):
    saver = lumen.ModelCheckpoint(None if dirpath is None else tmp_path / dirpath, monitor="score")
    first = fit_scripted(tmp_path / "first", [5, 1, 2, 0], [saver], max_epochs=3)
    second = fit_scripted(tmp_path / "second", [1, 2, 3, 0], [saver], max_epochs=3)
    for trainer, step in ((first, 4), (second, 2)):
        for ckpt_path in ("best", None):
            trainer.validate(dataloaders=DataLoader(TensorDataset(torch.arange(4.0)), 2), ckpt_path=ckpt_path)
            assert Path(trainer.ckpt_path).name == f"step-{step:08d}"


# ---------------------------------------------------------------------- resumed runs


def test_resumed_run_ranks_old_and_new_checkpoints(tmp_path):
    def saving():
        return lumen.ModelCheckpoint(monitor="score", save_top_k=2, keep_last=1)

    values = [9, 1, 2, 8, 3, 7]
    fit_scripted(tmp_path, values, [saving()], max_epochs=3)
    assert list_steps(tmp_path) == [4, 6]
    resumed = saving()
    fit_scripted(tmp_path, values, [resumed], resume="auto")
    assert list_steps(tmp_path) == [4, 6, 12]
    assert list(resumed.best_k_models.values()) == [1.0, 2.0]


def test_new_run_from_checkpoint_keeps_the_old_run(tmp_path):
    fit_scripted(tmp_path, [3, 2, 1], [lumen.ModelCheckpoint(keep_last=-1)])
    before = {path: path.read_bytes() for path in (tmp_path / "runs/run").rglob("*") if path.is_file()}
    source = tmp_path / "runs/run/checkpoints/step-00000002"
    fit_scripted(
        tmp_path, [3, 2, 1], [lumen.ModelCheckpoint(monitor="score", keep_last=1, save_top_k=0)], resume=source
    )
    assert list_steps(tmp_path, "run-2") == [6]
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs/run").rglob("*") if path.is_file()}


def test_resume_source_is_kept_until_a_newer_commit(tmp_path):
    fit_scripted(tmp_path, [3, 2], [lumen.ModelCheckpoint()], max_epochs=1)

    class Fails(Scripted):
        def training_step(self, batch):
            raise RuntimeError("on purpose")

    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, callbacks=[lumen.ModelCheckpoint(keep_last=0)], max_epochs=2, resume="auto")
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Fails([3, 2]), data)
    assert list_steps(tmp_path) == [2]


def test_a_best_checkpoint_that_somebody_removed_is_forgotten(tmp_path):
    fit_scripted(tmp_path, [1, 2, 3, 4], [lumen.ModelCheckpoint(monitor="score")], max_epochs=3)
    shutil.rmtree(tmp_path / "runs/run/checkpoints/step-00000002")
    resumed = lumen.ModelCheckpoint(monitor="score")
    fit_scripted(tmp_path, [1, 2, 3, 4], [resumed], resume="auto")
    assert resumed.best_model_score == 2.0


def test_callback_missing_on_resume_is_named(tmp_path, caplog):
    fit_scripted(tmp_path, [3, 2, 1], [lumen.EarlyStopping("score")], max_epochs=2)
    with caplog.at_level(logging.WARNING, "lumen"):
        fit_scripted(tmp_path, [3, 2, 1], [], resume="auto", log_level="WARNING")
    assert "holds the state of EarlyStopping{'monitor': 'score', 'mode': 'min'}, which this run does not" in caplog.text


def test_the_checkpoint_callback_runs_after_all_others(tmp_path):
    class Late(lumen.Callback):
        calls = 0

        def on_step_end(self, trainer, task):
            self.calls += 1

        def state_dict(self):
            return {"calls": self.calls}

    trainer = fit_scripted(tmp_path, [1, 2], [lumen.ModelCheckpoint(), Late()])
    assert type(trainer.callbacks[-1]) is lumen.ModelCheckpoint
    state = Checkpoint.open(tmp_path / "runs/run/checkpoints/step-00000004").state
    assert "calls" in str(state["callbacks"])


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "up"}, "ModelCheckpoint: mode: expected 'min' or 'max', found 'up'"),
        ({"every_n_train_steps": -1}, "every_n_train_steps must be at least 0, found -1"),
        ({"keep_every_n_steps": 0}, "keep_every_n_steps must be at least 1"),
        ({"keep_last": -2}, "keep_last must be at least -1"),
        ({"save_top_k": 3}, "save_top_k=3 needs a monitor"),
        ({"train_time_interval": 10}, "train_time_interval: expected a string, a timedelta"),
        ({"save_last": True, "keep_last": 0}, "save_last=True and keep_last=0 contradict each other"),
        ({"every_n_steps": 3}, "no argument every_n_steps. Did you mean .*every_n_train_steps"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        lumen.ModelCheckpoint(**options)


def test_model_checkpoint_contradicts_enable_checkpointing_false():
    with pytest.raises(ConfigError, match="Remove one"):
        lumen.Trainer(callbacks=[lumen.ModelCheckpoint()], enable_checkpointing=False)
