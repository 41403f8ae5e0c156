"""A training that prunes, and what it is by a loop with torch's own tools."""

import torch
from torch import nn
from torch.nn.utils import prune

from tests.helpers.optimizer_state import whole
from tests.helpers.tasks import Regression, loader, quiet_trainer, regression_data

EPOCHS, SAMPLES, BATCH, CLIP = 3, 24, 4, 0.5


def task_with(optimizer="AdamW"):
    return Regression(dtype=torch.float64, optimizer=optimizer, lr=0.05)


def pruned(folder, callback, *callbacks, steps=None, task=None, optimizer="AdamW", **options):
    """Where a task ends, whole, and its trainer."""
    task = task_with(optimizer) if task is None else task
    length = {"max_epochs": EPOCHS} | ({} if steps is None else {"max_steps": steps})
    trainer = quiet_trainer(
        folder, callbacks=[callback, *callbacks], resume="auto", gradient_clip_val=CLIP, **length, **options
    )
    trainer.fit(task, loader(SAMPLES, BATCH, shuffle=False, dtype=torch.float64), loader(8, dtype=torch.float64))
    return {name: value.numpy() for name, value in whole(task).items()}, trainer


def by_hand(prune_at, *, optimizer="AdamW", resets=False, names=("weight", "bias")):
    """The same by hand: `prune_at` prunes a list of pairs of a module and a name, at the end of an epoch."""
    task = task_with(optimizer)
    layers = [each for each in task.net if isinstance(each, nn.Linear)]
    first = {(layer, name): getattr(layer, name).detach().clone() for layer in layers for name in names}
    moving = task.configure_optimizers()
    parameters = [*task.parameters()]  # the same objects whatever they are called
    inputs, targets = regression_data(SAMPLES, torch.float64)
    for epoch in range(EPOCHS):
        for batch in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            moving.zero_grad()
            nn.functional.mse_loss(task.net(batch[0]), batch[1]).backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            moving.step()
        task.net(inputs)  # torch's tools compare what the last forward has made of the newest parameters
        prune_at(epoch, [(layer, name) for name in names for layer in layers])
        if resets:
            for (layer, name), value in first.items():
                if hasattr(layer, f"{name}_orig"):
                    getattr(layer, f"{name}_orig").data.copy_(value)
    for layer in layers:
        for name in names:
            if prune.is_pruned(layer) and hasattr(layer, f"{name}_orig"):
                prune.remove(layer, name)
    return {name: value.detach().numpy() for name, value in task.named_parameters()}
