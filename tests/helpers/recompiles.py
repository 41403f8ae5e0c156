"""Counters of torch's compiler in a run."""

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR

import lumen
from tests.helpers.tasks import FEATURES, Regression, bare_trainer, loader


class CountCompilations(lumen.Callback):
    """Callback that records the compiler's counters after each step and each validation.

    Attributes:
        seen: The epoch, then (graphs, graph breaks, traced pieces of code) since the run began.
    """

    def __init__(self):
        self.seen = []
        counters.clear()

    def on_step_end(self, trainer, task):
        found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]
        self.seen.append((trainer.current_epoch, found))

    on_validation_end = on_step_end

    def after(self, epoch):
        """Return the counts at the end of an epoch, including its validation."""
        return [found for of, found in self.seen if of == epoch][-1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(FEATURES, FEATURES), nn.Dropout(0.1)

    def forward(self, inputs):
        return inputs + self.dropout(torch.tanh(self.linear(inputs)))


class Deep(Regression):
    """Task with equal blocks between a first layer and a head; it logs, and its rate changes at every step."""

    def __init__(self, depth=2):
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.net(hidden)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        self.log_dict({"twice": 2 * loss, "batch": batch_idx}, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)), "interval": "step"}]


EPOCHS = 3


def count_compilations(tmp_path, task, *, setting=None, batches=(loader, 40), callbacks=(), **options):
    """Return the counts of a compiled run after each epoch."""
    make, samples, *others = batches
    counting = CountCompilations()
    options = {"max_epochs": EPOCHS, "compile": {"backend": "eager"} | (setting or {})} | options
    trainer = bare_trainer(tmp_path, callbacks=[*callbacks, counting], **options)
    trainer.fit(task, make(samples, *others), make(samples, *others))
    return [counting.after(epoch) for epoch in range(trainer.current_epoch)]
