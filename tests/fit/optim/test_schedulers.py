"""Schedulers: learning rates equal the hand-written loop, and the result of configure_optimizers is checked."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
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

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.errors import ConfigError
from lumen.optim import Warmup, cosine
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights


class Scheduled(Regression):
    """Task with an optimizer that a function makes of its parameters; it records the learning rate of each step."""

    def __init__(self, configure):
        super().__init__()
        self.hparams.clear()  # a function is not plain data
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


# ---------------------------------------------------------------------- a warm-up in steps before a schedule in epochs

LATER = {
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "StepLR": lambda optimizer: StepLR(optimizer, 2),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=9),
    "cosine": lambda optimizer: cosine(optimizer, 6),
}


def with_warmup(form, schedule, steps, **options):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = schedule(optimizer)
        if form == "one entry":
            return [optimizer], [{"scheduler": scheduler, "warmup_steps": steps, "warmup_start": 0.2, **options}]
        warmup = {"scheduler": Warmup(scheduler, steps, 0.2), "interval": "step"}
        return [optimizer], [warmup, {"scheduler": scheduler, **options}]

    return configure


@pytest.mark.parametrize("form", ["one entry", "two entries"])
@pytest.mark.parametrize("schedule", LATER)
@pytest.mark.parametrize("steps", [1, 5, 7])
@pytest.mark.parametrize("frequency", [1, 2])
def test_epochs_count_from_the_end_of_warmup(tmp_path, form, schedule, steps, frequency):
    task = Scheduled(with_warmup(form, LATER[schedule], steps, interval="epoch", frequency=frequency))
    bare_trainer(tmp_path, max_epochs=6).fit(task, loader(40, 8))

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = LATER[schedule](optimizer)
    target = optimizer.param_groups[0]["lr"]
    expected = []
    for step in range(30):
        warming = step < steps
        expected.append(target * (0.2 + 0.8 * step / steps) if warming else optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (step + 1) % (5 * frequency) == 0 and step + 1 >= steps:
            scheduler.step()
    assert task.rates == pytest.approx(expected, rel=1e-14)
    assert len(set(expected)) > 2


@pytest.mark.parametrize("form", ["one entry", "two entries"])
@pytest.mark.parametrize("schedule", LATER)
def test_warmup_steps_equal_the_warmup_scheduler(tmp_path, form, schedule):
    tasks = [
        Scheduled(with_warmup(form, LATER[schedule], 4, interval="step")),
        Scheduled(with_schedule(lambda optimizer, _: ([optimizer], [
            {"scheduler": Warmup(LATER[schedule](optimizer), 4, 0.2), "interval": "step"}
        ]))),
    ]  # fmt: skip
    for task in tasks:
        bare_trainer(tmp_path, max_steps=9).fit(task, loader(40, 8))
    assert tasks[0].rates == tasks[1].rates
    assert len(set(tasks[0].rates)) >= 6


def make_warmup_in_epochs(schedule, **options):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [{"scheduler": schedule(optimizer), "warmup_epochs": 2, **options}]

    return configure


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, [1 / 3, 2 / 3]),
        ({"warmup_start": 0.5}, [0.5, 0.75]),
        ({"warmup_start": 0.0}, [0.0, 0.5]),
        ({"warmup_factor": lambda epoch: 0.1 * (1 + epoch) ** 2}, [0.1, 0.4]),
    ],
)
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_warmup_may_count_epochs_and_use_a_function(tmp_path, options, shares, interval):
    schedule = make_warmup_in_epochs(lambda optimizer: ExponentialLR(optimizer, 0.9), interval=interval, **options)
    task = Scheduled(schedule)
    bare_trainer(tmp_path, max_epochs=4).fit(task, loader(40, 8))
    expected = [0.1 * share for share in shares for _ in range(5)]
    moves = [step if interval == "step" else step // 5 for step in range(10)]
    assert task.rates == pytest.approx(expected + [0.1 * 0.9**move for move in moves], rel=1e-14)


@pytest.mark.parametrize("cut", [3, 5, 7, 10, 12, 20])
def test_warmup_function_then_plateau_resumes_exactly(tmp_path, cut):
    def train(folder, **options):
        task = Scheduled(
            make_warmup_in_epochs(
                lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
                monitor="val_loss",
                warmup_factor=lambda epoch: [0.05, 0.3][int(epoch)],
            )
        )
        trainer = quiet_trainer(folder, num_sanity_val_steps=0, log_level="CRITICAL", **options)
        trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
        return task

    whole = train(tmp_path / "whole", max_steps=34)
    first, second = train(tmp_path, max_steps=cut), train(tmp_path, max_steps=34, resume="auto")
    assert first.rates + second.rates == whole.rates
    assert whole.rates[:10] == [0.1 * 0.05] * 5 + [0.1 * 0.3] * 5
    assert whole.rates[10] == 0.1 * 0.5  # the value at the end of the warm-up is the first one that the schedule uses
    assert whole.rates[-1] < 0.05
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 3}, "warmup_steps = 3 and warmup_epochs = 2 both set the length"),
        ({"warmup_start": 0.1, "warmup_factor": float}, "warmup_start and warmup_factor both set the beginning"),
        ({"warmup_epochs": 0, "warmup_factor": float}, "warmup_factor is for a warm-up. Set warmup_steps"),
        ({"warmup_epochs": -1}, "warm-up steps = -1"),
    ],
)
def test_contradictory_warmup_options_are_rejected(tmp_path, options, message):
    task = Scheduled(make_warmup_in_epochs(lambda optimizer: ExponentialLR(optimizer, 0.9), **options))
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_epochs=1).fit(task, loader(40, 8))


@pytest.mark.parametrize("schedule", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("cut", [3, 5, 7, 10, 12])
def test_warmup_before_epoch_schedule_resumes_exactly(tmp_path, schedule, cut):
    """The run resumes within the warm-up of seven steps, at its end, before and after an epoch's end, and later."""

    def train(folder, **options):
        later = LATER.get(schedule, lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
        task = Scheduled(with_warmup("one entry", later, 7, monitor="val_loss"))
        trainer = quiet_trainer(folder, num_sanity_val_steps=0, log_level="CRITICAL", **options)
        trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
        return task

    whole = train(tmp_path / "whole", max_steps=24)
    first, second = train(tmp_path, max_steps=cut), train(tmp_path, max_steps=24, resume="auto")
    assert first.rates + second.rates == whole.rates
    assert len(set(whole.rates)) > 7
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize(("form", "interval"), [("Warmup", "step"), ("Warmup", "epoch"), ("warmup_steps", "step")])
def test_plateau_in_warmup_may_be_one_entry(tmp_path, form, interval):
    steps = 7 if interval == "step" else 2

    def plateau(optimizer):
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    def one(parameters):
        optimizer = SGD(parameters, lr=0.1)
        if form == "warmup_steps":
            return [optimizer], [{"scheduler": plateau(optimizer), "monitor": "val_loss", "warmup_steps": steps}]
        entry = {"scheduler": Warmup(plateau(optimizer), steps), "interval": interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": entry}

    def two(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = plateau(optimizer)
        warmup = {"scheduler": Warmup(scheduler, steps), "interval": interval}
        return [optimizer], [warmup, {"scheduler": scheduler, "monitor": "val_loss"}]

    tasks = [Scheduled(one), Scheduled(two)]
    for task in tasks:
        trainer = bare_trainer(tmp_path, max_epochs=6, num_sanity_val_steps=0)
        trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
    assert tasks[0].rates == tasks[1].rates
    assert tasks[0].rates[-1] < 0.1
    assert tasks[0].rates[0] == 0.0


def test_plateau_is_checked_every_n_epochs(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "frequency": 2}]

    task = Scheduled(configure)
    trainer = bare_trainer(tmp_path, max_epochs=9, num_sanity_val_steps=0)
    trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    plateau, expected = ReduceLROnPlateau(optimizer, factor=0.5, patience=0), []
    for epoch, value in enumerate((1, 2, 0, 1, 2, 0, 1, 2, 0)):
        expected += [optimizer.param_groups[0]["lr"]] * 5
        if epoch % 2:
            plateau.step(value)
    assert task.rates == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_checkpoint_holds_the_schedule_after_the_update(tmp_path, interval):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": interval}]

    class Saving(lumen.Callback):
        def on_step_end(self, trainer, task):
            trainer.save_checkpoint(tmp_path / f"step-{trainer.global_step:08d}")

    bare_trainer(tmp_path, max_epochs=2, callbacks=[Saving()]).fit(Scheduled(configure), loader(40, 8))
    found = find_checkpoints(tmp_path)
    moves = [Checkpoint.open(path).state["schedulers"][0]["last_epoch"] for path in found]
    assert moves == (list(range(1, 11)) if interval == "step" else [0, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    rates = [Checkpoint.open(path).state["optimizer"]["groups"][0]["lr"] for path in found]
    assert rates == [0.1 * 0.5**move for move in moves]


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


def test_plateau_logs_each_reduction_once(tmp_path):
    def configure(parameters):
        weight, bias, *rest = parameters
        groups = [{"params": [weight]}, {"params": [bias], "lr": 0.01}, {"params": rest}]
        optimizer = SGD(groups, lr=0.1)
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "monitor": "val_loss"}]

    trainer = quiet_trainer(tmp_path, max_epochs=5, num_sanity_val_steps=0, log_level="INFO")
    trainer.fit(Scheduled(configure), loader(40, 8), val_dataloaders=loader(8, 8))
    said = [line.split(" INFO ")[1] for line in (trainer.run_directory / "run.log").read_text().splitlines()]
    assert [line for line in said if "learning rate" in line] == [
        "val_loss 2 is not better than 1: learning rate 0.1 -> 0.05, 0.01 -> 0.005",
        "val_loss 1 is not better than 0: learning rate 0.05 -> 0.025, 0.005 -> 0.0025",
        "val_loss 2 is not better than 0: learning rate 0.025 -> 0.0125, 0.0025 -> 0.00125",
    ]


class Improving(Scheduled):
    """Task whose validation values decrease at each step, except for given ones."""

    def __init__(self, *, names=("val_loss",), worse_at=None, **options):
        def configure(parameters):
            optimizer = SGD(parameters, lr=0.1)
            plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", **options}]

        super().__init__(configure)
        self.names, self.worse_at = names, worse_at

    def validation_step(self, batch):
        for name in self.names:
            self.log(name, 9.0 if self.global_step == self.worse_at else -float(self.global_step))


def improve(tmp_path, task, **options):
    trainer = quiet_trainer(tmp_path, **{"num_sanity_val_steps": 0, "log_level": "CRITICAL"} | options)
    trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
    return task.rates


def test_a_plateau_does_not_see_the_sanity_check(tmp_path):
    """Epochs without a validation have no value."""
    task = Improving(strict=False)
    improve(tmp_path, task, num_sanity_val_steps=2, check_val_every_n_epoch=10, max_epochs=4)
    assert task.lr_schedulers().best == float("inf")


@pytest.mark.parametrize(
    ("moves", "validates", "worse_at", "first"),
    [
        ({"strict": False}, {"check_val_every_n_epoch": 2}, 20, 20),
        ({"strict": False, "interval": "step"}, {}, 10, 10),
        ({"strict": False, "interval": "step", "frequency": 3}, {"val_check_interval": 7}, 14, 15),
        ({}, {"val_check_interval": 0.4}, 14, 15),
    ],
)
@pytest.mark.parametrize("cut", [None, 3, 14])
def test_a_plateau_moves_only_with_a_new_value(tmp_path, moves, validates, worse_at, first, cut):
    """Every value improves except for one validation, so the rate falls once, wherever the run was resumed."""
    tasks = [Improving(worse_at=worse_at, **moves) for _ in range(2)]
    before = improve(tmp_path, tasks[0], max_steps=cut, **validates) if cut else []
    rates = before + improve(tmp_path, tasks[1], max_steps=30, resume="auto", **validates)
    assert rates == [0.1] * first + [0.05] * (30 - first)


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_restored_value_does_not_hide_missing_monitor(tmp_path, interval):
    moves = {"interval": interval, "frequency": 5 if interval == "step" else 1}
    improve(tmp_path, Improving(**moves), max_epochs=2)
    with pytest.raises(ConfigError, match=r"the monitor 'val_loss' has no value .* logged names: (loss, )?other\."):
        improve(tmp_path, Improving(names=["other"], **moves), max_epochs=4, resume="auto")
    lenient = Improving(names=["other"], strict=False, **moves)
    assert improve(tmp_path, lenient, max_epochs=4, resume="auto")[-1] == 0.1


def test_missing_monitor_raises_and_lists_logged_names(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "valid_loss"}]

    with pytest.raises(ConfigError, match=r"the monitor 'valid_loss' has no value of .* logged names: .*val_loss"):
        bare_trainer(tmp_path, max_epochs=2).fit(Scheduled(configure), loader(), val_dataloaders=loader(8, 8))


def test_non_strict_missing_monitor_keeps_the_rate(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "valid_loss", "strict": False}
        return [optimizer], [scheduler]

    task = Scheduled(configure)
    bare_trainer(tmp_path, max_epochs=2).fit(task, loader(40, 8))
    assert task.rates == [0.1] * 10


def with_schedule(wrap):
    """Return a `configure_optimizers` that halves the rate after every epoch, in a given form."""

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
        (lambda optimizer, scheduler: ([optimizer], scheduler), 0.05),
        (lambda optimizer, scheduler: ([optimizer], {"scheduler": scheduler, "reduce_on_plateau": False}), 0.05),
        (lambda optimizer, scheduler: [{"optimizer": optimizer, "lr_scheduler": scheduler}], 0.05),
        (lambda optimizer, scheduler: ({"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}},), 0.05),
        (lambda optimizer, scheduler: ([optimizer], [scheduler, StepLR(optimizer, 1, gamma=0.1)]), 0.1 * 0.5 * 0.1),
    ],
)
def test_every_documented_form_is_understood(tmp_path, wrap, last_rate):
    task = Scheduled(with_schedule(wrap))
    trainer = bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(40, 8))
    assert task.rates[-1] == pytest.approx(last_rate, rel=1e-12)
    assert task.optimizers().optimizer is task.optimizers(use_pl_optimizer=False) is trainer.optimizers[0]


class Stateless:
    def step(self):
        pass


class ByUpdate:
    """Scheduler whose method has another name than `step`, as of timm."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, 0

    def step_update(self, number):
        self.updates = number

    def state_dict(self):
        return {"updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]


class Updating(Scheduled):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step_update(self.global_step)


def test_scheduler_without_step_is_moved_by_the_task(tmp_path):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [{"scheduler": ByUpdate(optimizer), "interval": "step", "name": "mine"}]

    trainer = bare_trainer(tmp_path, max_steps=3)
    trainer.fit(Updating(configure), loader(40, 8))
    (config,) = trainer.lr_scheduler_configs
    assert (config.scheduler.updates, config.name, config.reduce_on_plateau) == (3, "mine", False)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda parameters: None, r"returned None, but fit needs an optimizer\. To train nothing"),
        (lambda parameters: {"optimizer": SGD(parameters), "scheduler": None}, r'Write "lr_scheduler" instead of'),
        (lambda parameters: {"optimizer": SGD(parameters), "frequency": 2}, "optimizers take turns in manual"),
        (lambda parameters: ([SGD(parameters)], [Stateless()]), "found Stateless, which has no state_dict"),
        (lambda parameters: ([sgd := SGD(parameters)], [ByUpdate(sgd)]), "found ByUpdate, which has no step. To"),
        (lambda parameters: 0.1, "returned float"),
        (
            with_schedule(lambda optimizer, scheduler: (optimizer, scheduler)),
            r"returned StepLR; expected a torch.optim.Optimizer, \(\[optimizer\], \[scheduler\]\)",
        ),
        (
            with_schedule(
                lambda optimizer, scheduler: ([optimizer], {"scheduler": scheduler, "reduce_on_plateau": True})
            ),
            "reduce_on_plateau is set for StepLR",
        ),
        (lambda parameters: [], "returned 0 optimizers"),
        (lambda parameters: [SGD(parameters, lr=0.1)] * 2, "returned 2 optimizers"),
        (lambda parameters: {"optimiser": SGD(parameters, lr=0.1)}, "the keys optimiser"),
        (lambda parameters: {"optimizer": SGD(parameters, lr=0.1), "scheduler": 1}, "the keys optimizer, scheduler"),
        (lambda parameters: SGD([], lr=0.1), "an optimizer without parameters"),
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
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [Warmup(ReduceLROnPlateau(optimizer), 3)])),
            "ReduceLROnPlateau needs the name of a logged value",
        ),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [scheduler, {"scheduler": scheduler}])),
            "a scheduler has two entries and would move twice",
        ),
        (
            with_schedule(
                lambda optimizer, scheduler: (
                    [optimizer],
                    [{"scheduler": cosine(optimizer, 9, warmup=3), "warmup_steps": 3}],
                )
            ),
            "warmup_steps = 3, but this Warmup warms up itself",
        ),
        (
            with_schedule(lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler, "warmup_steps": -3}])),
            "warm-up steps = -3: expected at least 1",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_training(tmp_path, configure, message):
    task = Scheduled(configure)
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_epochs=1).fit(task, loader())
    assert task.rates == []


def test_parameter_missing_from_optimizer_is_named(tmp_path, caplog):
    task = Scheduled(lambda parameters: SGD(list(parameters)[1:], lr=0.1))
    with caplog.at_level("WARNING", "lumen"):
        bare_trainer(tmp_path, max_steps=2, log_level="WARNING").fit(task, loader())
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith(
            "the optimizer does not have 1 trainable parameters, which will not change: net.0.weight."
        )
        caplog.clear()
        task = Scheduled(lambda parameters: SGD(list(parameters)[1:], lr=0.1))
        task.net[0].weight.requires_grad_(False)
        bare_trainer(tmp_path, max_steps=2, log_level="WARNING").fit(task, loader())
        assert not caplog.records


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
def test_estimated_stepping_batches_are_known_to_configure_optimizers(tmp_path, options, steps):
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


@pytest.mark.parametrize(
    "other", [lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
              lambda optimizer: StepLR(optimizer, 1), lambda optimizer: LambdaLR(optimizer, float)]
)  # fmt: skip
def test_schedules_that_overwrite_each_other_are_rejected(tmp_path, other):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        return [optimizer], [other(optimizer), LambdaLR(optimizer, lambda epoch: min(1.0, 0.1 * (1 + epoch)))]

    with pytest.raises(ConfigError, match=r"each move of the LambdaLR overwrites the learning rates"):
        bare_trainer(tmp_path, max_steps=1).fit(Scheduled(configure), loader())


class ByHand(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)


def test_rate_set_by_hook_applies_to_the_step(tmp_path):
    task = ByHand(optimizer="SGD", lr=0.5)
    bare_trainer(tmp_path, max_epochs=2).fit(task, loader(40, 8, shuffle=False))
    net = Regression(optimizer="SGD").net
    optimizer, batches = SGD(net.parameters(), lr=0.5), list(loader(40, 8, shuffle=False))
    for step, (inputs, targets) in enumerate(2 * batches):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    assert torch.equal(weights(task.net), weights(net))
