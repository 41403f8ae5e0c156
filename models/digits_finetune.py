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

    def predict_step(self, batch: list[Tensor]) -> list[str]:
        """The images that are read wrong, drawn with characters."""
        images, labels = batch
        digits = self(images).argmax(dim=-1)
        wrong = (digits != labels).nonzero().flatten().tolist()
        return [f"{draw(images[i, 0])}\nread as {digits[i]}, is {labels[i]}" for i in wrong]

    def configure_optimizers(self) -> dict:
        """AdamW with a learning rate for each layer that is not frozen; all of them fall to 0 with the run."""
        h = self.hparams
        below_the_last = ["net.3", "net.7"]
        groups = layer_decay_groups(self, h.learning_rate, h.layer_decay, below_the_last, weight_decay=h.weight_decay)
        optimizer = torch.optim.AdamW(groups)
        schedule = linear(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def draw(image: Tensor) -> str:
    """An image in [0, 1], of shape ``(height, width)``, as text; a character is about two pixels high."""
    shades = " .:-=+*#%@"
    return "\n".join("".join(shades[round(9 * value)] for value in row) for row in image[::2].tolist())
