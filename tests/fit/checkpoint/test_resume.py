"""Resumed runs: their checkpoint, their directory, and the reasons for a refusal."""

import json

import pytest
import torch

import lumen
from lumen.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.helpers.resume import Expanded, find_newest, fit_expanded
from tests.helpers.tasks import Regression, loader, quiet_trainer, weights


def fit(tmp_path, task=None, *, validate=True, **options):
    """Train a small regression; return its trainer and task."""
    task = task or Regression(dropout=0.2)
    options = {"max_epochs": 2, "log_every_n_steps": 1} | options
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(task, loader(), val_dataloaders=loader(20, shuffle=False) if validate else None)
    return trainer, task


def test_every_fit_gets_a_directory_of_its_own(tmp_path):
    assert [fit(tmp_path)[0].run_directory.name for _ in range(3)] == ["run", "run-2", "run-3"]


def test_extended_run_equals_uninterrupted_run(tmp_path):
    fit(tmp_path, max_epochs=2)
    _, resumed = fit(tmp_path, max_epochs=4, resume="auto")
    _, whole = fit(tmp_path / "whole", max_epochs=4)
    assert torch.equal(weights(resumed), weights(whole))
    files = [tmp_path / part / "runs/run/metrics.csv" for part in ("", "whole")]
    assert files[0].read_text() == files[1].read_text()


def test_run_resumes_inside_an_epoch(tmp_path):
    fit(tmp_path, max_steps=10, max_epochs=None)
    _, resumed = fit(tmp_path, max_steps=24, max_epochs=None, resume="auto")
    _, whole = fit(tmp_path / "whole", max_steps=24, max_epochs=None)
    assert torch.equal(weights(resumed), weights(whole))


def test_auto_resume_of_finished_run_trains_nothing(tmp_path, caplog):
    fit(tmp_path)
    task = Regression()
    trainer, _ = fit(tmp_path, task, resume="auto", log_level="INFO")
    assert "nothing to do" in (trainer.run_directory / "run.log").read_text()
    assert trainer.global_step == 14


class LogsAtTheEnd(Regression):
    def on_train_epoch_end(self):
        self.log("ends", 1.0)


def test_finished_run_ends_its_epoch_with_logs(tmp_path):
    for _ in range(2):
        trainer, _ = fit(tmp_path, LogsAtTheEnd(), max_steps=10, max_epochs=None, resume="auto")
        assert trainer.callback_metrics["ends"] == 1.0


class Other(Regression):
    pass


def test_second_fit_is_named_after_its_task(tmp_path):
    options = {"log_level": "ERROR", "enable_progress_bar": False}
    trainer = lumen.Trainer(default_root_dir=tmp_path, max_epochs=1, resume="auto", **options)
    for kind in (Regression, Other):
        trainer.fit(kind(), loader())
        assert trainer.run_directory.name == kind.__name__.lower()
        assert trainer.global_step == 7


def test_own_entries_of_a_checkpoint_are_refused(tmp_path):
    trainer, _ = fit(tmp_path, max_epochs=1)
    with pytest.raises(CheckpointError, match="info has the entry 'step', which Lumen writes"):
        trainer.save_checkpoint(tmp_path / "mine", info={"step": "final"})


def test_a_run_stopped_early_is_finished(tmp_path):
    stopping = {"callbacks": [lumen.EarlyStopping("val_loss", patience=0, min_delta=100.0)], "max_epochs": 9}
    first, _ = fit(tmp_path, **stopping)
    again, _ = fit(tmp_path, resume="auto", log_level="INFO", **stopping)
    assert first.global_step == again.global_step < 9 * 7
    assert "stopped early" in (again.run_directory / "run.log").read_text()


def test_best_and_a_path_start_a_new_directory(tmp_path):
    saving = {
        "callbacks": [lumen.ModelCheckpoint(monitor="val_loss", every_n_train_steps=5, every_n_epochs=1, keep_last=-1)]
    }
    first, _ = fit(tmp_path, **saving)
    before = sorted(first.run_directory.rglob("*"))
    middle = first.run_directory / "checkpoints" / "step-00000005"
    from_best, _ = fit(tmp_path, resume="best", max_epochs=3)
    from_path, task = fit(tmp_path, resume=middle, max_epochs=2)
    assert (from_best.run_directory.name, from_path.run_directory.name) == ("run-2", "run-3")
    assert sorted(first.run_directory.rglob("*")) == before
    _, whole = fit(tmp_path / "whole")
    assert torch.equal(weights(task), weights(whole))


def test_another_seed_on_resume_is_an_error(tmp_path):
    fit(tmp_path, seed=3)
    with pytest.raises(ConfigError, match="seed: 4 is not the seed 3"):
        fit(tmp_path, resume="auto", seed=4)
    trainer, _ = fit(tmp_path, resume="auto", seed=None, max_epochs=3)
    assert trainer.run.seed == 3


def test_state_json_is_json_and_nothing_is_pickled(tmp_path):
    fit(tmp_path)
    files = [path for path in find_newest(tmp_path).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert json.loads((find_newest(tmp_path) / "state.json").read_text())


def test_frozen_and_eval_state_survive_resume(tmp_path):
    class Unfreezing(Regression):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)
                self.net[2].eval()

    def fit(name, **options):
        task, saver = Unfreezing(), lumen.ModelCheckpoint(every_n_train_steps=1)
        trainer = quiet_trainer(tmp_path / name, resume="auto", callbacks=[saver], **{"max_epochs": 3} | options)
        trainer.fit(task, loader())
        return {key: value.tolist() for key, value in task.state_dict().items()}

    fit("stopped", max_steps=9)
    assert fit("stopped") == fit("whole")


def test_expanded_buffers_are_loaded_as_what_they_are(tmp_path):
    fit_expanded(tmp_path)
    task = Expanded.load_from_checkpoint(find_newest(tmp_path / "whole"))
    assert task.rows[:, 4].tolist() == task.part[:, 0].tolist() == [9.0, 10.0, 11.0]


def test_expanded_buffer_rejects_distinct_values(tmp_path):
    class Whole(Expanded):
        def __init__(self):
            super().__init__()
            self.rows = torch.arange(15.0).reshape(3, 5)

    quiet_trainer(tmp_path, max_steps=2).fit(Whole(), loader(dtype=torch.float64))
    with pytest.raises(CheckpointMismatch, match=r"model/rows has different values .* Register the tensor with clone"):
        quiet_trainer(tmp_path, max_steps=4, resume="auto").fit(Expanded(), loader(dtype=torch.float64))
