"""Consistency guard: ranks that differ end the run at the next logged step, and a slow rank is named."""

import logging
import re
import socket
import time

import pytest
import torch
from torch.utils.data import TensorDataset

import lumen
from lumen.errors import TrainingError
from tests.helpers.tasks import Regression, Saving, bare_trainer, loader, regression_data

STEP = 12  # the logged step before it is 10, the next one 15


class Writing(Regression):
    """Task that writes to a tensor on rank 1 at one step."""

    def __init__(self, what, at=STEP):
        super().__init__()
        self.what, self.at = what, at

    @property
    def is_now(self):
        return self.trainer.global_rank == 1 and self.global_step == self.at

    def on_after_backward(self):
        if self.what == "gradients" and self.is_now:
            self.net[3].bias.grad.mul_(2.0)

    def on_before_zero_grad(self, optimizer):
        if self.what == "parameters" and self.is_now:
            self.net[3].bias.data.add_(0.5)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.what == "counters" and self.global_step == self.at:
            self.trainer.progress.micro_batches = 10**7 + self.trainer.global_rank


def fit(folder, what, strategy, steps=30, **options):
    """Return the error of a fit, or None, and the number of steps."""
    options = {"log_every_n_steps": 5, "max_steps": steps} | options
    trainer = bare_trainer(folder, strategy=getattr(lumen, strategy)(), **options)
    try:
        trainer.fit(Writing(what), loader(2400, 4))
    except TrainingError as error:
        return str(error), trainer.global_step
    return None, trainer.global_step


def on_both(group, *args, **options):
    first, second = group(2).run(fit, *args, **options)
    assert first == second  # all ranks raise the same error at the same step
    return first


def test_unequal_parameters_are_named_at_next_logged_step(group, tmp_path):
    error, steps = on_both(group, tmp_path, "parameters", "DDP")
    assert "after step 15: net.3.bias differs between rank 0 and rank 1" in error
    assert "on_before_zero_grad" in error  # advice to the user
    assert steps == 17  # the flag is sent one step later and read after one more step, so that no rank waits


def test_unequal_gradients_are_detected_by_norm(group, tmp_path):
    error, steps = on_both(
        group, tmp_path, "gradients", "DDP", log_every_n_steps=STEP + 1, gradient_clip_val=100.0, precision="64"
    )
    assert f"after step {STEP + 1}: the gradient norm is " in error
    assert " on rank 0 and " in error
    assert " on rank 1. Code on one rank has changed gradients" in error
    assert steps == STEP + 3


def test_counters_that_one_rank_has_changed_are_told(group, tmp_path):
    error, _ = on_both(group, tmp_path, "counters", "DDP", log_every_n_steps=1, max_steps=STEP + 2)
    assert f"after step {STEP}: the number of micro-batches is 10000000 on rank 0 and 10000001 on rank 1" in error


@pytest.mark.parametrize("options", [{"log_every_n_steps": STEP + 1}, {"log_every_n_steps": 1}], ids=str)
def test_last_step_is_checked_too(group, tmp_path, options):
    error, steps = on_both(group, tmp_path, "parameters", "DDP", max_steps=STEP + 1, **options)
    assert f"after step {STEP + 1}: net.3.bias differs" in error
    assert steps == STEP + 1


def test_disagreeing_ranks_save_no_checkpoint(group, tmp_path):
    saves = Saving(15, tmp_path / "saved")
    error, steps = on_both(group, tmp_path, "parameters", "DDP", callbacks=[saves])
    assert "after step 15: net.3.bias differs" in error
    assert steps == 15
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("what", "strategy"), [("nothing", "DDP"), ("nothing", "FSDP"), ("gradients", "FSDP")], ids=str
)
def test_agreeing_ranks_and_fsdp_shards_raise_nothing(group, tmp_path, what, strategy):
    options = {"log_every_n_steps": 1, "gradient_clip_val": 0.1}
    assert on_both(group, tmp_path, what, strategy, max_steps=STEP + 2, **options) == (None, STEP + 2)


class Samples(TensorDataset):
    """Samples of which one rank waits for each."""

    def __init__(self, seconds, samples=4800):
        super().__init__(*regression_data(samples))
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Busy(Regression):
    """Task whose steps take time, and more time until a given moment."""

    def __init__(self, more_s, until_s):
        super().__init__()
        self.more_s, self.until_s = more_s, until_s

    def on_train_start(self):
        self.until_s += time.monotonic()

    def training_step(self, batch):
        time.sleep(0.02 + (self.more_s if time.monotonic() < self.until_s else 0.0))
        return super().training_step(batch)


class BusyWeighing(Busy):
    """Busy task whose ranks also wait for each other before the forward."""

    def batch_weight(self, batch):
        return 1.0


class EndsAfterWarning(lumen.Callback):
    """End the run ten steps after a warning, a time in which a second warning would be a fault."""

    def __init__(self, said):
        self.said, self.steps = said, 0

    def on_train_batch_end(self, trainer, *_):
        self.steps += any("is slow" in line for line in self.said)
        trainer.should_stop = self.steps > 10


def collect_warnings(folder, make, slow, own_s=0.0, data_s=0.0, until_s=1e9, seconds=50):
    """Return the warnings of all ranks in a run where one rank is slow to load data or to run its forward."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lumen").addHandler(handler)
    is_slow = torch.distributed.get_rank() == slow
    data = torch.utils.data.DataLoader(Samples(data_s if is_slow else 0.0), 1)
    options = {"log_every_n_steps": 5, "max_time": {"seconds": seconds}, "log_level": "WARNING"}
    options["callbacks"] = EndsAfterWarning(said)
    try:
        bare_trainer(folder, strategy=lumen.DDP(), **options).fit(make(own_s if is_slow else 0.0, until_s), data)
    finally:
        logging.getLogger("lumen").removeHandler(handler)
    return [line for line in said if "is slow" in line]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "slow"), [(Busy, 0), (BusyWeighing, 1)])
def test_slow_rank_is_named_once_with_the_cause(group, tmp_path, make, slow):
    (line,), others = group(2).run(collect_warnings, tmp_path, make, slow, 0.02, 0.06)
    assert others == []  # rank 0 logs the warning
    assert line.startswith(f"rank {slow} (host {socket.gethostname()}) is slow, and the other ranks wait for it: ")
    own_s, usual_s, data_s = map(float, re.findall(r"(\S+) s\b", line))
    assert 0.06 <= data_s < own_s > usual_s


@pytest.mark.slow
@pytest.mark.parametrize("more_s", [0.0, 0.1])
def test_equal_or_briefly_slow_ranks_are_not_named(group, tmp_path, more_s):
    """A busy machine may make a rank slow indeed, but not in each of three runs."""
    runs = (group(2).run(collect_warnings, tmp_path, Busy, 0, more_s, 0.0, 2.5, 8) for _ in range(3))
    assert any(warnings == [[], []] for warnings in runs)
