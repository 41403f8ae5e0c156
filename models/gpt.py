"""A GPT in the shape of GPT-2, trained to predict the next token.

`Transformer` is the network, a plain ``nn.Module``. `GPT` is the task: loss, optimizer, sampling.
"""

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lumen
from lumen.errors import ConfigError
from lumen.optim import decay_groups

PRESETS = {  # layers, heads, width
    "gpt-nano": (3, 3, 48),
    "gpt-micro": (4, 4, 128),
    "gpt-mini": (6, 6, 192),
    "gopher-44m": (8, 16, 512),
    "openai-gpt": (12, 12, 768),
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, attn_pdrop: float, bias: bool):
        super().__init__()
        self.head_size = width // heads
        self.dropout = attn_pdrop
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.project = nn.Linear(width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions. ``x`` and the result have the shape ``(batch, time, width)``."""
        # Under `lumen.Mesh` a process has its share of the heads.
        q, k, v = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Layer of attention and MLP. Both read the normalized residual stream, and add to the stream."""

    def __init__(self, width: int, heads: int, resid_pdrop: float, attn_pdrop: float, bias: bool):
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, attn_pdrop, bias)
        self.norm_2 = nn.LayerNorm(width, bias=bias)
        self.expand = nn.Linear(width, 4 * width, bias)
        self.project = nn.Linear(4 * width, width, bias)
        self.drop = nn.Dropout(resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer. ``x`` and the result have the shape ``(batch, time, width)``."""
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.project(F.gelu(self.expand(self.norm_2(x)))))


class Transformer(nn.Module):
    """The network of GPT-2: learned positions, pre-norm blocks, the token embedding tied to the output head.

    The arguments are as in `GPT`, where ``layers``, ``heads`` and ``width`` are ``n_layer``, ``n_head``, ``n_embd``.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        layers: int,
        heads: int,
        width: int,
        embd_pdrop: float,
        resid_pdrop: float,
        attn_pdrop: float,
        bias: bool,
    ):
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"n_embd = {width} cannot be shared by n_head = {heads} heads. Set n_embd to a multiple of n_head."
            )
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.drop = nn.Dropout(embd_pdrop)
        self.blocks = nn.Sequential(*(Block(width, heads, resid_pdrop, attn_pdrop, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Initialize as GPT-2: the initial variance of the residual stream does not depend on the depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                residual = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict each next token.

        Args:
            ids: Tokens, int64 of shape ``(batch, time)``.

        Returns:
            Logits of shape ``(batch, time, vocab_size)``. The logits at a position depend on no later token.

        Raises:
            ConfigError: ``time`` is more than ``block_size``.
        """
        time, block_size = ids.shape[1], self.positions.num_embeddings
        if time > block_size:
            raise ConfigError(
                f"found a sequence of {time} tokens, but the model has {block_size} positions. "
                "Set model.block_size to at least data.block_size."
            )
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(time, device=ids.device)))
        return self.head(self.norm(self.blocks(x)))


class GPT(lumen.TaskModule):
    """Language model that trains a `Transformer` on blocks of tokens, and writes text.

    Training and validation batches are ``[inputs, targets]``, both int64 of shape ``(batch, time)``. A prediction batch
    is a prompt, int64 of shape ``(batch, time)``; the data module's ``decode(ids)`` converts the output to text.

    Args:
        vocab_size: Number of tokens.
        block_size: Longest sequence, in tokens.
        preset: Name of the size, one of `PRESETS`.
        n_layer: Number of blocks. Default: the preset's.
        n_head: Number of attention heads in a block. Default: the preset's.
        n_embd: Width of the residual stream, a multiple of ``n_head``. Default: the preset's.
        dropout: Default of the three dropout probabilities below, in [0, 1).
        embd_pdrop: Dropout probability after the embeddings.
        resid_pdrop: Dropout probability of what attention and MLP add to the residual stream.
        attn_pdrop: Dropout probability of the attention weights.
        ignore_index: A target that the loss ignores, such as -1 for padding. Default: none.
        bias: True if linear layers and norms have biases, as in GPT-2.
        learning_rate: Highest learning rate of AdamW, which is reached after the warm-up.
        weight_decay: Weight decay of AdamW, for matrices and embeddings only, unless ``decay_by`` is set.
        decay_by: Rule for the parameters that decay, as in `lumen.optim.decay_groups`. minGPT's rule is ``{decay:
            [Linear], no_decay: [LayerNorm, Embedding]}``. The head is tied to the token embedding and follows its rule.
        betas: Betas of AdamW.
        warmup_steps: Number of steps in which the learning rate rises linearly.
        decay_steps: Step at which the cosine reaches the lowest learning rate. Default: the last step of the run.
        min_lr_ratio: Lowest learning rate, as a fraction of ``learning_rate``.
        max_new_tokens: Number of tokens that ``predict`` appends to a prompt.
        temperature: Temperature of sampling, above 0. Lower is safer, higher is wilder.
        top_k: Number of most likely tokens to sample from, or None for all.
        greedy: True to always take the most likely token.
    """

    parallel_plan: ClassVar = {
        "transformer.blocks.*.attention.qkv": "packed_colwise",
        "transformer.blocks.*.attention.project": "rowwise",
        "transformer.blocks.*.expand": "colwise",
        "transformer.blocks.*.project": "rowwise",
    }

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 64,
        preset: str = "gpt-micro",
        n_layer: int | None = None,
        n_head: int | None = None,
        n_embd: int | None = None,
        dropout: float = 0.0,
        embd_pdrop: float | None = None,
        resid_pdrop: float | None = None,
        attn_pdrop: float | None = None,
        bias: bool = True,
        ignore_index: int | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        decay_by: Literal["dimension", "module type"] | dict[str, list[str]] = "dimension",
        betas: tuple[float, float] = (0.9, 0.99),
        warmup_steps: int = 100,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
        max_new_tokens: int = 500,
        temperature: float = 1.0,
        top_k: int | None = None,
        greedy: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters()
        if preset not in PRESETS:
            raise ConfigError(f"there is no preset {preset!r}. Choose one of {', '.join(PRESETS)}.")
        layers, heads, width = PRESETS[preset]
        embd, resid, attn = (dropout if each is None else each for each in (embd_pdrop, resid_pdrop, attn_pdrop))
        self.transformer = Transformer(
            vocab_size, block_size, n_layer or layers, n_head or heads, n_embd or width, embd, resid, attn, bias
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of each next token, as `Transformer.forward`."""
        return self.transformer(ids)

    def training_step(self, batch: list[Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss in nats per token, and with `ignore_index` the number of tokens that count."""
        loss, tokens = self.loss(batch), self.tokens(batch)
        self.log("train_loss", loss, weight=tokens)
        return loss if tokens is None else (loss, tokens)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the loss of validation text."""
        self.log("val_loss", self.loss(batch), weight=self.tokens(batch), prog_bar=True)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy over tokens that are not ignored, a scalar; 0 if all are ignored."""
        inputs, targets = batch
        logits, tokens = self(inputs).flatten(0, 1), self.tokens(batch)
        if tokens is None:
            return F.cross_entropy(logits, targets.flatten())
        ignored = self.hparams.ignore_index
        return F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction="sum") / tokens.clamp(min=1)

    def tokens(self, batch: list[Tensor]) -> Tensor | None:
        """Return the number of targets of the batch that count, or None for all."""
        ignored = self.hparams.ignore_index
        return None if ignored is None else (batch[1] != ignored).sum()

    def predict_step(self, batch: Tensor) -> list[str]:
        """Continue each prompt."""
        h = self.hparams
        ids = self.generate(batch, h.max_new_tokens, h.temperature, h.top_k, h.greedy)
        return [self.trainer.datamodule.decode(row) for row in ids]

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        greedy: bool = False,
    ) -> Tensor:
        """Append tokens one by one, each from the last ``block_size`` tokens.

        Args:
            ids: The prompts, int64 of shape ``(batch, time)``, ``time`` at least 1.
            max_new_tokens: Number of tokens to append.
            temperature: Divisor of the logits, above 0.
            top_k: Number of most likely tokens to sample from, at least 1, or None for all.
            greedy: True to take the most likely token, regardless of temperature and top_k.

        Returns:
            int64 of shape ``(batch, time + max_new_tokens)``.

        Raises:
            ConfigError: The temperature is not above 0.
        """
        if temperature <= 0:
            raise ConfigError(
                f"temperature: must be above 0, found {temperature}. For the most likely text set greedy."
            )
        for _ in range(max_new_tokens):
            logits = self(ids[:, -self.hparams.block_size :])[:, -1] / temperature
            if top_k is not None:
                worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < worst, -torch.inf)
            chosen = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
            ids = torch.cat([ids, chosen], dim=1)
        return ids

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that warms up, then falls along a cosine, in each step."""
        h = self.hparams
        decay_steps = h.decay_steps or self.trainer.estimated_stepping_batches
        groups = decay_groups(self, h.weight_decay, by=h.decay_by)
        optimizer = torch.optim.AdamW(groups, lr=h.learning_rate, betas=tuple(h.betas))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, h.warmup_steps, decay_steps, h.min_lr_ratio)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def warmup_cosine(step: int, warmup_steps: int, decay_steps: int, min_ratio: float) -> float:
    """Return the learning rate after ``step`` steps, as a fraction of the highest learning rate, in (0, 1]."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2
