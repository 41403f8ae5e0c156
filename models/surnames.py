"""A recurrent network that classifies surnames by country."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torchmetrics.classification import MulticlassAccuracy

import lumen


class SurnameGRU(lumen.TaskModule):
    """Bidirectional GRU, whose last states predict the origin of a name.

    A batch is ``(letters, lengths, labels)``: bytes, int64 of shape ``(batch, longest)``; the length of each
    name, a list; and positions in ``origins``, int64 of shape ``(batch,)``. A prediction batch has no labels.

    Args:
        origins: Names of the classes.
        width: Size of the vector of a letter.
        hidden: Size of the GRU's state in each direction.
        dropout: Dropout probability of these vectors and of the last states.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self,
        origins: list[str],
        width: int = 32,
        hidden: int = 64,
        dropout: float = 0.25,
        learning_rate: float = 3e-3,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, width, padding_idx=0)
        self.gru = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * hidden, len(origins))
        self.accuracy = MulticlassAccuracy(len(origins), average="micro")

    def forward(self, letters: Tensor, lengths: list[int]) -> Tensor:
        """Return logits of shape ``(batch, origins)``. The sequences are packed, so padding is not read."""
        vectors = self.dropout(self.embedding(letters))
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        _, (forwards, backwards) = self.gru(packed)
        return self.head(self.dropout(torch.cat([forwards, backwards], dim=1)))

    def training_step(self, batch: tuple[Tensor, list[int], Tensor]) -> Tensor:
        """Return the mean cross-entropy of the origins."""
        letters, lengths, labels = batch
        loss = F.cross_entropy(self(letters, lengths), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, list[int], Tensor]) -> None:
        """Log loss and accuracy."""
        letters, lengths, labels = batch
        logits = self(letters, lengths)
        self.accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def predict_step(self, batch: tuple[Tensor, list[int]]) -> list[str]:
        """Return each name with its most likely origin and the probability."""
        letters, lengths = batch
        likelihoods, origins = self(letters, lengths).softmax(dim=-1).max(dim=-1)
        lines = []
        for row, length, likelihood, origin in zip(letters, lengths, likelihoods, origins, strict=True):
            name = bytes(row[:length].tolist()).decode()
            lines.append(f"{name:<20} {self.hparams.origins[origin]:<10} {likelihood:4.0%}")
        return lines

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
