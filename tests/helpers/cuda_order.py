"""What can be shown of CUDA without a device: in which order, where, and how often it is asked for something.

What a device does with it is in `test_cuda.py`.
"""

from torch import nn

from tests.helpers.tasks import Regression


class Synced(Regression):
    """Has a norm over all processes, and nothing to learn from in the second batch of every process."""

    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(1)

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (2, 3) else super().training_step(batch)
