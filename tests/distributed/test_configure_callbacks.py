"""Callbacks from `configure_callbacks`: active on every rank, and resumed exactly."""

import pytest
import torch

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights

F64 = torch.float64


class Bringing(Regression):
    def configure_callbacks(self):
        saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
        return [lumen.EMA(decay=0.5), saver, lumen.EarlyStopping("val_loss", patience=1, min_delta=9.0)]


class Uneven(Regression):
    def configure_callbacks(self):
        return [lumen.Timer()] if self.trainer.is_global_zero else []


def fit(path, steps):
    trainer = quiet_trainer(path, devices=2, strategy="ddp", max_steps=steps, resume="auto")
    task = Bringing(dtype=F64)
    trainer.fit(task, loader(32, 4, dtype=F64), loader(8, 4, dtype=F64))
    last = trainer.checkpoint_callback.last_model_path
    average = Bringing.load_from_checkpoint(last, average="EMA")
    names = [type(each).__name__ for each in trainer.callbacks]
    return weights(task).tolist(), weights(average).tolist(), trainer.global_step, names


def fit_unevenly(path):
    with pytest.raises(ConfigError) as caught:
        bare_trainer(path, devices=2, strategy="ddp", max_steps=1).fit(Uneven(), loader())
    return str(caught.value)


def test_resumed_run_with_configured_callbacks_is_exact(group, tmp_path):
    straight = group(2).run(fit, tmp_path / "straight", 20)
    group(2).run(fit, tmp_path / "halves", 3)
    resumed = group(2).run(fit, tmp_path / "halves", 20)
    assert resumed == straight
    assert straight[0][:3] == straight[1][:3]
    assert straight[0][2] == 8  # EarlyStopping has stopped it after the second epoch
    assert straight[0][3][-3:] == ["EMA", "EarlyStopping", "ModelCheckpoint"]


def test_different_callbacks_raise_equally_on_all_ranks(group, tmp_path):
    first, second = group(2).run(fit_unevenly, tmp_path)
    assert first == second
    assert "callbacks differ between ranks: rank 0 has Timer; rank 1 has none" in first
