"""GAN: training, monitoring, and resume."""

import lightning as L
import pytest
import torch
from train import make_trainer

from digitgan.data import DigitsDataModule
from digitgan.module import DigitGAN


@pytest.fixture
def data():
    return DigitsDataModule(batch_size=64)


def fit(root, max_epochs, data, model=None, ckpt_path=None):
    L.seed_everything(3, workers=True)
    model = model or DigitGAN(width=16, critic_steps=2)
    trainer = make_trainer(str(root), max_epochs)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return trainer, model


class Distances(L.Callback):
    """Callback that records the distance after each validation."""

    def __init__(self):
        self.values = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics["val/distance"]))


def test_what_it_makes_comes_nearer_to_real_digits(tmp_path, data):
    L.seed_everything(3, workers=True)
    distances = Distances()
    trainer = make_trainer(str(tmp_path), 8)
    trainer.callbacks.append(distances)
    trainer.fit(DigitGAN(width=16, critic_steps=2), datamodule=data)
    assert len(distances.values) == 8
    assert min(distances.values[4:]) < 0.7 * distances.values[0]


def test_both_networks_move_and_all_is_logged(tmp_path, data):
    L.seed_everything(3, workers=True)
    model = DigitGAN(width=16, critic_steps=2)
    before = {name: value.clone() for name, value in model.named_parameters()}
    trainer, _ = fit(tmp_path, 1, data, model)
    moved = {name.split(".")[0] for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {"generator", "critic"}
    wanted = {"critic/loss_epoch", "generator/loss_epoch", "critic/penalty", "val/distance", "lr"}
    assert wanted <= set(trainer.callback_metrics)
    assert trainer.callback_metrics["lr"] == pytest.approx(1e-3 * 0.95)


def test_it_goes_on_where_it_was(tmp_path, data):
    first, _ = fit(tmp_path / "first", 2, data)
    seen = next(each for each in first.callbacks if type(each).__name__ == "BalanceWatch").seen
    last = first.checkpoint_callback.last_model_path
    second, model = fit(tmp_path / "second", 3, data, ckpt_path=last)
    assert second.current_epoch == 3
    assert 2 * second.global_step == 3 * first.global_step
    watch = next(each for each in second.callbacks if type(each).__name__ == "BalanceWatch")
    assert 2 * watch.seen == 3 * seen
    assert model.lr_schedulers()[0].get_last_lr() == [pytest.approx(1e-3 * 0.95**3)]


def test_the_best_one_is_loaded_and_makes_digits(tmp_path, data):
    trainer, model = fit(tmp_path, 2, data)
    best = DigitGAN.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, map_location="cpu")
    assert best.hparams.width == 16
    assert best.generator.project.weight.shape == model.generator.project.weight.shape
    images = torch.cat(trainer.predict(best, datamodule=data))
    assert images.shape == (20, 1, 8, 8)
    assert images.min() >= -1
    assert images.max() <= 1
    assert sorted(each.name for each in (tmp_path / "samples").iterdir()) == ["epoch-000.pt", "epoch-001.pt"]


def test_a_trained_one_can_be_evaluated_alone(tmp_path, data):
    trainer, model = fit(tmp_path, 2, data)
    found = float(trainer.callback_metrics["val/distance"])
    (results,) = trainer.validate(model, datamodule=data, verbose=False)
    assert results["val/distance"] == pytest.approx(found, rel=0.3)  # for other noise
