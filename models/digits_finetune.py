"""Fine-tuning: a network that reads one kind of digits learns to read another from few examples."""

import torch
from torch import Tensor

from lumen.optim import layer_decay_groups, linear
from models.digits import DigitsCNN


class FineTunedCNN(DigitsCNN):
    """A `DigitsCNN` that starts from trained weights.

    Edges and strokes are the same in all images, so the first convolution is frozen. Above it, each layer has a lower
    learning rate than the next layer.

    Args:
        learning_rate: Learning rate of AdamW for the last layer.
        weight_decay: Weight decay of AdamW.
        dropout: Dropout probability, in [0, 1).
        layer_decay: Learning rate of a layer, as a fraction of the learning rate of the layer above, in (0, 1].
    """

    def __init__(
        self,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        dropout: float = 0.25,
        layer_decay: float = 0.5,
    ):
        super().__init__(learning_rate, weight_decay, dropout)
        self.net[0].requires_grad_(False)

    def predict_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return the predicted digit of each image and its label, both int64 of shape ``(batch,)``."""
        images, labels = batch
        digits = self(images).argmax(dim=-1)
        self.accuracy.update(digits, labels)
        return {"predicted": digits, "label": labels}

    def on_predict_epoch_end(self) -> None:
        """Print the accuracy over all images."""
        self.print(f"accuracy {self.accuracy.compute():.1%}")
        self.accuracy.reset()

    def configure_optimizers(self) -> dict:
        """Return AdamW with a learning rate for each layer that is not frozen. All fall to 0 at the end of the run."""
        h = self.hparams
        below_the_last = ["net.3", "net.7"]
        groups = layer_decay_groups(self, h.learning_rate, h.layer_decay, below_the_last, weight_decay=h.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        schedule = linear(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
