"""Fine-tuning a GPT-2 of the package transformers on requests and answers, packed into rows and weighted by tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import lumen
from datamodules.packed import END
from models.bert import falling, save_config


class Answers(lumen.TaskModule):
    """GPT-2, which learns to answer requests. Texts in the same row do not affect each other.

    Batches are as in `datamodules.packed.PackedSurnames`.

    Args:
        config: Arguments of `transformers.GPT2Config`. With ``trainer.init_from``, use the config of that model.
        learning_rate: Highest learning rate of AdamW.
        warmup_steps: Number of steps until the highest learning rate.
    """

    def __init__(self, config: dict, learning_rate: float = 2e-3, warmup_steps: int = 50):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=END, eos_token_id=END, pad_token_id=END))

    def on_fit_start(self) -> None:
        """Write the config.json that ``from_pretrained`` needs next to exported weights."""
        save_config(self, self.gpt)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """Return the weighted mean of the tokens' cross-entropy, in nats."""
        logits = self.gpt(batch["ids"], position_ids=batch["positions"], attention_mask=alone(batch["texts"])).logits
        nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return (nats * batch["weights"].flatten()).sum() / batch["weight"]

    def training_step(self, batch: dict[str, Any]) -> tuple[Tensor, float]:
        """Return the loss and its weight, so that the gradient of a step does not depend on the packing."""
        loss = self.loss(batch)
        self.log("train_loss", loss, weight=batch["weight"])
        return loss, batch["weight"]

    def validation_step(self, batch: dict[str, Any]) -> None:
        """Log the loss of validation names."""
        self.log("val_loss", self.loss(batch), weight=batch["weight"], prog_bar=True)

    def predict_step(self, batch: list[int]) -> str:
        """Return an answer to a request."""
        ids = torch.tensor([batch], device=self.device)
        written = self.gpt.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_length=48)
        return bytes(token for token in written[0].tolist() if token != END).decode(errors="replace")

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that warms up, then falls to 0 at the end of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}


def alone(texts: Tensor) -> Tensor:
    """Return the attention mask: each token sees itself and the earlier tokens of its own text.

    Args:
        texts: Number of each token's text, of shape ``(rows, row)``.

    Returns:
        Bool of shape ``(rows, 1, row, row)``, as transformers expects.
    """
    same = texts[:, :, None] == texts[:, None, :]
    return same.tril()[:, None]
