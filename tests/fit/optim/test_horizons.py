"""Horizons: a schedule that does not fit its run is found before the run begins, and any other one is accepted."""

import logging

import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import lumen
from lumen.errors import ConfigError
from lumen.optim import Warmup, constant, cosine, inverse_sqrt, linear, wsd
from tests.helpers.tasks import Regression, loader, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR passes it


class Planned(Regression):
    """Task that stops right after the checks, with the messages before the first step."""

    def on_train_start(self):
        self.trainer.should_stop = True

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": self.schedule(optimizer), **self.options}]


def plan_schedule(schedule, options, kind=Planned):
    task = kind()
    task.schedule, task.options = schedule, options
    return task


def collect_warnings(tmp_path, caplog, schedule, options=None, samples=400, **length):
    """Return the warnings about a schedule in a run with 100 steps an epoch."""
    task = plan_schedule(schedule, options or {})
    length = {"limit_train_batches": 100} | length
    trainer = quiet_trainer(tmp_path, logger=False, enable_checkpointing=False, log_level="WARNING", **length)
    with caplog.at_level(logging.WARNING, "lumen"):
        trainer.fit(task, loader(samples, 4))
    return [record.getMessage() for record in caplog.records if "lr_scheduler" in record.getMessage()]


STEP, EPOCH, TOKEN = ({"interval": interval} for interval in ("step", "epoch", "token"))


def warmed(optimizer):
    first, then = LinearLR(optimizer, 0.1, total_iters=100), CosineAnnealingLR(optimizer, 900)
    return SequentialLR(optimizer, [first, then], [100])


# ---------------------------------------------------------------------- impossible schedules


@pytest.mark.parametrize(
    ("schedule", "options", "length", "message"),
    [
        (lambda o: OneCycleLR(o, 0.1, total_steps=10), STEP, {"max_epochs": 10},
         r"OneCycleLR ends after 10 moves and fails at the next, but moves once every step, 1000 times in all. "
         r'Set its total_steps to 1000, or its interval to "epoch"\.'),
        (lambda o: OneCycleLR(o, 0.1, total_steps=999), STEP, {"max_steps": 1000}, r"Set its total_steps to 1000"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=20), EPOCH, {"max_epochs": 30}, r"once every epoch, 30 times"),
        (lambda o: Warmup(OneCycleLR(o, 0.1, total_steps=900), 99), STEP, {"max_epochs": 10}, r"total_steps to 901"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=100), STEP | {"frequency": 5}, {"max_epochs": 10},
         r"once every 5 steps, 200 times in all"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=1000), EPOCH, {"max_epochs": 10},
         r"OneCycleLR ends after 1000 moves, as many as the run has steps, but moves once every epoch, 10 times in all"
         r'\. Set its interval to "step"'),
        (lambda o: CosineAnnealingLR(o, 1000), {}, {"max_epochs": 10}, r"CosineAnnealingLR ends after 1000 moves, as"),
        (lambda o: cosine(o, 1000, warmup=50), {}, {"max_steps": 1000}, r"Schedule ends after 1000 moves, as many"),
        (lambda o: warmed(o), {}, {"max_epochs": 10}, r"CosineAnnealingLR ends after 1000 moves, as many"),
        (lambda o: PolynomialLR(o, 1000), {}, {"max_epochs": 10}, r"PolynomialLR ends after 1000"),
        (lambda o: ExponentialLR(o, 0.5), STEP, {"max_epochs": 10},
         r"ExponentialLR moves once every step, 100 times an epoch. After 40 moves, in the first of 10 "
         r'epochs, the learning rate is 1e-12 of its first value\. Set the interval to "epoch"\.'),
        (lambda o: StepLR(o, 5), STEP, {"max_epochs": 90}, r"After 60 moves, in the first of 90 epochs"),
    ],
)  # fmt: skip
def test_certain_schedule_mistake_raises_before_training(tmp_path, caplog, schedule, options, length, message):
    with pytest.raises(ConfigError, match=message):
        collect_warnings(tmp_path, caplog, schedule, options, **length)


# ---------------------------------------------------------------------- probable mistakes


