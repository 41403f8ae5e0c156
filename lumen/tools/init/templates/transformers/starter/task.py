"""The model, its loss and its optimizer."""

import lumen
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig


class Classifier(lumen.TaskModule):
    """Tells the kind of a text.

    Args:
        vocab_size: Number of tokens; not set in the config, it comes from the data.
        classes: Number of kinds; from the data too.
        pretrained: A directory or a name that `from_pretrained` takes; the data needs its tokenizer then. Default: a
            small BERT with random weights, and nothing is downloaded.
        width: Numbers that stand for a token in the small BERT.
        layers: Layers of the small BERT.
        lr: AdamW's learning rate at its highest, after a tenth of the run.
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
        self.model = model.train()  # transformers loads without dropout

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of the labels, which is made smaller."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """The same, and the part of the texts whose kind is found, on texts that it does not learn from."""
        found = self.model(**batch)
        self.log("val_loss", found.loss, prog_bar=True)
        self.log("val_acc", (found.logits.argmax(dim=1) == batch["labels"]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict:
        """AdamW; its learning rate rises, then falls, a little at each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
