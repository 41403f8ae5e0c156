"""Helpers for the order and number of CUDA calls, shown without a device.

`test_cuda.py` tests the effect on a device.
"""

from torch import nn

from tests.helpers.tasks import Regression


class Synced(Regression):
    """Task with a norm over all processes, whose second batch on every process has weight 0."""

    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(1)

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (2, 3) else super().training_step(batch)