@pytest.mark.parametrize(
    ("schedule", "options", "length", "message"),
    [
        (lambda o: cosine(o, 2000), STEP, {"max_steps": 500},
         "Schedule ends after 2000 moves, but moves once every step, 500 times in all: the run has only its beginning."
         " If you did not intend this, change the schedule's length or its interval."),
        (lambda o: OneCycleLR(o, 0.1, total_steps=1000), STEP, {"max_steps": 4}, "OneCycleLR ends after 1000 moves"),
        (lambda o: CosineAnnealingLR(o, 950), EPOCH, {"max_epochs": 10}, "the run has only its beginning"),
        (lambda o: CosineAnnealingLR(o, 100), EPOCH, {"max_epochs": 100, "max_steps": 100}, "1 times in all"),
        (lambda o: CosineAnnealingLR(o, 10), STEP, {"max_epochs": 10}, "its minimum after 10 moves"),
        (lambda o: CosineAnnealingLR(o, 800), STEP, {"max_epochs": 10}, "the rate rises again"),
        (lambda o: linear(o, 400), STEP, {"max_epochs": 10}, "the rate stays at its minimum"),
        (lambda o: wsd(o, 400, 50, warmup=20), STEP, {"max_epochs": 10}, "Schedule ends after 400 moves"),
        (lambda o: PolynomialLR(o, 10), STEP, {"max_epochs": 10}, "PolynomialLR ends after 10 moves"),
        (lambda o: LinearLR(o, 1.0, 0.1, 10), STEP, {"max_epochs": 10}, "LinearLR ends after 10 moves"),
        (lambda o: LinearLR(o, total_iters=500), EPOCH, {"max_epochs": 10}, "the run has only its beginning"),
        (lambda o: ChainedScheduler([ConstantLR(o, 0.5, 100), CosineAnnealingLR(o, 10)]), STEP, {"max_epochs": 10},
         "CosineAnnealingLR reaches its minimum after 10 moves"),
        (lambda o: StepLR(o, 500), EPOCH, {"max_epochs": 10}, "StepLR changes first after 500 moves"),
        (lambda o: MultiStepLR(o, [500, 800]), EPOCH, {"max_epochs": 10}, "MultiStepLR changes first after 500 moves"),
        (lambda o: CyclicLR(o, 0.01, 0.1), EPOCH, {"max_epochs": 10}, "CyclicLR changes first after 4000 moves"),
        (lambda o: MultiStepLR(o, [3, 6, 8]), STEP, {"max_epochs": 10},
         'MultiStepLR moves once every step, 1000 times in all: its last milestone comes after 8 moves. If '
         'the scheduler counts epochs, set its interval to "epoch".'),
        (lambda o: CosineAnnealingWarmRestarts(o, 5), STEP, {"max_epochs": 10}, "it restarts 200 times"),
        (lambda o: ExponentialLR(o, 0.95), STEP, {"max_epochs": 10}, "after 270 moves the learning rate is 1e-6"),
        (lambda o: StepLR(o, 10), STEP, {"max_steps": 300}, "after 60 moves the learning rate is 1e-6"),
        (lambda o: StepLR(o, 4), EPOCH | {"warmup_steps": 950}, {"max_epochs": 10}, "moves once every epoch, 1 times"),
    ],
)  # fmt: skip
def test_a_schedule_that_hardly_fits_is_one_warning(tmp_path, caplog, schedule, options, length, message):
    (warning,) = collect_warnings(tmp_path, caplog, schedule, options, **length)
    assert message in warning
    assert warning.startswith("lr_scheduler: ")


# ---------------------------------------------------------------------- correct schedules


@pytest.mark.parametrize(
    ("schedule", "options", "length"),
    [
        (lambda o: OneCycleLR(o, 0.1, total_steps=1000), STEP, {"max_epochs": 10}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=10), EPOCH, {"max_epochs": 10}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=1001), STEP, {"max_steps": 1000}),
        (lambda o: Warmup(OneCycleLR(o, 0.1, total_steps=900), 100), STEP, {"max_epochs": 10}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=900), STEP | {"warmup_steps": 100}, {"max_epochs": 10}),
        (lambda o: OneCycleLR(o, 0.1, total_steps=9), EPOCH | {"warmup_steps": 100}, {"max_epochs": 10}),
        (lambda o: CosineAnnealingLR(o, 1000), STEP, {"max_epochs": 10}),
        (lambda o: CosineAnnealingLR(o, 10), EPOCH, {"max_epochs": 10}),
        (lambda o: CosineAnnealingLR(o, 9), EPOCH, {"max_epochs": 9}),
        (lambda o: warmed(o), STEP, {"max_epochs": 10}),
        (lambda o: cosine(o, 1000, warmup=100), STEP, {"max_epochs": 10}),
        (lambda o: cosine(o, 600), STEP, {"max_epochs": 10}),
        (lambda o: cosine(o, 10), EPOCH, {"max_epochs": 10}),
        (lambda o: cosine(o, 10**9), TOKEN, {"max_epochs": 10}),
        (lambda o: constant(o, warmup=100), STEP, {"max_epochs": 10}),
        (lambda o: inverse_sqrt(o, 100), STEP, {"max_epochs": 10}),
        (lambda o: LinearLR(o, total_iters=50), STEP, {"max_epochs": 10}),
        (lambda o: ConstantLR(o, 0.1, total_iters=5), STEP, {"max_epochs": 10}),
        (lambda o: StepLR(o, 30), EPOCH, {"max_epochs": 90}),
        (lambda o: StepLR(o, 300), STEP, {"max_epochs": 10}),
        (lambda o: MultiStepLR(o, [30, 60, 80]), EPOCH, {"max_epochs": 90}),
        (lambda o: MultiStepLR(o, [600, 800]), STEP, {"max_epochs": 10}),
        (lambda o: ExponentialLR(o, 0.9), EPOCH, {"max_epochs": 90}),
        (lambda o: ExponentialLR(o, 0.99), STEP, {"max_epochs": 10}),
        (lambda o: CosineAnnealingWarmRestarts(o, 10, 2), STEP, {"max_epochs": 10}),
        (lambda o: CosineAnnealingWarmRestarts(o, 250), STEP, {"max_epochs": 10}),
        (lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=50), STEP, {"max_epochs": 10}),
        (lambda o: LambdaLR(o, lambda step: 0.9**step), STEP, {"max_epochs": 10}),
        (lambda o: ReduceLROnPlateau(o), EPOCH | {"monitor": "x"}, {"max_epochs": 10}),
    ],
)  # fmt: skip
def test_a_schedule_that_fits_is_left_in_peace(tmp_path, caplog, schedule, options, length):
    assert collect_warnings(tmp_path, caplog, schedule, options, **length) == []


