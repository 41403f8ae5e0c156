"""State of callbacks and schedulers: loaded into the object that saved it, at any place in a list, or into none."""

import logging

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.optim import Warmup
from tests.helpers.scripted_values import Both
from tests.helpers.tasks import Regression, loader, quiet_trainer


def fit(tmp_path, callbacks, epochs=3, **options):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    options = {"resume": "auto", "num_sanity_val_steps": 0, "log_level": "INFO"} | options
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, max_epochs=epochs, **options)
    trainer.fit(Both(), data, val_dataloaders=data)
    return trainer


def collect_warnings(caplog):
    return [
        record.getMessage().partition("step-00000006 ")[2] for record in caplog.records if " start" in record.message
    ]


def make_stoppers():
    return [lumen.EarlyStopping("loss", patience=9), lumen.EarlyStopping("score", patience=9, mode="max")]


def make_savers():
    return [lumen.ModelCheckpoint(monitor="loss", save_top_k=2), lumen.ModelCheckpoint(monitor="score", mode="max")]


@pytest.mark.parametrize("order", [1, -1])
def test_swapped_callbacks_go_on_with_their_own_state(tmp_path, caplog, order):
    fit(tmp_path, [*make_stoppers(), *make_savers(), lumen.ModelCheckpoint(every_n_epochs=1, keep_last=9)])
    stopping, saving = make_stoppers()[::order], make_savers()[::order]
    with caplog.at_level(logging.INFO, "lumen"):
        fit(tmp_path, [*stopping, *saving], epochs=6)
    assert [(each.best_score, each.wait_count) for each in stopping[::order]] == [(4, 4), (30, 4)]
    assert [[*each.best_k_models.values()] for each in saving[::order]] == [[4, 5], [30]]
    assert collect_warnings(caplog) == []


@pytest.mark.parametrize("change", [{"monitor": "score"}, {"mode": "max"}])
def test_state_of_other_monitor_is_ignored_and_reported(tmp_path, caplog, change):
    """A change of the mode has the same effect."""
    fit(tmp_path, [lumen.EarlyStopping("loss", patience=9), lumen.ModelCheckpoint(monitor="loss")])
    other = {"monitor": "loss", "mode": "min"} | change
    stopping, saving = lumen.EarlyStopping(patience=9, **other), lumen.ModelCheckpoint(**other)
    with caplog.at_level(logging.INFO, "lumen"):
        fit(tmp_path, [stopping, saving], epochs=6)
    seen = {"score": 11, "loss": 9}[other["monitor"]]  # of epochs 3 to 5 only
    assert (stopping.best_score, stopping.wait_count) == (saving.best_model_score, 0) == (seen, 0)
    old, new = "{'monitor': 'loss', 'mode': 'min'}", repr(other)
    assert collect_warnings(caplog) == [
        f"holds the state of EarlyStopping{old}, ModelCheckpoint{old}, which this run does not have; "
        f"EarlyStopping{new}, ModelCheckpoint{new} start with a new state"
    ]


def test_a_callback_that_finds_no_state_begins_anew(tmp_path, caplog):
    fit(tmp_path, [])
    with caplog.at_level(logging.INFO, "lumen"):
        fit(tmp_path, [stopping := lumen.EarlyStopping("loss", patience=9)], epochs=6)
    assert (stopping.best_score, stopping.wait_count) == (7, 2)
    assert collect_warnings(caplog) == [
        "does not hold all states: EarlyStopping{'monitor': 'loss', 'mode': 'min'} starts with a new state"
    ]


class Counting(lumen.Callback):
    """Callback that adds up the steps, times a factor."""

    def __init__(self, factor):
        self.factor, self.total = factor, 0

    def on_step_end(self, trainer, task):
        self.total += self.factor

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Named(Counting):
    """Callback with its own state_key."""

    @property
    def state_key(self):
        return self._generate_state_key(factor=self.factor)


def test_user_callbacks_are_matched_by_state_key(tmp_path):
    fit(tmp_path, [Named(1), Named(10)])
    ten, one = swapped = [Named(10), Named(1)]
    fit(tmp_path, swapped, epochs=6)
    assert (one.total, ten.total) == (12, 120)


