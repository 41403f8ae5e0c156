"""Learning rates move as in the hand-written loop, and what configure_optimizers returned is checked."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lumen.errors import ConfigError
from tests.tasks import Regression, loader, quiet_trainer


def bare_trainer(tmp_path, **options):
    """A trainer that writes nothing."""
    return quiet_trainer(tmp_path, **{"logger": False, "enable_checkpointing": False} | options)


class Scheduled(Regression):
    """Trains with what a function makes of its parameters, and notes the learning rate of each step."""

    def __init__(self, configure):
        super().__init__()
        self.configure = configure
        self.rates = []

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch):
        self.log("val_loss", float((self.global_step // 5) % 3))  # 1, 2, 0, 1, 2, 0, ... over epochs of 5 steps

    def configure_optimizers(self):
        return self.configure(self.parameters())


SCHEDULES = {
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 13),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=40),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, total_iters=3), ExponentialLR(optimizer, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("interval", "frequency"), [("step", 1), ("step", 3), ("epoch", 1), ("epoch", 2)])
@pytest.mark.parametrize(("accumulate", "per_epoch"), [(1, 5), (2, 3)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR passes it itself
def test_rates_are_those_of_the_hand_written_loop(tmp_path, schedule, interval, frequency, accumulate, per_epoch):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = SCHEDULES[schedule](optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "frequency": frequency},
        }

    task = Scheduled(configure)
    bare_trainer(tmp_path, max_epochs=4, accumulate_grad_batches=accumulate).fit(task, loader(40, 8))

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = SCHEDULES[schedule](optimizer)
    expected = []
    for epoch in range(4):
        for step in range(per_epoch):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if interval == "step" and (epoch * per_epoch + step + 1) % frequency == 0:
                scheduler.step()
        if interval == "epoch" and (epoch + 1) % frequency == 0:
            scheduler.step()
    assert task.rates == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("form", ["dictionary", "two lists", "monitor beside it"])
def test_a_plateau_follows_its_monitor(tmp_path, form):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        entry = {"scheduler": plateau, "monitor": "val_loss"}
        return {
            "dictionary": {"optimizer": optimizer, "lr_scheduler": entry},
            "two lists": ([optimizer], [entry]),
            "monitor beside it": {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"},
        }[form]

    task = Scheduled(configure)
    bare_trainer(tmp_path, max_epochs=6, num_sanity_val_steps=0).fit(task, loader(40, 8), val_dataloaders=loader(8, 8))

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    expected = []
    for value in (1, 2, 0, 1, 2, 0):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        plateau.step(value)
    assert task.rates == expected


def test_a_plateau_may_step_with_every_step(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "interval": "step", "strict": False}]

    task = Scheduled(configure)
    bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
    assert task.rates == [0.1] * 7 + [
        0.05,
        0.025,
        0.0125,
    ]  # val_loss is known from step 5 on; from 6 on it is no better


def test_a_missing_monitor_is_an_error_that_names_what_was_logged(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "valid_loss"}]

    with pytest.raises(ConfigError, match=r"the monitor 'valid_loss' was never logged; logged so far: .*val_loss"):
        bare_trainer(tmp_path, max_epochs=2).fit(Scheduled(configure), loader(), val_dataloaders=loader(8, 8))


def test_a_missing_monitor_that_is_not_strict_leaves_the_rate_alone(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "valid_loss", "strict": False}
        return [optimizer], [scheduler]

    task = Scheduled(configure)
    bare_trainer(tmp_path, max_epochs=2).fit(task, loader(40, 8))
    assert task.rates == [0.1] * 10


def with_schedule(wrap):
    """A `configure_optimizers` that halves the rate after every epoch, in a given form."""

    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return wrap(optimizer, StepLR(optimizer, 1, gamma=0.5))

    return configure


@pytest.mark.parametrize(
    ("wrap", "last_rate"),
    [
        (lambda optimizer, scheduler: optimizer, 0.1),
        (lambda optimizer, scheduler: [optimizer], 0.1),
        (lambda optimizer, scheduler: (optimizer,), 0.1),
        (lambda optimizer, scheduler: ([optimizer], []), 0.1),
        (lambda optimizer, scheduler: {"optimizer": optimizer}, 0.1),
        (lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": None}, 0.1),
        (lambda optimizer, scheduler: ([optimizer], [scheduler]), 0.05),
        (lambda optimizer, scheduler: [[optimizer], [scheduler]], 0.05),
        (lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler}, 0.05),
        (lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}, 0.05),
        (lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler, "name": "halving"}]), 0.05),
        (lambda optimizer, scheduler: ([optimizer], [scheduler, StepLR(optimizer, 1, gamma=0.1)]), 0.1 * 0.5 * 0.1),
    ],
)
def test_every_documented_form_is_understood(tmp_path, wrap, last_rate):
    task = Scheduled(with_schedule(wrap))
    trainer = bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(40, 8))
    assert task.rates[-1] == pytest.approx(last_rate, rel=1e-12)
    assert task.optimizers() is trainer.optimizers[0]


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda parameters: None, "returned NoneType; expected a torch.optim.Optimizer"),
        (lambda parameters: 0.1, "returned float"),
        (lambda parameters: [], "returned 0 optimizers"),
        (lambda parameters: [SGD(parameters, lr=0.1)] * 2, "returned 2 optimizers"),
        (lambda parameters: {"optimiser": SGD(parameters, lr=0.1)}, "the keys optimiser"),
        (lambda parameters: {"optimizer": SGD(parameters, lr=0.1), "scheduler": 1}, "the keys optimizer, scheduler"),
        (lambda parameters: LBFGS(parameters), "LBFGS.step needs a closure"),
        (lambda parameters: SGD([], lr=0.1), "an optimizer without parameters"),
        (lambda parameters: AdamW(nn.Linear(2, 2).parameters()), "2 parameters that are not the task's"),
        (with_schedule(lambda optimizer, scheduler: ([optimizer], [3])), "expected a scheduler, found int"),
        (with_schedule(lambda optimizer, scheduler: ([optimizer], [{"interval": "step"}])), "'scheduler'"),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler, "intervall": "step"}])),
            "unknown key intervall",
        ),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler, "interval": "batch"}])),
            "interval must be .* found 'batch'",
        ),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler, "frequency": 0}])),
            "frequency must be .* found 0",
        ),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [ReduceLROnPlateau(optimizer)])),
            "ReduceLROnPlateau needs the name of a logged value",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(tmp_path, configure, message):
    task = Scheduled(configure)
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_epochs=1).fit(task, loader())
    assert task.rates == []


def test_a_function_given_to_fit_replaces_the_tasks(tmp_path):
    task = Scheduled(lambda parameters: SGD(parameters, lr=0.1))
    bare_trainer(tmp_path, max_steps=1).fit(
        task, loader(), configure_optimizers=lambda: AdamW(task.parameters(), lr=0.3)
    )
    assert task.rates == [0.3]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_epochs": 3}, 21),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 12),
        ({"max_epochs": 3, "global_batch_size": 20}, 9),
        ({"max_steps": 5}, 5),
        ({"max_steps": 5, "max_epochs": 3}, 5),
        ({"max_steps": 500, "max_epochs": 3, "limit_train_batches": 2}, 6),
    ],
)
def test_the_length_of_the_run_is_known_when_schedules_are_built(tmp_path, options, steps):
    class Planned(Scheduled):
        def configure_optimizers(self):
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    task = Planned(lambda parameters: SGD(parameters, lr=0.1))
    trainer = bare_trainer(tmp_path, **options)
    trainer.fit(task, loader(50, 8))
    assert task.planned == trainer.global_step == steps


def test_the_schedulers_can_be_read_from_the_task(tmp_path):
    task = Scheduled(with_schedule(lambda optimizer, scheduler: ([optimizer], [scheduler])))
    bare_trainer(tmp_path, max_steps=1).fit(task, loader())
    assert isinstance(task.lr_schedulers(), StepLR)
    task = Scheduled(with_schedule(lambda optimizer, scheduler: optimizer))
    bare_trainer(tmp_path, max_steps=1).fit(task, loader())
    assert task.lr_schedulers() is None
