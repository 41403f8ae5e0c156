"""Collectives of a run, mostly under DDP, counted in torch's own record."""

import functools
import time
from collections import Counter

import pytest
import torch
from torchmetrics import MeanSquaredError

import lumen
from tests.helpers.communication import COLLECTIVES_OF_EPOCH, GATHER, GUARD, OTHER_SUMS_OF_STEP, VOTE
from tests.helpers.tasks import Regression, bare_trainer, loader

PARAMETERS = sum(parameter.numel() for parameter in Regression().parameters())
CPU = [torch.profiler.ProfilerActivity.CPU]


class Saying(Regression):
    """Task that returns its loss in the requested form."""

    def __init__(self, say="loss"):
        super().__init__()
        self.say = say

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        if self.say == "weights":
            return loss, float(batch_idx + 1)
        return None if self.say == "None" and batch_idx == 5 else loss


class Weighing(Regression):
    def batch_weight(self, batch):
        return float(len(batch[0]))


class Slow(Regression):
    """Task that knows the total time of its steps."""

    def on_train_start(self):
        self.begun_s = time.monotonic()

    def training_step(self, batch):
        time.sleep(0.02)
        self.took_s = time.monotonic() - self.begun_s
        return super().training_step(batch)


@functools.cache
def open_groups(folder):
    """Run once to open the process's groups, which later runs reuse."""
    bare_trainer(folder, max_steps=1, strategy=lumen.DDP()).fit(Regression(), loader(8, 4))


def count_collectives(folder, task, steps, options=None, val_dataloaders=None, **trainer):
    """Return the count of each collective in a fit, and of sums by number of values: {"all_gather": 8, 5: 20}."""
    open_groups(folder)
    trainer = bare_trainer(folder, max_steps=steps, **{"strategy": lumen.DDP(**options or {})} | trainer)
    with torch.profiler.profile(activities=CPU, record_shapes=True, acc_events=True) as record:
        trainer.fit(task, loader(2400, 4), val_dataloaders=val_dataloaders)
    assert trainer.global_step == steps
    events = [event for event in record.events() if event.name.startswith("gloo:")]
    return Counter(
        event.input_shapes[0][0] if event.name == "gloo:all_reduce" else event.name.removeprefix("gloo:")
        for event in events
    )


def count_added_collectives(folder, make, *args, **options):
    """Return the sums of 10 more steps by their number of values: {5: 10}, without the sums of logged steps."""
    few, many = (count_collectives(folder, make(*args), steps, **options) for steps in (2, 12))
    logged = 10 if options.get("log_every_n_steps") == 1 else 0
    assert many.pop("broadcast") <= few.pop("broadcast")
    assert many.pop("all_gather") <= few.pop("all_gather") + logged * GUARD
    assert many.pop(VOTE, 0) <= few.pop(VOTE, 0) + 8  # more if the machine stalls
    return dict(many - few)


WINDOWS = [{}, {"accumulate_grad_batches": 4}, {"global_batch_size": 12}]
NOBODY_LISTENS = {"log_every_n_steps": 1}


@pytest.mark.parametrize("options", [*WINDOWS, NOBODY_LISTENS, {"options": {"gradient_as_bucket_view": True}}], ids=str)
def test_collectives_per_step(group, tmp_path, options):
    """A step sums its gradients and six other numbers."""
    for sums in group(2).run(count_added_collectives, tmp_path, Saying, **options):
        assert sums == {PARAMETERS: 10, OTHER_SUMS_OF_STEP: 10}


@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize("say", ["weights", "None"])
def test_weights_and_skipped_batches_add_no_collectives(group, tmp_path, say, options):
    for sums in group(2).run(count_added_collectives, tmp_path, Saying, say, **options):
        assert sums == {PARAMETERS: 10, OTHER_SUMS_OF_STEP: 10}


def test_batch_weight_costs_one_small_sum_a_step(group, tmp_path):
    for sums in group(2).run(count_added_collectives, tmp_path, Weighing):
        assert sums == {PARAMETERS: 10, OTHER_SUMS_OF_STEP: 10, 1: 10}


def test_collectives_per_fsdp_step(group, tmp_path):
    """A step all-gathers each unit twice, and sums gradients per unit, norms and six numbers."""
    units, parameters = 2, 4
    for sums in group(2).run(add_fsdp_steps, tmp_path):
        assert sums.pop("all_gather") == 10 * units * 2
        assert sums.pop(parameters) == sums.pop(OTHER_SUMS_OF_STEP) == 10
        assert list(sums.values()) == [10] * units


def add_fsdp_steps(folder):
    options = {"strategy": lumen.FSDP(), "gradient_clip_val": 1.0}
    few, many = (count_collectives(folder, Saying(), steps, **options) for steps in (2, 12))
    assert many.pop(VOTE, 0) <= few.pop(VOTE, 0) + 8
    return many - few