@pytest.mark.parametrize("length", [{"max_time": "00:00:01:00"}, {"max_steps": 10**6, "max_time": "00:00:01:00"}])
@pytest.mark.parametrize("options", [STEP, EPOCH])
def test_time_limited_run_is_not_judged(tmp_path, caplog, length, options):
    assert collect_warnings(tmp_path, caplog, lambda o: OneCycleLR(o, 0.1, total_steps=20), options, **length) == []


@pytest.mark.parametrize("options", [STEP, EPOCH])
def test_nothing_is_said_in_a_fast_dev_run(tmp_path, caplog, options):
    for schedule in (lambda o: OneCycleLR(o, 0.1, total_steps=1000), lambda o: StepLR(o, 30)):
        assert collect_warnings(tmp_path, caplog, schedule, options, fast_dev_run=True, max_epochs=10) == []


def test_loader_without_length_is_judged_by_epochs(tmp_path, caplog):
    def stream(schedule, options, **length):
        task = plan_schedule(schedule, options)
        trainer = quiet_trainer(
            tmp_path, logger=False, enable_checkpointing=False, log_level="WARNING", **length
        )  # fmt: skip
        with caplog.at_level(logging.WARNING, "lumen"):
            trainer.fit(task, (batch for batch in list(loader(40, 4))))
        return [record.getMessage() for record in caplog.records if "lr_scheduler" in record.getMessage()]

    short = lambda o: OneCycleLR(o, 0.1, total_steps=5)  # noqa: E731
    assert stream(short, STEP, max_epochs=10) == []
    assert stream(short, STEP, max_epochs=10, max_steps=100) == []
    with pytest.raises(ConfigError, match="once every epoch, 10 times in all"):
        stream(short, EPOCH, max_epochs=10)
    with pytest.raises(ConfigError, match="once every step, 100 times in all"):
        stream(short, STEP, max_steps=100)


class Whole(Planned):
    def on_train_start(self):
        pass


def train_to(tmp_path, schedule, steps, **options):
    trainer = quiet_trainer(tmp_path, max_steps=steps, log_level="WARNING", **options)
    trainer.fit(plan_schedule(lambda o: schedule(o, steps), STEP, Whole), loader(40, 4))


def one_cycle(optimizer, steps):
    return OneCycleLR(optimizer, 0.1, total_steps=steps)


def test_extended_run_may_use_a_longer_schedule(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lumen"):
        train_to(tmp_path, cosine, 4)
        train_to(tmp_path, cosine, 12, resume="auto")
    (said,) = [record.getMessage() for record in caplog.records if "lr_scheduler" in record.getMessage()]
    assert "the schedule ends after 4 steps in " in said
    assert "but after 12 in this run" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lumen"):
        train_to(tmp_path, cosine, 12, resume="auto", callbacks=lumen.ModelCheckpoint(every_n_train_steps=1))
    assert not [record for record in caplog.records if "lr_scheduler" in record.getMessage()]


def test_one_cycle_cannot_be_extended_on_resume(tmp_path):
    train_to(tmp_path, one_cycle, 4)
    with pytest.raises(
        ConfigError, match=r"ends after 4 moves .* 12 times in all\. A resumed OneCycleLR keeps its length"
    ):
        train_to(tmp_path, one_cycle, 12, resume="auto")
