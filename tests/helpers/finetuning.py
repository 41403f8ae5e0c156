"""Task with a backbone that is unfrozen in training, and its training by hand."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import lumen
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tasks import FEATURES, loader, quiet_trainer, regression_data

EPOCHS, BATCH, SAMPLES = 6, 8, 40


class Backbone(lumen.TaskModule):
    def __init__(self, norm=True):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()
        self.backbone = nn.Sequential(*layers).double()
        self.head = nn.Linear(8, 1).double()

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def training_step(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.02)
        return [optimizer], [StepLR(optimizer, 4, 0.5)]


class RecordRates(lumen.Callback):
    """Callback that records the learning rates of the last step of each epoch."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_end(self, trainer, task):
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def finetune(folder, callback, task=None, steps=None, **options):
    """Return the final parameters and buffers, and the rates of the epochs."""
    task, rates = Backbone() if task is None else task, RecordRates()
    length = {"max_epochs": EPOCHS} if steps is None else {"max_steps": steps}
    trainer = quiet_trainer(folder, callbacks=[callback, rates], resume="auto", **length, **options)
    trainer.fit(task, loader(SAMPLES, BATCH, shuffle=False, dtype=torch.float64))
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}, rates.seen


def finetune_by_hand(unfrozen_at=2, train_bn=True):
    """Train in a plain loop; the rate of the backbone doubles up to the rate of the head."""
    task = Backbone()
    linear, norm = [task.backbone[0], task.backbone[3]], task.backbone[1]
    for module in linear if train_bn else [*linear, norm]:
        module.requires_grad_(False)
    norm.track_running_stats = train_bn
    (optimizer,), (schedule,) = task.configure_optimizers()
    inputs, targets = regression_data(SAMPLES, torch.float64)
    seen = []
    for epoch in range(EPOCHS):
        rest = optimizer.param_groups[0]["lr"]
        if epoch == unfrozen_at:
            rate = rest * 0.1
            for module in linear:
                module.requires_grad_(True)
            new = [each for module in linear for each in module.parameters()]
            optimizer.add_param_group({"params": new, "lr": rate})
        elif epoch > unfrozen_at:
            rate = min(rate * 2.0, rest)
            optimizer.param_groups[1]["lr"] = rate
        for batch in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            optimizer.zero_grad()
            task.training_step(batch).backward()
            optimizer.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
        schedule.step()
    return {name: value.detach().numpy() for name, value in task.state_dict().items()}, seen
