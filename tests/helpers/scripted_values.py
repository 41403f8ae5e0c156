"""Tasks that log a given sequence of validation values, one per epoch of two steps."""

import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.helpers.tasks import quiet_trainer

LOSSES, SCORES = [5, 4, 6, 7, 8, 9], [10, 30, 20, 15, 12, 11]


class Scripted(lumen.TaskModule):
    """Task that logs a given sequence of validation values, one per epoch of two steps."""

    def __init__(self, values):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.values = values

    def training_step(self, batch):
        return (self.weight - batch[0]).pow(2).mean()

    def validation_step(self, batch):
        if not self.trainer.sanity_checking:
            self.log("score", self.values[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_scripted(tmp_path, values, callbacks, **options):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, **{"max_epochs": len(values), **options})
    trainer.fit(Scripted(values), data, val_dataloaders=data)
    return trainer


class Both(lumen.TaskModule):
    """Task that logs a loss, where less is better, and a score, where more is better."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch):
        return (self.weight - batch[0]).pow(2).mean()

    def validation_step(self, batch):
        epoch = self.current_epoch % len(LOSSES)  # an evaluation after `fit` is in the next epoch
        self.log("loss", LOSSES[epoch])
        self.log("score", SCORES[epoch])

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.1)
