"""Generator and critic, both conditioned on the class."""

import torch
from torch import nn


class Generator(nn.Module):
    """Noise and class to an image of 8 x 8 pixels."""

    def __init__(self, latent_dim: int = 16, width: int = 32, classes: int = 10):
        super().__init__()
        self.latent_dim = latent_dim
        self.embedding = nn.Embedding(classes, latent_dim)
        self.project = nn.Linear(2 * latent_dim, width * 2 * 2)
        self.up = nn.Sequential(
            nn.Unflatten(1, (width, 2, 2)),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        joint = torch.cat([noise, self.embedding(labels)], dim=1)
        return self.up(self.project(joint))


class Critic(nn.Module):
    """An image and its class to a score: high for real ones."""

    def __init__(self, width: int = 32, classes: int = 10):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        features = 2 * width * 2 * 2
        self.score = nn.Linear(features, 1)
        self.embedding = nn.Embedding(classes, features)  # projection discriminator, Miyato and Koyama 2018

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.body(images)
        projected = (features * self.embedding(labels)).sum(dim=1, keepdim=True)
        return (self.score(features) + projected).squeeze(1)
