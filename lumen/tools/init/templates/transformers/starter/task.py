"""The model, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig


class Classifier(lumen.TaskModule):
    """Model of transformers that classifies texts.

    Args:
        vocab_size: Number of tokens. The data module provides this argument.
        classes: Number of kinds. The data module provides this argument.
        pretrained: A name or a directory for `from_pretrained`. Set the tokenizer of the data module too. Default: a
            small BERT with random weights, which downloads nothing.
        width: Size of the vector of a token in the small BERT.
        layers: Number of layers of the small BERT.
        lr: Highest learning rate of AdamW, which is reached after a tenth of the run.
    """

    def __init__(
        self,
        vocab_size: int,
        classes: int,
        pretrained: str | None = None,
        width: int = 64,
        layers: int = 2,
        lr: float = 1e-3,
    ):
        super().__init__()
        self.save_hyperparameters()
        if pretrained is not None:
            model = AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=classes)
        else:
            config = BertConfig(
                vocab_size=vocab_size,
                num_labels=classes,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
            )
            model = AutoModelForSequenceClassification.from_config(config)
        self.model = model.train()  # transformers loads models in eval mode, without dropout.

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss to minimize, the cross-entropy of the labels."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log loss and accuracy on validation texts."""
        output = self.model(**batch)
        self.log("val_loss", output.loss, prog_bar=True)
        self.log("val_acc", (output.logits.argmax(dim=1) == batch["labels"]).float().mean(), prog_bar=True)

    def predict_step(self, batch: dict[str, Tensor]) -> list[str]:
        """Return the most likely kind of each text, and its probability."""
        highest, kinds = self.model(**batch).logits.softmax(dim=1).max(dim=1)
        names = self.trainer.datamodule.kinds
        return [f"{names[kind]} {p:.0%}" for kind, p in zip(kinds.tolist(), highest.tolist(), strict=True)]

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that rises for a tenth of the run, then falls to 0. Norms do not decay."""
        groups = lumen.optim.decay_groups(self, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = lumen.optim.cosine(optimizer, steps, warmup=steps // 10, start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
