"""Training whose last epochs are averaged, and the same with torch's tools."""

import torch
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.helpers.ema import Normed
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tasks import loader, quiet_trainer, regression_data

EPOCHS, START, SAMPLES, BATCH = 6, 3, 48, 8


class Scheduled(Normed):
    """Task without dropout, so that a plain loop draws the same numbers."""

    def __init__(self):
        super().__init__()
        self.net[3].p = 0.0

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [StepLR(optimizer, 2, 0.5)]


def train_with_swa(folder, callback, *callbacks, steps=None, task=None, **options):
    """Train; return the final parameters and the trainer."""
    task = Scheduled() if task is None else task
    length = {"max_epochs": EPOCHS} | ({} if steps is None else {"max_steps": steps})
    trainer = quiet_trainer(folder, callbacks=[callback, *callbacks], resume="auto", **length, **options)
    data = loader(SAMPLES, BATCH, shuffle=False, dtype=torch.float64)
    trainer.fit(task, data, loader(20, shuffle=False, dtype=torch.float64))
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}, trainer


def train_by_hand(annealing, strategy, rate=0.02, *, use_buffers=True):
    """Train with torch's tools; return the mean, and the rate of each epoch."""
    task = Scheduled()
    (optimizer,), (schedule,) = task.configure_optimizers()
    mean, rates = AveragedModel(task.net, use_buffers=use_buffers), []
    for epoch in range(EPOCHS):
        if epoch == START:
            swa = SWALR(optimizer, rate, annealing, strategy)
        rates.append(optimizer.param_groups[0]["lr"])
        inputs, targets = regression_data(SAMPLES, torch.float64)
        for batch in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            optimizer.zero_grad()
            task.training_step(batch).backward()
            optimizer.step()
        if epoch >= START:
            mean.update_parameters(task.net)
            swa.step()
        else:
            schedule.step()
    return {f"net.{name}": value.detach().numpy() for name, value in mean.module.state_dict().items()}, rates
