"""BYOL: training without labels, the teacher, the probe, and resumed runs."""

import sys

import pytest
import pytorch_lightning as pl
import torch
from pretrain import main, trainer_for
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from selfsup.callbacks import LossHistory, MomentumTeacher
from selfsup.data import ViewsDataModule
from selfsup.module import BYOL


def callback_of(trainer, kind):
    return next(each for each in trainer.callbacks if isinstance(each, kind))


def fit(root, epochs, ckpt_path=None, **more):
    pl.seed_everything(7)
    model = BYOL(width=8)
    trainer = trainer_for(root, epochs, **more)
    trainer.fit(model, datamodule=ViewsDataModule(), ckpt_path=ckpt_path)
    return trainer, model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("run"), 6)


def test_the_loss_falls_and_the_probe_learns(run):
    trainer, _ = run
    losses = callback_of(trainer, LossHistory).losses
    assert len(losses) == trainer.global_step == 60
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert trainer.callback_metrics["accuracy_held_out"] > 0.4
    spread = [float(value) for name, value in trainer.callback_metrics.items() if name.startswith("spread")]
    assert len(spread) == 2
    assert min(spread) > 0.01


def test_the_teacher_follows_and_has_no_gradient(run):
    trainer, model = run
    teacher = callback_of(trainer, MomentumTeacher)
    assert teacher.updates == 60
    assert teacher.momentum > 0.99
    assert not any(each.requires_grad for each in model.teacher.parameters())
    for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        assert not torch.equal(slow, fast)


def test_features_of_held_out_images_are_predicted(run):
    trainer, model = run
    features = torch.cat(trainer.predict(model, datamodule=ViewsDataModule()))
    assert features.shape == (397, 64)
    assert torch.allclose(features.norm(dim=1), torch.ones(397), atol=1e-4)


def test_it_goes_on_with_the_state_of_all(tmp_path):
    first, _ = fit(tmp_path / "first", 2, limit_train_batches=4)
    second, model = fit(tmp_path / "second", 4, first.checkpoint_callback.last_model_path, limit_train_batches=4)
    losses = callback_of(second, LossHistory).losses
    assert len(losses) == 16
    assert losses[:8] == callback_of(first, LossHistory).losses
    assert callback_of(second, MomentumTeacher).updates == second.global_step == 16
    assert second.current_epoch == 4
    assert model.hparams.width == 8


def test_a_momentum_that_falls_is_refused():
    with pytest.raises(MisconfigurationException, match=r"found 0\.9 to 0\.5"):
        MomentumTeacher(0.9, 0.5)


def test_the_script_keeps_an_encoder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--root", str(tmp_path), "--epochs", "1"])
    main()
    weights = torch.load(tmp_path / "encoder.pt", weights_only=True)
    assert weights["body.0.weight"].shape == (16, 1, 3, 3)
