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
    """GPT-2 learns to answer: what stands beside a text in its row changes nothing of it.

    A batch is that of `datamodules.packed.PackedSurnames`.

    Args:
        config: Arguments of `transformers.GPT2Config`; with ``trainer.init_from``, those of the model begun with.
        learning_rate: AdamW's, the highest one.
        warmup_steps: Steps until then.
    """

    def __init__(self, config: dict, learning_rate: float = 2e-3, warmup_steps: int = 50):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT2LMHeadModel(GPT2Config(**config, bos_token_id=END, eos_token_id=END, pad_token_id=END))

    def on_fit_start(self) -> None:
        """Write the config.json that ``from_pretrained`` wants beside exported weights."""
        save_config(self, self.gpt)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """Cross-entropy in nats, a mean over the weights of the tokens."""
        logits = self.gpt(batch["ids"], position_ids=batch["positions"], attention_mask=alone(batch["texts"])).logits
        nats = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        return (nats * batch["weights"].flatten()).sum() / batch["weight"]

    def training_step(self, batch: dict[str, Any]) -> tuple[Tensor, float]:
        """The loss, and what it is a mean over: a step has the gradient of all its texts, however they are packed."""
        loss = self.loss(batch)
        self.log("train_loss", loss, weight=batch["weight"])
        return loss, batch["weight"]

    def validation_step(self, batch: dict[str, Any]) -> None:
        """Log the same for names that it has never seen."""
        self.log("val_loss", self.loss(batch), weight=batch["weight"], prog_bar=True)

    def predict_step(self, batch: list[int]) -> str:
        """An answer to a request."""
        ids = torch.tensor([batch], device=self.device)
        written = self.gpt.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_length=48)
        return bytes(token for token in written[0].tolist() if token != END).decode(errors="replace")

    def configure_optimizers(self) -> dict:
        """AdamW; its learning rate warms up, then falls to 0 with the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}


def alone(texts: Tensor) -> Tensor:
    """Which tokens each token looks at: itself and those before it in its own text.

    Args:
        texts: Whose each token is, of shape ``(rows, row)``.

    Returns:
        Bool of shape ``(rows, 1, row, row)``, as transformers takes it.
    """
    same = texts[:, :, None] == texts[:, None, :]
    return same.tril()[:, None]