class Hooked(Saying):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Do nothing; this hook might stop the run."""


class Harmless(lumen.Callback):
    may_stop_at_steps = False

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        """Do nothing; this hook declares that it never stops the run."""


def test_step_end_hook_adds_vote_unless_declared_harmless(group, tmp_path):
    for hooked, harmless in group(2).run(add_hooks, tmp_path):
        assert hooked == harmless | {VOTE + 1: 10}
        assert harmless == {PARAMETERS: 10, OTHER_SUMS_OF_STEP: 10}


def add_hooks(folder):
    return count_added_collectives(folder, Hooked), count_added_collectives(
        folder, Saying, callbacks=[Harmless(), lumen.EarlyStopping("x", strict=False)]
    )


def subtract_counts(fewer, more):
    """Return the difference of two counts, without votes on clocks and signals: {"all_gather": 4, 5: 1}."""
    return {kind: more[kind] - fewer[kind] for kind in fewer | more if kind != VOTE and more[kind] != fewer[kind]}


def test_logger_adds_collectives_only_at_logged_steps(group, tmp_path):
    for few, many, logging in group(2).run(log_steps, tmp_path):
        assert subtract_counts(few, many) == {PARAMETERS: 10, OTHER_SUMS_OF_STEP: 10}
        assert subtract_counts(many, logging) == {"all_gather": 2 * GATHER + 3 * GUARD}  # three rows, not one


def log_steps(folder):
    return [
        count_collectives(folder, Saying(), steps, logger=lumen.CSVLogger(), log_every_n_steps=every)
        for steps, every in ((2, 1000), (12, 1000), (12, 4))
    ]


class Ending(Saying):
    def on_train_epoch_end(self):
        pass


class Quiet(Regression):
    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])


class QuietEnding(Quiet):
    def on_train_epoch_end(self):
        pass


class Measuring(Saying):
    """Task that leaves a metric to torchmetrics and logs its value for each batch."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        self.error(self(batch[0]), batch[1])
        self.log("error", self.error, on_epoch=True)
        return super().training_step(batch, batch_idx)


class MeasuringEnding(Measuring):
    def on_train_epoch_end(self):
        self.log("more", 1.0)


@pytest.mark.parametrize("logger", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "gathers", "sums"),
    [(kind, *COLLECTIVES_OF_EPOCH[kind.__name__]) for kind in (Quiet, Saying, Ending, QuietEnding, MeasuringEnding)],
)
def test_collectives_per_epoch(group, tmp_path, make, gathers, sums, logger):
    for few, many in group(2).run(make_epochs, tmp_path, make, logger):
        more = many - few
        assert more["all_gather"] == 20 * gathers * GATHER
        assert more[OTHER_SUMS_OF_STEP] == 20
        assert more[VOTE + 2] == 20  # at the end of an epoch
        assert more[VOTE + 1] == 20 * (sums - 1)


def make_epochs(folder, make, logger):
    options = {"logger": lumen.CSVLogger(), "log_every_n_steps": 1000} if logger else {}
    return [
        count_collectives(folder, make(), steps, limit_train_batches=2, **options) for steps in (2, 22)
    ]  # of one step


class Rows(Saying):
    """Task that logs values of single batches."""

    def validation_step(self, batch):
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), on_step=True)


class MeasuringRows(Saying):
    """Task that logs a metric of single batches."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch):
        self.error(self(batch[0]), batch[1])
        self.log("val_error", self.error, on_step=True, on_epoch=True)


@pytest.mark.parametrize(("make", "gathers"), [(Rows, 2), (MeasuringRows, 4)])
@pytest.mark.parametrize("logger", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_collectives_per_validation_are_independent_of_length(group, tmp_path, make, gathers, logger):
    for one, three, long, three_long in group(2).run(validate, tmp_path, make, logger):
        costs = {"all_gather": 2 * (gathers + logger) * GATHER, VOTE + 1: 2}
        assert subtract_counts(one, three) == subtract_counts(long, three_long) == costs
        assert subtract_counts(one, long) == {}
        assert three_long[VOTE] - three[VOTE] <= 3 * 15  # of 3 x 50 batches


def validate(folder, make, logger):
    """Validate once and three times in six steps with one batch a rank, then with 51 batches."""
    return [
        count_collectives(
            folder, make(), 6, logger=lumen.CSVLogger() if logger else False, val_dataloaders=loader(2400, 4),
            val_check_interval=every, limit_val_batches=batches, num_sanity_val_steps=0, log_every_n_steps=1000,
        )
        for batches in (2, 102) for every in (6, 2)
    ]  # fmt: skip


def test_clocks_and_signals_are_compared_twice_per_second(group, tmp_path):
    for took_s, times in group(2).run(look_at_clocks, tmp_path):
        assert 1 <= times <= 3 * took_s + 8  # more often at first, until the time of a step is known


def look_at_clocks(folder):
    task = Slow()
    few, many = count_collectives(folder, Slow(), 1), count_collectives(folder, task, 80, log_every_n_steps=1000)
    return task.took_s, many[VOTE] - few[VOTE]
