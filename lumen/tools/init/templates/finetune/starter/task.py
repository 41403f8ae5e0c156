"""The model with its adapter, the loss and the optimizer."""

import lumen
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from starter.data import IGNORED


class Tuned(lumen.TaskModule):
    """Language model that keeps its weights, with a LoRA adapter of small matrices that are trained.

    Args:
        base: A name or a directory for `from_pretrained`. The data module provides this argument.
        rank: Rank of the matrices of the adapter. A higher rank learns more and needs more memory.
        dropout: Probability of dropout in the adapter, at least 0 and less than 1.
        lr: Highest learning rate of AdamW, which is reached after a tenth of the run.
        new_tokens: Largest number of tokens of an answer of `lumen predict`.
    """

    def __init__(self, base: str, rank: int = 16, dropout: float = 0.0, lr: float = 2e-4, new_tokens: int = 100):
        super().__init__()
        self.save_hyperparameters()
        lora = LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules="all-linear"
        )
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
        self.model = model.train()  # transformers loads models in eval mode, without dropout.

    def compute_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of the tokens of the answers, and the number of these tokens."""
        return self.model(**batch).loss, (batch["labels"] != IGNORED).sum()

    def training_step(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss to minimize and its weight, so that each token of a step counts the same."""
        loss, tokens = self.compute_loss(batch)
        self.log("loss", loss, weight=tokens, prog_bar=True)
        return loss, tokens

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the loss on validation pairs."""
        loss, tokens = self.compute_loss(batch)
        self.log("val_loss", loss, weight=tokens, prog_bar=True)

    def predict_step(self, batch: Tensor) -> list[str]:
        """Return the most likely answer to each prompt, token by token."""
        mask = torch.ones_like(batch)
        texts = self.model.generate(
            input_ids=batch, attention_mask=mask, max_new_tokens=self.hparams.new_tokens, do_sample=False
        )
        return self.trainer.datamodule.tokenizer.batch_decode(texts[:, batch.shape[1] :], skip_special_tokens=True)

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that rises for a tenth of the run, then falls to 0."""
        optimizer = lumen.optim.adamw(self.parameters(), lr=self.hparams.lr)  # The frozen weights are left out.
        steps = self.trainer.estimated_stepping_batches
        schedule = lumen.optim.cosine(optimizer, steps, warmup=steps // 10, start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
