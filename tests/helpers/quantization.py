"""Task with layers that compute like quantized ones."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

import lumen
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tasks import quiet_trainer


class Quantized(lumen.TaskModule):
    def __init__(self, few_bits=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        if few_bits:
            bits = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
            quantize_(self.net, QATConfig(bits, step="prepare"))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    @staticmethod
    def batches():
        inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 4)


def train_quantized(folder, steps=None, **options):
    """Train and return the final, unsharded parameters."""
    length = {"max_epochs": 2} if steps is None else {"max_epochs": 2, "max_steps": steps}
    task = Quantized()
    quiet_trainer(folder, resume="auto", **length, **options).fit(task, Quantized.batches())
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}
