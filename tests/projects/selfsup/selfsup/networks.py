"""Encoder, and the heads on top of it."""

from __future__ import annotations

import torch
from torch import nn


class Encoder(nn.Module):
    """An image of 8 x 8 pixels to a vector."""

    def __init__(self, width: int = 16, features: int = 64) -> None:
        super().__init__()
        self.features = features
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, features),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)


def head(inputs: int, outputs: int, hidden: int = 128) -> nn.Sequential:
    """A perceptron with BatchNorm, as BYOL's projector and predictor are."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs)
    )