@pytest.mark.parametrize(
    ("callbacks", "key"),
    [
        (lambda: [Counting(1), Counting(10)], "Counting"),
        (lambda: [lumen.EarlyStopping("loss"), lumen.EarlyStopping("loss", patience=9)], "EarlyStopping{'monitor'"),
        (lambda: make_savers()[:1] * 1 + make_savers()[:1], "ModelCheckpoint{'monitor': 'loss'"),
    ],
)
def test_duplicate_state_keys_raise_before_training(tmp_path, callbacks, key):
    class Untrained(Both):
        def training_step(self, batch):
            raise AssertionError

    trainer = quiet_trainer(tmp_path, callbacks=callbacks(), max_epochs=1)
    with pytest.raises(ConfigError, match=f"the same state_key: {key}") as caught:
        trainer.fit(Untrained(), loader())
    assert "define the property state_key" in str(caught.value)


def test_ambiguous_saved_state_raises(tmp_path):
    fit(tmp_path, [Counting(1)])
    with pytest.raises(ConfigError, match="the same state_key: Counting"):
        fit(tmp_path, [Counting(1), Counting(10)], epochs=6, enable_checkpointing=False)


def test_what_has_no_state_may_be_there_twice(tmp_path):
    class Stateless(lumen.Callback):
        pass

    plain = [lumen.ModelCheckpoint(every_n_epochs=1), lumen.ModelCheckpoint(every_n_train_steps=5)]
    fit(tmp_path, [Stateless(), Stateless(), *plain])
    assert fit(tmp_path, [Stateless(), Stateless(), *plain], epochs=6).current_epoch == 6


# ---------------------------------------------------------------------- schedulers


class Scheduled(Regression):
    """Task with two groups, and schedulers that a function makes."""

    def __init__(self, make):
        super().__init__()
        self.hparams.clear()
        self.make = make

    def configure_optimizers(self):
        first, *rest = self.parameters()
        optimizer = lumen.optim.MultiOptimizer([SGD([first], lr=0.5), SGD(rest, lr=0.25)])
        return [optimizer], self.make(*optimizer.optimizers, optimizer)


def find_one(kind, **options):
    return lambda first, rest, both: [{"scheduler": kind(both), **options}]


def make_plateau(monitor, **options):
    return find_one(ReduceLROnPlateau, monitor=monitor, **options)


HALVING = [lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step), lambda optimizer: StepLR(optimizer, 3)]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (
            lambda first, rest, both: [HALVING[0](first), HALVING[0](rest)],
            lambda first, rest, both: [HALVING[0](rest), HALVING[0](first)],
            ["LambdaLR of groups [0] every epoch", "LambdaLR of groups [1] every epoch"],
        ),
        (
            make_plateau("val_loss"),
            make_plateau("loss_epoch"),
            ["ReduceLROnPlateau of val_loss every epoch", "of loss_epoch"],
        ),
        (find_one(HALVING[1]), find_one(HALVING[1], interval="step"), ["StepLR every epoch", "StepLR every step"]),
        (find_one(HALVING[1]), find_one(HALVING[1], frequency=2), ["StepLR every epoch", "StepLR every 2 epochs"]),
        (
            find_one(lambda both: Warmup(StepLR(both, 3), 2)),
            find_one(lambda both: Warmup(CosineAnnealingLR(both, 9), 2)),
            ["Warmup(StepLR) every epoch", "Warmup(CosineAnnealingLR) every epoch"],
        ),
        (
            find_one(lambda both: SequentialLR(both, [StepLR(both, 3), HALVING[0](both)], [2])),
            find_one(lambda both: SequentialLR(both, [HALVING[0](both), StepLR(both, 3)], [2])),
            ["SequentialLR(StepLR, LambdaLR)", "SequentialLR(LambdaLR, StepLR)"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR passes it itself
def test_a_schedule_of_something_else_is_refused(tmp_path, before, after, names):
    def train(make, **options):
        trainer = quiet_trainer(tmp_path, log_level="CRITICAL", num_sanity_val_steps=0, **options)
        trainer.fit(Scheduled(make), loader(16), val_dataloaders=loader(8))

    train(before, max_epochs=1)
    with pytest.raises(CheckpointMismatch) as caught:
        train(after, max_epochs=2, resume="auto")
    assert all(name in str(caught.value) for name in names)
    train(before, max_epochs=2, resume="auto")
