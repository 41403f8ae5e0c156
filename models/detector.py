"""A detector of torchvision that finds and reads digits."""

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

import lumen
from lumen.optim import cosine

Batch: TypeAlias = tuple[list[Tensor], list[dict[str, Tensor]]]


class Detector(lumen.TaskModule):
    """FCOS (Tian et al. 2019, "FCOS: Fully Convolutional One-Stage Object Detection") on a small network.

    A batch is ``(images, targets)`` as torchvision's detectors take it: see `datamodules.scenes.Scenes`.

    Args:
        width: Number of channels of the features.
        learning_rate: Highest learning rate of AdamW.
    """

    def __init__(self, width: int = 64, learning_rate: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        backbone = nn.Sequential(block(1, width // 4), block(width // 4, width // 2), block(width // 2, width))
        backbone.out_channels = width
        self.net = FCOS(
            backbone,
            num_classes=11,  # ten digits, and the background
            min_size=64,
            max_size=64,
            image_mean=[0.5],
            image_std=[0.5],
            anchor_generator=AnchorGenerator(((24,),), ((1.0,),)),
        )
        self.found = MeanAveragePrecision(iou_thresholds=[0.5, 0.75])

    def training_step(self, batch: Batch) -> Tensor:
        """Return the sum of the losses that torchvision's detectors return in training."""
        losses = self.net(*batch)
        self.log_dict(losses)
        return sum(losses.values())

    def validation_step(self, batch: Batch) -> None:
        """Update the metric, which counts every image once, with predicted boxes, labels and scores."""
        images, targets = batch
        self.found.update(self.net(images), targets)

    def on_validation_epoch_end(self) -> None:
        """Log two of the metric's values."""
        values = self.found.compute()
        self.log_dict({"map": values["map"], "map_50": values["map_50"]}, prog_bar=True)
        self.found.reset()

    def predict_step(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Return boxes, labels and scores of each image."""
        return self.net(batch[0])

    def configure_optimizers(self) -> dict:
        """Return AdamW with a warm-up and a cosine over the whole run."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        schedule = cosine(optimizer, self.trainer.estimated_stepping_batches, floor=0.05, warmup=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a convolution that halves the image, with a norm that does not depend on the batch."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())
