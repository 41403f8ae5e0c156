"""Helper for tests of validation."""

import torch
from torch import nn

from tests.helpers.tasks import Regression, regression_data


def full_loss(task, samples):
    inputs, targets = regression_data(samples, torch.float64)
    with torch.no_grad():
        return nn.functional.mse_loss(task(inputs), targets).item()


class Cramped(Regression):
    """Task with memory for a few samples; an attempt with more logs a value before it fails."""

    def __init__(self, fits):
        super().__init__(dtype=torch.float64)
        self.fits = fits

    def require(self, inputs):
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")

    def validation_step(self, batch):
        super().validation_step(batch)
        self.require(batch[0])

    def predict_step(self, batch):
        outputs = self(batch[0])
        self.require(batch[0])
        return outputs
