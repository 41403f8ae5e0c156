"""The example CNN: its size, its metric, and that it learns to read."""

import torch

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
