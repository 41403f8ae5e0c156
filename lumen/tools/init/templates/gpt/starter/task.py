"""The network, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPT(lumen.TaskModule):
    """GPT, which predicts each next token from the tokens before it.

    Args:
        vocab_size: Number of tokens. The data module provides this argument.
        block_size: Largest number of tokens that the model looks back. The data module provides this argument.
        width: Size of the vector of a token, a multiple of `heads`.
        heads: Number of attention heads in a layer.
        layers: Number of layers.
        dropout: Probability of dropout, at least 0 and less than 1.
        lr: Highest learning rate of AdamW, which is reached after a tenth of the run.
        new_tokens: Number of tokens that `lumen predict` appends to the prompt.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        lr: float = 3e-3,
        new_tokens: int = 300,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of each next token, of shape `(batch, time, vocab_size)`, for ids of shape `(batch, time)`."""
        time = ids.shape[1]
        x = self.tokens(ids) + self.positions(torch.arange(time, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=ids.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(self.norm(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Return the mean cross-entropy, in nats per token."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss to minimize."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log the loss on validation text."""
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def predict_step(self, batch: Tensor) -> list[str]:
        """Continue each prompt, token by token."""
        for _ in range(self.hparams.new_tokens):
            probabilities = self(batch[:, -self.hparams.block_size :])[:, -1].softmax(-1)
            batch = torch.cat([batch, torch.multinomial(probabilities, 1)], dim=1)
        return [self.trainer.datamodule.decode(ids) for ids in batch]

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that rises for a tenth of the run, then falls to 0. Norms do not decay."""
        groups = lumen.optim.decay_groups(self, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = lumen.optim.cosine(optimizer, steps, warmup=steps // 10, start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
