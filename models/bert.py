"""BERT of transformers: pre-trained to fill in letters, then fine-tuned to classify surnames by country.

The module shows the practice of the training handbook: decay groups, layer-wise learning rates, warm-up, bfloat16,
early stopping and gradual unfreezing. Nothing is downloaded: this BERT is small, starts with
random weights, and reads bytes.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, PreTrainedModel

import lumen
from lumen.optim import layer_decay_groups, linear

PAD, START, MASK = 0, 1, 2  # bytes that no name contains
Batch = tuple[Tensor, list[int], Tensor]


def with_start(letters: Tensor) -> Tensor:
    """Return names with a start token, whose output is the prediction, of shape ``(batch, 1 + longest)``."""
    return F.pad(letters, (1, 0), value=START)


class MaskedNames(lumen.TaskModule):
    """Pre-training: BERT fills in hidden letters, without labels.

    Batches are as in `datamodules.surnames.Surnames`.

    Args:
        config: Arguments of `transformers.BertConfig`.
        learning_rate: Highest learning rate of AdamW.
        warmup_steps: Number of steps until the highest learning rate.
        hidden: Fraction of the letters that are hidden, in (0, 1).
    """

    def __init__(self, config: dict, learning_rate: float = 2e-3, warmup_steps: int = 100, hidden: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.bert = BertForMaskedLM(BertConfig(**config))

    def training_step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the hidden letters, and their number as the weight."""
        loss, count = self.loss(batch)
        self.log("train_loss", loss, weight=count)
        return loss, count

    def validation_step(self, batch: Batch) -> None:
        """Log the loss of validation names."""
        loss, count = self.loss(batch)
        self.log("val_loss", loss, weight=count, prog_bar=True)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Hide letters, and return the mean loss of the hidden letters and their number."""
        ids = with_start(batch[0])
        hidden = (torch.rand(ids.shape, device=ids.device) < self.hparams.hidden) & (ids > MASK)
        logits = self.bert(ids.masked_fill(hidden, MASK), attention_mask=ids != PAD).logits
        targets = ids.masked_fill(~hidden, PAD)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
        return total / hidden.sum().clamp(min=1), hidden.sum()

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that warms up, then falls to 0 at the end of the run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}


class BertClassifier(lumen.TaskModule):
    """Fine-tuning: BERT classifies surnames by country.

    Batches are as in `datamodules.surnames.Surnames`.

    Args:
        origins: Names of the classes.
        config: Arguments of `transformers.BertConfig`. With ``trainer.init_from``, use the config of that model.
        learning_rate: Highest learning rate of AdamW, for the classifier.
        layer_decay: Learning rate of a layer, as a fraction of the learning rate of the layer above, in (0, 1].
        weight_decay: Weight decay of AdamW, not for biases, norms and embeddings.
        warmup_steps: Number of steps until the highest learning rates.
    """

    def __init__(
        self,
        origins: list[str],
        config: dict,
        learning_rate: float = 1e-3,
        layer_decay: float = 0.8,
        weight_decay: float = 0.01,
        warmup_steps: int = 100,
    ):
        super().__init__()
        self.save_hyperparameters()
        names = dict(enumerate(origins))
        labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        self.bert = BertForSequenceClassification(BertConfig(**config, **labels))
        self.accuracy = MulticlassAccuracy(len(origins), average="micro")

    def on_fit_start(self) -> None:
        """Write the config.json that ``from_pretrained`` needs next to exported weights."""
        save_config(self, self.bert)

    def forward(self, letters: Tensor) -> Tensor:
        """Return logits of shape ``(batch, origins)``. Padding is masked."""
        ids = with_start(letters)
        return self.bert(ids, attention_mask=ids != PAD).logits

    def training_step(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the origins."""
        letters, _, labels = batch
        loss = F.cross_entropy(self(letters), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Log loss and accuracy."""
        letters, _, labels = batch
        logits = self(letters)
        self.accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, list[int]]) -> list[str]:
        """Return each name with its most likely origin."""
        letters, lengths = batch
        found = zip(letters, lengths, self(letters).argmax(dim=-1).tolist(), strict=True)
        return [f"{bytes(row[:length].tolist()).decode():<20} {self.hparams.origins[i]}" for row, length, i in found]

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate for each layer. All warm up, then fall to 0 at the end of the run."""
        h = self.hparams
        groups = layer_decay_groups(
            self,
            h.learning_rate,
            h.layer_decay,
            "bert.bert.encoder.layer",
            weight_decay=h.weight_decay,
            by="module type",
        )
        optimizer = torch.optim.AdamW(groups)
        return {"optimizer": optimizer, "lr_scheduler": falling(self, optimizer)}


def save_config(task: lumen.TaskModule, model: PreTrainedModel) -> None:
    """Write the config.json of a model of transformers into the run directory."""
    if task.trainer.is_global_zero and task.trainer.run_directory:
        model.config.save_pretrained(task.trainer.run_directory)


def falling(task: lumen.TaskModule, optimizer: torch.optim.Optimizer) -> dict:
    """Return a schedule that warms up, then falls to 0 at the end of the run, in each step."""
    schedule = linear(optimizer, task.trainer.estimated_stepping_batches, warmup=task.hparams.warmup_steps)
    return {"scheduler": schedule, "interval": "step"}


class GradualUnfreezing(lumen.Callback):
    """Callback that trains the last layers first, and unfreezes one more layer every few epochs.

    The frozen layers depend only on the epoch. So the callback has no state, and a run resumes exactly.

    Args:
        layers: Names of modules in the order of unfreezing. All other modules are trained from the start.
        every_n_epochs: Number of epochs between two layers.
    """

    def __init__(self, layers: list[str], every_n_epochs: int = 1):
        self.layers, self.every_n_epochs = layers, every_n_epochs

    def on_train_epoch_start(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
        """Freeze and unfreeze layers. The optimizer holds all parameters, and skips parameters without a gradient."""
        for i, name in enumerate(self.layers):
            task.get_submodule(name).requires_grad_(trainer.current_epoch >= (i + 1) * self.every_n_epochs)
