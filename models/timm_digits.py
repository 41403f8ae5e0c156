"""A vision transformer of timm reads handwritten digits, trained with timm's MixUp and CutMix."""

from typing import Any

import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import lumen


class TimmClassifier(lumen.TaskModule):
    """Any model of `timm.create_model`, as a classifier of digits.

    A batch is ``[images, labels]``: float32 of shape ``(batch, 1, 28, 28)``, and digits, int64 of shape ``(batch,)``.

    Args:
        name: Name of the model in `timm.list_models()`.
        options: Options of `timm.create_model`: sizes, `drop_path_rate`, `pretrained`.
        mixup_alpha: Parameter of MixUp's beta distribution, 0 for no MixUp.
        cutmix_alpha: Parameter of CutMix's beta distribution, 0 for no CutMix.
        smoothing: Label smoothing.
        learning_rate: Highest learning rate of AdamW.
        weight_decay: Weight decay of AdamW. timm decays matrices, but not biases and norms.
        warmup_epochs: Number of epochs until the highest learning rate.
    """

    def __init__(
        self,
        name: str = "vit_tiny_patch16_224",
        options: dict[str, Any] | None = None,
        mixup_alpha: float = 0.2,
        cutmix_alpha: float = 0.0,
        smoothing: float = 0.1,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        warmup_epochs: int = 2,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = timm.create_model(name, in_chans=1, num_classes=10, **options or {})
        self.mixup = Mixup(mixup_alpha, cutmix_alpha, label_smoothing=smoothing, num_classes=10)
        self.soft_cross_entropy = SoftTargetCrossEntropy()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape ``(batch, 10)``."""
        return self.net(images)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the cross-entropy of the mixed labels. MixUp draws from numpy, whose generator Lumen seeds too."""
        images, labels = self.mixup(*batch)
        loss = self.soft_cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        """Log loss and accuracy of unmixed images."""
        images, labels = batch
        logits = self(images)
        self.accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def predict_step(self, batch: list[Tensor]) -> Tensor:
        """Return the most likely digit of each image, int64 of shape ``(batch,)``."""
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> tuple[list, list]:
        """Return an optimizer and a schedule of timm."""
        h = self.hparams
        optimizer = create_optimizer_v2(self.net, opt="adamw", lr=h.learning_rate, weight_decay=h.weight_decay)
        schedule = CosineLRScheduler(
            optimizer,
            t_initial=self.trainer.max_epochs,
            lr_min=h.learning_rate / 100,
            warmup_t=h.warmup_epochs,
            warmup_lr_init=h.learning_rate / 10,
            warmup_prefix=True,
        )
        return [optimizer], [schedule]

    def lr_scheduler_step(self, scheduler: CosineLRScheduler, metric: float | None) -> None:
        """Step the schedule with the number of the next epoch, as timm requires."""
        scheduler.step(epoch=self.current_epoch + 1)
