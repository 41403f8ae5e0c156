"""Learning-rate schedules: their formulas, and a warm-up before any of them."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from lumen.cli import main
from lumen.errors import ConfigError
from lumen.optim import Warmup, constant, cosine, inverse_sqrt, linear, wsd
from tests.helpers.tasks import Regression, loader, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR passes it


def make_sgd(*rates):
    return SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)], momentum=0.9)


def run(optimizer, scheduler, steps):
    """Return the rates of each update, by group."""
    rates = []
    for _ in range(steps):
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def list_rates(build, steps=40):
    """Return the rates of an optimizer whose highest rate is 1."""
    optimizer = make_sgd()
    return [rate for (rate,) in run(optimizer, build(optimizer), steps)]


# ---------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("build", "after"),
    [
        (lambda optimizer, **w: constant(optimizer, **w), lambda t: 1.0),
        (lambda optimizer, **w: linear(optimizer, 30, floor=0.1, **w), lambda t: max(0.1, 1 - 0.9 * t / 20)),
        (
            lambda optimizer, **w: cosine(optimizer, 30, floor=0.1, **w),
            lambda t: 0.55 + 0.45 * math.cos(math.pi * min(t, 20) / 20),
        ),
        (lambda optimizer, **w: inverse_sqrt(optimizer, **w), lambda t: math.sqrt(10 / (10 + t))),
        (
            lambda optimizer, **w: wsd(optimizer, 30, 8, floor=0.1, **w),
            lambda t: 1 - 0.9 * math.sqrt(min(max(t - 12, 0) / 8, 1)),
        ),
        (lambda optimizer, **w: wsd(optimizer, 30, 8, shape="linear", **w), lambda t: 1 - min(max(t - 12, 0) / 8, 1)),
    ],
    ids=["constant", "linear", "cosine", "inverse_sqrt", "wsd", "wsd linear"],
)
@pytest.mark.parametrize("start", [0.0, 0.25])
def test_schedules_follow_their_formula_after_linear_warmup(build, after, start):
    rates = list_rates(lambda optimizer: build(optimizer, warmup=10, start=start))
    assert rates[:10] == pytest.approx([start + (1 - start) * step / 10 for step in range(10)], abs=1e-15)
    assert rates[10] == 1.0
    assert rates[10:] == pytest.approx([after(step) for step in range(30)], abs=1e-15)


def test_inverse_sqrt_equals_the_original_transformer():
    width, warmup = 512, 10
    peak = (width * warmup) ** -0.5
    rates = [peak * rate for rate in list_rates(lambda optimizer: inverse_sqrt(optimizer, warmup))]
    assert rates[1:] == pytest.approx([width**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, 40)])


@pytest.mark.parametrize("build", [linear, cosine, lambda *given, **named: wsd(*given, 10, **named)])
def test_schedules_start_at_peak_and_end_at_floor(build):
    rates = list_rates(lambda optimizer: build(optimizer, 30, floor=0.2))
    assert rates[0] == max(rates) == 1.0
    assert rates[30:] == pytest.approx([0.2] * 10)
    assert all(later <= sooner for sooner, later in pairwise(rates))
    assert rates[29] > 0.2


@pytest.mark.parametrize("build", [linear, cosine, lambda *given, **named: wsd(*given, 50, **named)])
def test_run_may_end_within_warmup(build):
    assert list_rates(lambda optimizer: build(optimizer, 3, warmup=10), 3) == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda o: cosine(o, 0), r"steps = 0: expected at least 1"),
        (lambda o: linear(o, 9, floor=1.5), r"floor = 1\.5: expected a fraction of the highest learning rate"),
        (lambda o: constant(o, warmup=-1), r"warm-up steps = -1"),
        (lambda o: inverse_sqrt(o, 0), r"warm-up steps = 0"),
        (lambda o: constant(o, warmup=3, start=2), r"start = 2"),
        (lambda o: wsd(o, 9, 0), r"decay = 0"),
        (lambda o: wsd(o, 9, 3, shape="cubic"), r"shape = 'cubic': expected \"sqrt\" or \"linear\""),
    ],
)
def test_a_value_out_of_range_is_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build(make_sgd())


# ---------------------------------------------------------------------- warm-up before any scheduler

SCHEDULERS = {
    "OneCycleLR": lambda o: OneCycleLR(o, [0.5 * group["lr"] for group in o.param_groups], total_steps=40),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.9),
    "StepLR": lambda o: StepLR(o, 3, 0.5),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 13),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 4, 2),
    "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.7 / (step + 1)),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), ExponentialLR(o, 0.5)], [3]),
    "cosine": lambda o: cosine(o, 30, floor=0.1),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("start", [0.0, 0.23])  # 0.23 + (1 - 0.23) * 7 / 7 is not 1 in floating point
def test_schedulers_are_unchanged_after_warmup(scheduler, start):
    bare, warmed = make_sgd(1.0, 0.3), make_sgd(1.0, 0.3)
    alone = run(bare, SCHEDULERS[scheduler](bare), 25)
    warm = run(warmed, Warmup(SCHEDULERS[scheduler](warmed), 7, start), 32)
    assert warm[7:] == alone
    assert len({rates[0] for rates in alone}) > 3
    for group in (0, 1):
        rise = [alone[0][group] * (start + (1 - start) * step / 7) for step in range(7)]
        assert [rates[group] for rates in warm[:7]] == pytest.approx(rise)


def test_momentum_cycles_with_the_delayed_cycle():
    bare, warmed = make_sgd(), make_sgd()
    cycles = [OneCycleLR(bare, 0.5, total_steps=20), Warmup(OneCycleLR(warmed, 0.5, total_steps=20), 5)]
    run(warmed, cycles[1], 5)
    for _ in range(15):
        assert warmed.param_groups[0]["momentum"] == bare.param_groups[0]["momentum"]
        run(bare, cycles[0], 1)
        run(warmed, cycles[1], 1)
    assert bare.param_groups[0]["momentum"] != 0.95


def test_tensor_learning_rate_stays_the_same_tensor():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = AdamW([parameter], lr=torch.tensor(0.5, dtype=torch.float64))
    rate = optimizer.param_groups[0]["lr"]
    found = run(optimizer, cosine(optimizer, 20, warmup=5), 12)
    assert optimizer.param_groups[0]["lr"] is rate
    assert [value for (value,) in found] == pytest.approx(
        [0.5 * value for value in list_rates(lambda o: cosine(o, 20, warmup=5), 12)]
    )


# ---------------------------------------------------------------------- a plateau


def with_plateau(warmup_steps, interval="step", **options):
    def configure(parameters):
        optimizer = SGD(parameters, lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **options)
        warmup = {"scheduler": Warmup(plateau, warmup_steps), "interval": interval}
        return [optimizer], [warmup, {"scheduler": plateau, "monitor": "val_loss"}]

    return configure


class Scheduled(Regression):
    """Task with an optimizer that a function makes of its parameters; it records the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch):
        self.log("val_loss", [3.0, 4.0, 4.0, 2.0, 5.0, 5.0, 1.0, 6.0][self.current_epoch % 8])

    def configure_optimizers(self):
        return self.configure(self.parameters())


