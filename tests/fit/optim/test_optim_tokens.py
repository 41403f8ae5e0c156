"""Schedules in tokens: the learning rate follows the number of trained tokens exactly, also after a resume."""

import math

import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.data.permutation import make_epoch_order
from lumen.errors import ConfigError
from lumen.optim import Warmup, constant, cosine, inverse_sqrt, linear, wsd
from tests.helpers.tasks import network, quiet_trainer, regression_data, weights

SEED, SAMPLES = 3, 50
TOKENS = torch.randint(1, 40, (SAMPLES,), generator=torch.Generator().manual_seed(1)).double()
ALL = 3 * float(TOKENS.sum())  # tokens of three epochs


class Language(lumen.TaskModule):
    """Task with a loss over a varying number of tokens per sample, which records its learning rates."""

    schedule = staticmethod(lambda optimizer: cosine(optimizer, round(ALL), warmup=200, floor=0.1))
    interval, options, scale = "token", {}, 1.0

    def __init__(self, *, returned=True):
        super().__init__()
        self.net = network()
        self.returned = returned
        self.rates = []

    def training_step(self, batch):
        inputs, targets, tokens = batch
        loss = ((self.net(inputs) - targets).pow(2).squeeze(1) * tokens).sum() / tokens.sum() * self.scale
        return (loss, tokens.sum()) if self.returned else loss

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=0.01)
        entry = {"scheduler": self.schedule(optimizer), "interval": self.interval, **self.options}
        return {"optimizer": optimizer, "lr_scheduler": entry}


class Weighed(Language):
    def batch_weight(self, batch):
        return batch[2].sum()


def fit(folder, task, **options):
    trainer = quiet_trainer(folder, **{"max_epochs": 3, "log_level": "CRITICAL"} | options)
    data = TensorDataset(*regression_data(SAMPLES), TOKENS.float())
    trainer.fit(task, DataLoader(data, 8, shuffle=True))
    return trainer


def count_tokens_before_updates(accumulate):
    """Return the tokens before each update."""
    steps = [
        step
        for epoch in range(3)
        for step in make_epoch_order(SAMPLES, SEED, epoch, shuffle=True).split(8 * accumulate)
    ]
    return [0.0, *torch.stack([TOKENS[step].sum() for step in steps]).cumsum(0).tolist()][:-1]


SCHEDULES = {
    "cosine": (
        lambda o: cosine(o, 2000, warmup=200, floor=0.1),
        lambda t: 0.55 + 0.45 * math.cos(math.pi * min(1.0, t / 1800)),
    ),
    "linear": (lambda o: linear(o, 2000, warmup=200), lambda t: 1 - min(1.0, t / 1800)),
    "wsd": (lambda o: wsd(o, 2000, 500, warmup=200), lambda t: 1 - math.sqrt(min(1.0, max(0.0, t - 1300) / 500))),
    "inverse_sqrt": (lambda o: inverse_sqrt(o, 200), lambda t: math.sqrt(200 / (200 + t))),
    "constant": (lambda o: constant(o, warmup=200), lambda t: 1.0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Language, Weighed])
def test_rates_follow_the_tokens_of_the_steps(tmp_path, schedule, accumulate, kind):
    build, after = SCHEDULES[schedule]
    task = kind(returned=kind is Language)
    task.schedule = build
    trainer = fit(tmp_path, task, accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False)
    seen = count_tokens_before_updates(accumulate)
    expected = [0.01 * (tokens / 200 if tokens < 200 else after(tokens - 200)) for tokens in seen]
    assert task.rates == pytest.approx(expected, rel=1e-12)
    assert trainer.run.progress.units == float(ALL)
    assert sum(tokens > 200 for tokens in seen) > 4


def test_a_schedule_without_a_warm_up_follows_too(tmp_path):
    task = Language()
    task.schedule = lambda optimizer: linear(optimizer, round(ALL))
    fit(tmp_path, task, logger=False, enable_checkpointing=False)
    assert task.rates == pytest.approx(
        [0.01 * (1 - tokens / ALL) for tokens in count_tokens_before_updates(1)], rel=1e-12
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("cut", [2, 6, 13])
def test_a_resumed_run_stands_where_it_stood(tmp_path, precision, cut):
    def train(folder, **options):
        task = Language()
        task.scale = 3e3 if precision == "fp16" else 1.0  # its first gradients overflow
        return fit(folder, task, precision=precision, accumulate_grad_batches=2, max_epochs=None, **options), task

    _, whole = train(tmp_path / "whole", max_steps=20)
    _, first = train(tmp_path, max_steps=cut)
    trainer, second = train(tmp_path, max_steps=20, resume="auto")
    assert first.rates + second.rates == whole.rates
    assert trainer.run.progress.units < count_tokens_before_updates(2)[-1] + ALL
    assert torch.equal(weights(second), weights(whole))


def test_tokens_of_overflowed_updates_do_not_count(tmp_path):
    seen = []

    class Watched(Language):
        scale = 3e3

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((self.global_step, self.trainer.run.progress.units, batch[2].sum().item()))

    fit(tmp_path, Watched(), precision="fp16", logger=False, enable_checkpointing=False)
    before, units = 0, 0.0
    for step, found, tokens in seen:
        units += tokens if step > before else 0.0
        before = step
        assert found == units
    assert seen[-1][0] <= len(seen) - 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": lambda o: StepLR(o, 3)}, r'StepLR counts its steps, so its interval cannot be "token"'),
        ({"schedule": lambda o: Warmup(LambdaLR(o, lambda step: 1.0), 3)}, "LambdaLR counts its steps"),
        ({"options": {"frequency": 2}}, r'interval "token" moves at every step; found frequency 2'),
        (
            {"schedule": lambda o: linear(o, 9), "options": {"warmup_steps": 2}},
            "warmup_steps = 2, but .* counts tokens",
        ),
        ({"returned": False}, r'interval "token" sums the weights of the steps, but the task returns no'),
    ],
)
def test_schedule_unable_to_follow_tokens_is_rejected(tmp_path, change, message):
    task = Language()
    for name, value in change.items():
        setattr(task, name, value)
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, task)
    assert len(task.rates) == ("returned" in change)
