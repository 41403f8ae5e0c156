"""Attributes of callbacks equal the attributes of the installed Lightning's callbacks, on the same data."""

import logging
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

NEEDS_LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="not proven here: it needs Lightning")
SCORES = [5.0, 4.0, 4.5, 6.0, 1.0]


def fit_both(tmp_path, make_callback, **options):
    """Train with a callback of Lightning and of Lumen, and return both callbacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning import pytorch as pl

    class Steps:
        """Steps of a task; each epoch logs the next score."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch, batch_idx):
            return (self.weight - batch[0]).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            self.log("score", SCORES[self.current_epoch])

        def configure_optimizers(self):
            optimizer = torch.optim.SGD([self.weight], lr=0.5, momentum=0.75, weight_decay=0.125)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    found = []
    settings = {"max_epochs": 5, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    for library, base in ((pl, pl.LightningModule), (lumen, lumen.TaskModule)):
        callback = make_callback(pl.callbacks if library is pl else lumen, tmp_path / library.__name__)
        quiet = {"log_level": "ERROR"} if library is lumen else {}
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = library.Trainer(
                default_root_dir=tmp_path / library.__name__, callbacks=[callback], **settings, **quiet, **options
            )
            data = DataLoader(TensorDataset(torch.arange(8.0)), 2)
            trainer.fit(type("Task", (Steps, base), {})(), data, data)
        found.append(callback)
    return found


@NEEDS_LIGHTNING
@pytest.mark.slow
@pytest.mark.parametrize(("interval", "every"), [("step", 3), ("epoch", 50)])
def test_lr_monitor_keeps_values_of_lightning(tmp_path, interval, every):
    def make(library, folder):
        return library.LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)

    theirs, ours = fit_both(tmp_path, make, log_every_n_steps=every)
    assert ours.lrs == {"lr": theirs.lrs["lr-SGD"]}
    assert [*ours.last_momentum_values.values()] == [*theirs.last_momentum_values.values()] == [0.75]
    assert [*ours.last_weight_decay_values.values()] == [*theirs.last_weight_decay_values.values()] == [0.125]
    assert (ours.log_momentum, ours.log_weight_decay) == (theirs.log_momentum, theirs.log_weight_decay)


@NEEDS_LIGHTNING
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"patience": 2}, {"divergence_threshold": 5.5}, {"patience": 9}])
def test_early_stopping_has_attributes_of_lightning(tmp_path, options):
    theirs, ours = fit_both(tmp_path, lambda library, folder: library.EarlyStopping("score", **options))
    for name in ("stopped_epoch", "wait_count", "best_score", "patience", "monitor", "mode"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.stopping_reason == theirs.stopping_reason.name.lower()


@NEEDS_LIGHTNING
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "step", "every_n_train_steps": 3},
        {"monitor": "epoch", "every_n_epochs": 1},
        {"monitor": "score", "every_n_epochs": 1},
    ],
)
def test_checkpoint_scores_equal_scores_of_lightning(tmp_path, options):
    def make(library, folder):
        more = {"at_end": False, "on_best": False} if library is lumen else {}
        return library.ModelCheckpoint(folder / "best", mode="max", save_top_k=2, **options, **more)

    theirs, ours = fit_both(tmp_path, make)
    assert sorted(map(float, ours.best_k_models.values())) == sorted(map(float, theirs.best_k_models.values()))
    for name in ("best_model_score", "kth_value"):
        assert float(getattr(ours, name)) == float(getattr(theirs, name)), name


# ---------------------------------------------------------------------- refusals and warnings


@pytest.mark.parametrize("kind", [lumen.LearningRateMonitor, lumen.DeviceStatsMonitor])
def test_monitors_without_a_logger_are_refused(tmp_path, kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no logger to write to. Remove logger=False"):
        bare_trainer(tmp_path, max_steps=1, callbacks=[kind()]).fit(Regression(), loader())
    bare_trainer(tmp_path, fast_dev_run=True, callbacks=[lumen.LearningRateMonitor()]).fit(Regression(), loader())
    bare_trainer(tmp_path, callbacks=[kind()]).validate(Regression(), loader())


@pytest.mark.parametrize(
    ("bars", "shown", "message"),
    [(2, None, "ProgressBar and ProgressBar are two progress bars"), (1, False, "enable_progress_bar is False, but")],
)
def test_second_bar_or_bar_without_progress_raises(bars, shown, message):
    with pytest.raises(ConfigError, match=message):
        lumen.Trainer(callbacks=[lumen.ProgressBar() for _ in range(bars)], enable_progress_bar=shown)


def test_filename_of_checkpoints_warns_and_is_kept(tmp_path, caplog):
    saver = lumen.ModelCheckpoint(tmp_path / "best", "{epoch}-{val_loss:.2f}", auto_insert_metric_name=False)
    quiet_trainer(tmp_path, max_steps=2, callbacks=[saver], log_level="WARNING").fit(Regression(), loader())
    (text,) = [each.message for each in caplog.records if "filename" in each.message]
    assert text.startswith("ModelCheckpoint: ignoring filename='{epoch}-{val_loss:.2f}', since Lumen names")
    assert saver.filename == "{epoch}-{val_loss:.2f}"
    assert saver.best_model_path == str(tmp_path / "best/step-00000002")


def test_monitor_step_keeps_newest_even_after_resume(tmp_path):
    saver = lumen.ModelCheckpoint(monitor="step", mode="max", save_top_k=3, every_n_train_steps=1, keep_last=1)
    trainer = quiet_trainer(tmp_path, max_steps=5, callbacks=[saver])
    trainer.fit(Regression(), loader())
    assert [float(score) for score in saver.best_k_models.values()] == [5.0, 4.0, 3.0]
    assert sorted(path.name for path in saver.dirpath.iterdir()) == [f"step-0000000{step}" for step in (3, 4, 5)]
    again = lumen.ModelCheckpoint(monitor="step", mode="max", save_top_k=3, every_n_train_steps=1, keep_last=1)
    quiet_trainer(tmp_path, max_steps=7, callbacks=[again], resume="auto").fit(Regression(), loader())
    assert [float(score) for score in again.best_k_models.values()] == [7.0, 6.0, 5.0]
