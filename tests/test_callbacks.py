"""Early stopping, and the three questions of checkpoints: when, which, where."""

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.checkpoint.folder import read_info
from lumen.errors import ConfigError
from tests.tasks import Regression, loader, quiet_trainer


class Scripted(lumen.TaskModule):
    """Logs a given sequence of validation values, one per epoch of two steps."""

    def __init__(self, values):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.values = values

    def training_step(self, batch):
        return (self.weight - batch[0]).pow(2).mean()

    def validation_step(self, batch):
        if not self.trainer.sanity_checking:
            self.log("score", self.values[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, values, callbacks, **options):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, **{"max_epochs": len(values), **options})
    trainer.fit(Scripted(values), data, val_dataloaders=data)
    return trainer


def steps(tmp_path, name="run"):
    return [int(path.name[5:]) for path in find_checkpoints(tmp_path / "runs" / name / "checkpoints")]


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([5, 4, 4.5, 4.2, 1, 1], {"patience": 2}, 4),
        ([5, 4, 3, 2, 1, 0], {"patience": 1}, 6),
        ([1, 2, 3, 3, 3, 9], {"mode": "max", "patience": 2}, 5),
        ([5, 4.95, 4.9, 4.85, 1, 1], {"min_delta": 0.5, "patience": 3}, 4),
        ([5, math.nan, 1, 1, 1, 1], {}, 2),
        ([5, math.nan, 1, 1, 1, 1], {"check_finite": False, "patience": 5}, 6),
        ([5, 3, 1, 1, 1, 1], {"stopping_threshold": 4.0}, 2),
        ([5, 30, 1, 1, 1, 1], {"divergence_threshold": 20.0}, 2),
    ],
)
def test_early_stopping_stops_at_the_right_epoch(tmp_path, values, options, epochs):
    trainer = fit(tmp_path, values, [lumen.EarlyStopping("score", **options)])
    assert trainer.current_epoch == epochs


def test_minimum_epochs_delay_early_stopping(tmp_path):
    trainer = fit(tmp_path, [1, 2, 3, 4, 5, 6], [lumen.EarlyStopping("score", patience=1)], min_epochs=5)
    assert trainer.current_epoch == 5


@pytest.mark.parametrize("callback", [lumen.EarlyStopping("scroe"), lumen.ModelCheckpoint("scroe")])
def test_a_monitor_never_logged_is_an_error_that_names_what_was(tmp_path, callback):
    with pytest.raises(ConfigError, match="'scroe' was never logged; logged so far: score"):
        fit(tmp_path, [1, 2], [callback])


def test_a_training_value_can_be_monitored(tmp_path):
    class Logging(Regression):
        def training_step(self, batch):
            loss = super().training_step(batch)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

    stopping = lumen.EarlyStopping("epoch_loss", patience=0, min_delta=1e9)
    trainer = quiet_trainer(tmp_path, max_epochs=9, callbacks=[stopping])
    trainer.fit(Logging(), loader())
    assert trainer.current_epoch == 2


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [10, 12]),
        ({"keep_last": 1}, [12]),
        ({"keep_last": -1}, [2, 4, 6, 8, 10, 12]),
        ({"keep_last": 3, "every_n_epochs": 2}, [4, 8, 12]),
        ({"every_n_steps": 5, "every_n_epochs": 0}, [10, 12]),
        ({"every_n_steps": 5, "every_n_epochs": 0, "at_end": False}, [5, 10]),
        ({"keep_every_n_steps": 4}, [4, 8, 10, 12]),
        ({"every_n_epochs": 0}, [12]),
        ({"monitor": "score"}, [6, 10, 12]),
        ({"monitor": "score", "keep_best": 2}, [6, 8, 10, 12]),
        ({"monitor": "score", "mode": "max", "keep_last": 1}, [2, 12]),
        ({"monitor": "score", "every_n_epochs": 0}, [6, 12]),
        ({"monitor": "score", "every_n_epochs": 0, "on_best": False}, [12]),
    ],
)
def test_exactly_the_expected_checkpoints_are_kept(tmp_path, options, kept):
    fit(tmp_path, [9, 5, 1, 2, 8, 7], [lumen.ModelCheckpoint(**options)])
    assert steps(tmp_path) == kept


def test_a_nan_first_score_does_not_block_a_later_best(tmp_path):
    saving = lumen.ModelCheckpoint("score", keep_last=1)
    fit(tmp_path, [math.nan, 3, 5], [saving])
    assert saving.best_model_score == 3
    assert saving.best_model_path.endswith("step-00000004")
    assert saving.last_model_path.endswith("step-00000006")
    assert read_info(tmp_path / "runs/run/checkpoints/step-00000006")["best"] == "step-00000004"


def test_checkpoints_can_lie_elsewhere(tmp_path):
    fit(tmp_path, [1, 2], [lumen.ModelCheckpoint(dirpath=tmp_path / "elsewhere")])
    assert [path.name for path in find_checkpoints(tmp_path / "elsewhere")] == ["step-00000002", "step-00000004"]


def test_a_run_goes_on_from_checkpoints_that_lie_elsewhere(tmp_path):
    def elsewhere():
        return [lumen.ModelCheckpoint(dirpath=tmp_path / "elsewhere")]

    fit(tmp_path, [1, 2], elsewhere())
    with pytest.raises(ConfigError, match="holds the checkpoints of another run"):
        fit(tmp_path, [1, 2, 3], elsewhere())
    trainer = fit(tmp_path, [1, 2, 3], elsewhere(), resume="auto")
    assert trainer.global_step == 6
    rows = (tmp_path / "runs/run/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3


def test_a_trainer_used_twice_saves_each_run_in_its_own_directory(tmp_path):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    for _ in range(2):
        trainer.fit(Scripted([1]), data)
    assert steps(tmp_path, "run") == steps(tmp_path, "run-2") == [2]


def test_every_minutes_counts_from_the_last_save(tmp_path):
    fit(tmp_path, [1, 2], [lumen.ModelCheckpoint(every_n_epochs=0, every_n_minutes=1e-9, keep_last=-1)])
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_the_checkpoint_callback_runs_after_all_others(tmp_path):
    class Late(lumen.Callback):
        calls = 0

        def on_boundary(self, trainer, task):
            self.calls += 1

        def state_dict(self):
            return {"calls": self.calls}

    trainer = fit(tmp_path, [1, 2], [lumen.ModelCheckpoint(), Late()])
    assert type(trainer.callbacks[-1]) is lumen.ModelCheckpoint
    state = lumen.checkpoint.Checkpoint.open(tmp_path / "runs/run/checkpoints/step-00000004").state
    assert "calls" in str(state["callbacks"])


def test_named_callbacks_can_be_switched_off(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks={"stop": None, "rate": lumen.LearningRateMonitor()}, max_epochs=1)
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert "EarlyStopping" not in kinds
    assert "LearningRateMonitor" in kinds


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lumen.EarlyStopping("x", mode="down"), "mode must be"),
        (lambda: lumen.EarlyStopping("x", patience=-1), "must be >= 0"),
        (lambda: lumen.ModelCheckpoint(mode="up"), "mode must be"),
        (lambda: lumen.ModelCheckpoint(every_n_steps=0), "at least 1"),
        (lambda: lumen.Trainer(callbacks=[3]), "not a lumen.Callback"),
        (lambda: lumen.Trainer(callbacks=[lumen.ModelCheckpoint()], enable_checkpointing=False), "Remove one"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