UNRECORDED = {"logger": False, "enable_checkpointing": False}


def fit(tmp_path, configure, **options):
    """Train epochs of five steps, each with a validation."""
    task = Scheduled()
    task.configure = configure
    options = {"max_epochs": 8, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(tmp_path, **options)
    trainer.fit(task, loader(40, 8), val_dataloaders=loader(8, 8))
    return trainer, task


@pytest.mark.parametrize("warmup_steps", [1, 10, 12, 13, 24])
def test_plateau_waits_for_the_end_of_warmup(tmp_path, warmup_steps):
    _, task = fit(tmp_path, with_plateau(warmup_steps), **UNRECORDED)
    values, best, rate, expected = [3.0, 4.0, 4.0, 2.0, 5.0, 5.0, 1.0, 6.0], math.inf, 0.1, []
    for epoch, value in enumerate(values):
        for step in range(5 * epoch, 5 * epoch + 5):
            expected.append(rate * step / warmup_steps if step < warmup_steps else rate)
        warming = 5 * (epoch + 1) < warmup_steps
        if value >= best and not warming:
            rate *= 0.5
        best = min(best, value)
    assert task.rates == pytest.approx(expected)
    assert expected[-1] < 0.1


def test_plateau_and_warmup_may_count_epochs(tmp_path):
    _, task = fit(tmp_path, with_plateau(3, interval="epoch"), **UNRECORDED)
    assert task.rates[::5] == pytest.approx([0.0, 0.1 / 3, 0.2 / 3, 0.05, 0.05, 0.025, 0.0125, 0.0125])


def test_extended_run_follows_the_longer_schedule(tmp_path):
    def planned(steps):
        def configure(parameters):
            optimizer = AdamW(parameters, lr=0.01)
            schedule = cosine(optimizer, steps, warmup=5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        return configure

    fit(tmp_path, planned(20), max_epochs=4)
    _, task = fit(tmp_path, planned(40), resume="auto")
    assert task.rates[1:] == [0.01 * rate for rate in list_rates(lambda o: cosine(o, 40, warmup=5))[21:]]


# ---------------------------------------------------------------------- from a configuration


def test_a_configuration_names_a_schedule_by_its_function(tmp_path):
    words = ["fit", "--model", "tests.helpers.cli_tasks.Line", "--data", "tests.helpers.cli_tasks.Points"]
    words += ["--trainer.max_epochs", "2"]
    words += ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=lumen.optim.cosine", "--lr_scheduler.steps=6"]
    words += ["--lr_scheduler.warmup=2", "--lr_schedule.interval=step", "--trainer.default_root_dir", str(tmp_path)]
    assert (
        main([*words, "--trainer.callbacks.rate.class_path=lumen.LearningRateMonitor", "--trainer.log_every_n_steps=1"])
        == 0
    )
    lines = [line.split(",") for line in (tmp_path / "line/metrics.csv").read_text().splitlines()]
    column = lines[0].index("lr")
    rates = [float(line[column]) for line in lines[1:] if line[column]]
    assert rates == [0.5 * rate for rate in list_rates(lambda o: cosine(o, 6, warmup=2), 6)]
