"""What processes say to each other in a run under DDP, counted in torch's own record of its collectives."""

import time
from collections import Counter

import pytest
import torch

import lumen
from tests.tasks import Regression, bare_trainer, loader

PARAMETERS = sum(parameter.numel() for parameter in Regression().parameters())
CPU = [torch.profiler.ProfilerActivity.CPU]
SMALL = 16
PULSE = 3  # numbers: a clock, how many ranks are asked to stop, how many announce something


class Saying(Regression):
    """Returns its loss as it is asked to."""

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
    """Knows how long its steps take together."""

    def on_train_start(self):
        self.begun_s = time.monotonic()

    def training_step(self, batch):
        time.sleep(0.02)
        self.took_s = time.monotonic() - self.begun_s
        return super().training_step(batch)


def collectives(folder, task, steps, options=None, **trainer):
    """How often each kind of collective ran in a fit, and a sum of how many numbers: {"all_gather": 8, 5: 20}."""
    trainer = bare_trainer(folder, max_steps=steps, strategy=lumen.DDP(**options or {}), **trainer)
    with torch.profiler.profile(activities=CPU, record_shapes=True, acc_events=True) as record:
        trainer.fit(task, loader(2400, 4))
    assert trainer.global_step == steps
    events = [event for event in record.events() if event.name.startswith("gloo:")]
    return Counter(
        event.input_shapes[0][0] if event.name == "gloo:all_reduce" else event.name.removeprefix("gloo:")
        for event in events
    )


def added(folder, make, *args, **options):
    """Sums that 10 more steps need, and how many numbers are summed: {5: 10}."""
    few, many = (collectives(folder, make(*args), steps, **options) for steps in (2, 12))
    assert many.pop("broadcast") <= few.pop("broadcast")
    assert many.pop("all_gather") <= few.pop("all_gather")
    assert many.pop(PULSE) <= few.pop(PULSE, 0) + 3
    return dict(many - few)


WINDOWS = [{}, {"accumulate_grad_batches": 4}, {"global_batch_size": 12}]
NOBODY_LISTENS = {"log_every_n_steps": 1}


@pytest.mark.parametrize("options", [*WINDOWS, NOBODY_LISTENS, {"options": {"gradient_as_bucket_view": True}}], ids=str)
def test_a_step_communicates_its_gradients_and_one_number_beside_them(group, tmp_path, options):
    for sums in group(2).run(add_plain_steps, tmp_path, options):
        assert sums == {PARAMETERS + 1: 10}


def add_plain_steps(folder, options):
    return added(folder, Saying, **options)


@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_returned_weights_cost_one_small_sum_a_step(group, tmp_path, options):
    for sums in group(2).run(add_weighted_steps, tmp_path, options):
        assert sums.pop(PARAMETERS + 1) == 10
        assert list(sums.values()) == [10]
        assert max(sums) <= SMALL


def add_weighted_steps(folder, options):
    return added(folder, Saying, "weights", **options)


def test_batch_weight_costs_one_small_sum_a_step(group, tmp_path):
    for sums in group(2).run(add_weighed_steps, tmp_path):
        assert sums == {PARAMETERS + 1: 10, 1: 10}


def add_weighed_steps(folder):
    return added(folder, Weighing)


def test_a_micro_batch_that_one_rank_leaves_out_is_talked_about_in_its_step_and_the_next(group, tmp_path):
    for plain, leaving_out in group(2).run(leave_one_out, tmp_path):
        talk = {size: times for size, times in (leaving_out - plain).items() if size not in ("all_gather", "broadcast")}
        assert list(talk.values()) == [2]
        assert max(talk) <= SMALL


def leave_one_out(folder):
    return [collectives(folder, Saying(say), 8) for say in ("loss", "None")]


class Ending(Saying):
    def on_train_epoch_end(self):
        pass


class Quiet(Regression):
    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize(("make", "gathers", "sums"), [(Quiet, 0, 1), (Saying, 1, 1), (Ending, 2, 2)])
def test_an_epoch_costs_a_small_sum_a_gather_of_what_was_logged_and_another_of_both_for_hooks(
    group, tmp_path, make, gathers, sums
):
    for few, many in group(2).run(make_epochs, tmp_path, make):
        more = many - few
        assert more["all_gather"] == 20 * 2 * gathers  # each tells first how long it is
        assert more[PULSE + 2] == 20
        assert more[PULSE + 1] == 20 * (sums - 1)


def make_epochs(folder, make):
    return [collectives(folder, make(), steps, limit_train_batches=2) for steps in (2, 22)]  # of one step


def test_clocks_and_signals_are_compared_about_twice_a_second(group, tmp_path):
    for took_s, times in group(2).run(look_at_clocks, tmp_path):
        assert 1 <= times <= 3 * took_s + 8  # more often at first, until it is known how long a step takes


def look_at_clocks(folder):
    task = Slow()
    few, many = collectives(folder, Slow(), 1), collectives(folder, task, 80, log_every_n_steps=1000)
    return task.took_s, many[PULSE] - few[PULSE]
