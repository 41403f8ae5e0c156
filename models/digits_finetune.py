"""Fine-tuning: a network that reads one kind of digits learns to read another from few examples."""

import torch
from torch import Tensor

from lumen.optim import layer_decay_groups, linear
from models.digits import DigitsCNN


class FineTunedCNN(DigitsCNN):
    """A `DigitsCNN` to be started from trained weights.

    Edges and strokes are the same everywhere: the first convolution stays as it is. Above it, each layer learns slower
    than the next one.

    Args:
        learning_rate: AdamW's, for the last layer.
        weight_decay: AdamW's.
        dropout: Probability with which a hidden unit is dropped in training, in [0, 1).
        layer_decay: Learning rate of a layer, as a fraction of that of the layer above, in (0, 1].
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
        """AdamW with a learning rate for each layer that is not frozen; all of them fall to 0 with the run."""
        h = self.hparams
        below_the_last = ["net.3", "net.7"]
        groups = layer_decay_groups(self, h.learning_rate, h.layer_decay, below_the_last, weight_decay=h.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        schedule = linear(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
