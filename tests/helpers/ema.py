"""Task with batch norm, and its averages computed by hand."""

import torch
from torch import nn

import lumen
from tests.helpers.tasks import FEATURES, loader, quiet_trainer


class Normed(lumen.TaskModule):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.save_hyperparameters(ignore="dtype")
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)
        self.net = nn.Sequential(*layers).to(dtype)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class RecordStates(lumen.Callback):
    """Callback that records the state of the task after each step."""

    def __init__(self):
        self.states = []

    def on_step_end(self, trainer, task):
        self.states.append({name: each.detach().clone() for name, each in task.state_dict().items()})


def average_by_hand(states, first, decay):
    """Return the average after the steps with the given states."""
    average = {name: each.clone() for name, each in first.items()}
    for state in states:
        for name, each in average.items():
            each.lerp_(state[name], 1.0 - decay) if each.is_floating_point() else each.copy_(state[name])
    return average


def fit(folder, *callbacks, task=None, **options):
    options = {"max_steps": 9, "log_every_n_steps": 1, "val_check_interval": 4, "resume": "auto"} | options
    task = Normed() if task is None else task
    trainer = quiet_trainer(folder, callbacks=list(callbacks), **options)
    trainer.fit(task, loader(48, dtype=torch.float64), loader(20, shuffle=False, dtype=torch.float64))
    return trainer, task
