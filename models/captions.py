"""A network that writes the caption of a row of images, word by word.

The module shows the practice of the lecture on data loading and captioning collates: masks, a loss per token that does
not depend on the micro-batch size, evaluation by tokens and by captions, and a picture of predicted captions.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

import lumen
from datamodules.captions import LONGEST, PAD, START, decode
from lumen.optim import cosine


class Captioner(lumen.TaskModule):
    """A small CNN for each object, and a transformer decoder that attends to the objects.

    Batches are as in `datamodules.captions.collate`.

    Args:
        vocabulary: All words, of which the first three are padding, start and end.
        width: Size of the vector of an object or a word.
        heads: Number of attention heads.
        layers: Number of layers of the decoder.
        dropout: Probability of dropout, at least 0 and less than 1.
        learning_rate: Highest learning rate of AdamW, after the warm-up.
        warmup_steps: Number of steps of the warm-up.
    """

    def __init__(
        self,
        vocabulary: list[str],
        width: int = 64,
        heads: int = 4,
        layers: int = 1,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        warmup_steps: int = 50,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.eye = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(32 * 7 * 7, width),
        )
        self.places = nn.Embedding(LONGEST + 1, width)  # positions of objects in the row, and of words in the caption
        self.words = nn.Embedding(len(vocabulary), width, padding_idx=PAD)
        layer = nn.TransformerDecoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, layers, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, len(vocabulary))
        self.accuracy = MeanMetric()

    def look(self, objects: Tensor) -> Tensor:
        """Return a vector for each object: from ``(batch, longest, 1, 28, 28)`` to ``(batch, longest, width)``."""
        seen = self.eye(objects.flatten(0, 1)).unflatten(0, objects.shape[:2])
        return seen + self.places.weight[: seen.shape[1]]

    def write(self, seen: Tensor, object_mask: Tensor, tokens: Tensor) -> Tensor:
        """Return logits of the word after each token, of shape ``(batch, tokens, words)``. Padding is masked."""
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        vectors = self.words(tokens) + self.places.weight[:length]
        return self.head(self.decoder(vectors, seen, tgt_mask=later, memory_key_padding_mask=object_mask))

    def forward(self, objects: Tensor, object_mask: Tensor) -> Tensor:
        """Return captions of the most likely words, of shape ``(batch, LONGEST + 1)``."""
        seen = self.look(objects)
        tokens = torch.full((len(objects), 1), START, device=objects.device)
        for _ in range(LONGEST + 1):
            likeliest = self.write(seen, object_mask, tokens)[:, -1:].argmax(dim=-1)
            tokens = torch.cat([tokens, likeliest], dim=1)
        return tokens[:, 1:]

    def token_loss(self, batch: dict) -> Tensor:
        """Return the mean cross-entropy of all tokens except padding, or 0 without such tokens."""
        tokens = batch["tokens"]
        logits = self.write(self.look(batch["objects"]), batch["object_mask"], tokens[:, :-1])
        total = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
        return total / max(1, sum(batch["weights"]))

    def training_step(self, batch: dict) -> tuple[Tensor, int]:
        """Return the loss, and its number of tokens as the weight of the micro-batch in the step."""
        loss = self.token_loss(batch)
        self.log("train_loss", loss, weight=sum(batch["weights"]))
        return loss, sum(batch["weights"])

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        """Log loss and accuracy, and a picture of the first rows with their predicted captions."""
        captions = self.evaluate(batch, "val")
        if batch_idx == 0:  # Only one process has this batch.
            image = picture(batch["objects"][:8], captions)
            for logger in self.trainer.loggers:
                logger.log_image("captions", image, self.global_step)

    def test_step(self, batch: dict) -> None:
        """Log loss and accuracy on test rows."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: dict, part: str) -> list[str]:
        """Log the mean loss over tokens and the share of correct captions; return the predicted captions."""
        predicted = self.describe(batch)
        right = [
            ours == caption for ours, caption in zip(predicted, batch["captions"], strict=True) if caption is not None
        ]
        self.log(f"{part}_loss", self.token_loss(batch), weight=sum(batch["weights"]), prog_bar=True)
        self.log(f"{part}_right", sum(right) / max(1, len(right)), weight=len(right), prog_bar=True)
        return predicted

    def describe(self, batch: dict) -> list[str]:
        """Return the model's caption of each row."""
        return [decode(tokens) for tokens in self(batch["objects"], batch["object_mask"])]

    def predict_step(self, batch: dict) -> list[dict[str, str]]:
        """Return the predicted and the true caption of each row."""
        pairs = zip(self.describe(batch), batch["captions"], strict=True)
        found = [{"predicted": ours, "caption": caption} for ours, caption in pairs]
        for each in found:
            self.accuracy.update(each["predicted"] == each["caption"])
        return found

    def on_predict_epoch_end(self) -> None:
        """Print the fraction of captions that are right in every word."""
        self.print(f"accuracy {self.accuracy.compute():.1%}")
        self.accuracy.reset()

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate that warms up, then falls along a cosine to the end of the run."""
        h = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), lr=h.learning_rate)
        schedule = cosine(optimizer, self.trainer.estimated_stepping_batches, warmup=h.warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def picture(objects: Tensor, captions: list[str]) -> np.ndarray:
    """Return a picture of rows with their captions, uint8 of shape ``(height, width)``.

    Args:
        objects: Images in [0, 1], of shape ``(rows, longest, 1, 28, 28)``.
        captions: Captions of the rows, at least one for each row.
    """
    rows = objects.float().cpu().squeeze(2).permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    page = Image.new("L", (rows.shape[1] + 230, rows.shape[0]))
    page.paste(Image.fromarray((rows * 255).byte().numpy()))
    for row, caption in zip(range(len(objects)), captions, strict=False):
        ImageDraw.Draw(page).text((rows.shape[1] + 6, 28 * row + 8), caption, fill=255)
    return np.asarray(page)
