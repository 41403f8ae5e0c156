from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class DenseNet(nn.Module):
    """Fully connected layers with batch normalization."""

    def __init__(self, input_size: int, widths: Sequence[int], output_size: int) -> None:
        super().__init__()
        sizes = [input_size, *widths]
        layers = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(sizes[-1], output_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.flatten(1))
