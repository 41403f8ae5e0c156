"""The example CNN: its size, its metric, and that it learns to read."""

import pytest
import torch
from torch.nn import functional as F

import lumen
from datamodules.mnist import MNIST5k
from lumen.cli import main
from models.digits import DigitsCNN


def batch_of(n):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(n, 1, 28, 28, generator=generator), torch.randint(10, (n,), generator=generator)]


def test_the_network_has_207_thousand_parameters():
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in DigitsCNN().parameters()) == 206_922


def test_the_loss_is_the_mean_over_images():
    model, (images, labels) = DigitsCNN().eval(), batch_of(5)
    likelihood = model(images).softmax(-1)[torch.arange(5), labels]
    torch.testing.assert_close(model.training_step([images, labels]), -likelihood.log().mean())


def test_predictions_are_the_likeliest_digits():
    model, batch = DigitsCNN().eval(), batch_of(5)
    digits = model.predict_step(batch)
    assert digits.shape == (5,)
    assert digits.tolist() == [max(range(10), key=row.__getitem__) for row in model(batch[0]).tolist()]


def test_the_logged_accuracy_is_that_of_all_images_together(tmp_path):
    data, model = MNIST5k(batch_size=96), DigitsCNN()
    trainer = lumen.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, log_level="ERROR")
    (metrics,) = trainer.validate(model, data)
    images, labels = data.val[:]
    logits = model.eval()(images)
    assert metrics["val_acc"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item(), abs=1e-6)
    assert metrics["val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def test_the_config_reads_94_percent_of_the_digits(tmp_path):
    assert main(["fit", "--config", "models/digits.yaml", "--trainer.default_root_dir", str(tmp_path)]) == 0
    data, trainer = MNIST5k(), lumen.Trainer(default_root_dir=tmp_path, name="digits")
    predicted = torch.cat(trainer.predict(DigitsCNN(), data, ckpt_path="best"))
    _, labels = data.val[:]
    assert (predicted == labels).double().mean() >= 0.94


def test_moving_the_images_needs_no_seed_to_repeat(tmp_path):
    trained = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model, data = DigitsCNN(), MNIST5k(shift=3, num_workers=workers)
        lumen.Trainer(max_steps=4, limit_val_batches=0, seed=3, default_root_dir=tmp_path).fit(model, data)
        trained.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*trained)
