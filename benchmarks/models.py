"""The trained networks, in plain torch."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GPT_SHAPES = {  # layers, heads, width, positions, tokens
    "gpt-small": (1, 1, 8, 8, 16),
    "gpt": (4, 4, 128, 64, 96),
    "gpt-wide": (4, 8, 512, 64, 1024),
    "gpt2": (12, 12, 768, 1024, 50304),
}


@final
class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer; input and output have the shape `(batch, time, width)`."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


@final
class GPT(nn.Module):
    """GPT-2 without dropout, its head tied to the embedding."""

    def __init__(self, layers: int, heads: int, width: int, positions: int, tokens: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape `(batch, time, tokens)`."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def perceptron(*widths: int) -> nn.Module:
    """Return linear layers with ReLU between the layers."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_model(name: str) -> nn.Module:
    """Build a network of `Case.model`, always with the same parameters."""
    torch.manual_seed(0)
    if name in GPT_SHAPES:
        return GPT(*GPT_SHAPES[name])
    widths = {"linears": [2000] * 26, "deep": [16] * 299}.get(name, [64, 64])
    return perceptron(16, *widths, 4)


def make_tensors(name: str, samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a network, always the same, in random order."""
    generator = torch.Generator().manual_seed(1)
    if name in GPT_SHAPES:
        *_, positions, tokens = GPT_SHAPES[name]
        ids = torch.randint(tokens, (samples, positions + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    inputs = torch.randn(samples, 16, generator=generator)
    return inputs, inputs[:, :4].argmax(1)
