"""Helpers for several optimizers as one."""

from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import OneCycleLR

from lumen.optim import MultiOptimizer
from tests.helpers.tasks import Regression

PAIRS = {
    "SGD, AdamW": (lambda held: SGD(held, lr=0.05, momentum=0.9), lambda held: AdamW(held, lr=0.01, amsgrad=True)),
    "Muon, fused AdamW": (lambda held: Muon(held, lr=0.02), lambda held: AdamW(held, lr=0.01, fused=True)),
    "foreach AdamW, SGD": (lambda held: AdamW(held, lr=0.01, foreach=True), lambda held: SGD(held, lr=0.05)),
}


def make_inner_optimizers(module, kinds="SGD, AdamW"):
    """Return one optimizer for the matrices of a module, and one for the rest."""
    first, second = PAIRS[kinds]
    held = (
        [each for each in module.parameters() if each.ndim == 2],
        [each for each in module.parameters() if each.ndim < 2],
    )
    return [first(held[0]), second(held[1])]


def make_task(kind=None, dropout=0.0, **options):
    """Return a task with options that differ from its class."""
    task = (kind or Both)(dropout=dropout)
    vars(task).update(options)
    return task


class Both(Regression):
    """Task that trains with two optimizers and a schedule; its first gradients may overflow in half precision."""

    kinds, overflow, wrap = "SGD, AdamW", 1.0, MultiOptimizer

    def training_step(self, batch):
        return super().training_step(batch) * self.overflow

    def configure_optimizers(self):
        optimizer = self.wrap(make_inner_optimizers(self, self.kinds))
        schedule = OneCycleLR(optimizer, 0.05, total_steps=40, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
