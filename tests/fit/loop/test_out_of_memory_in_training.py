"""Micro-batches that do not fit into memory in training: the full gradient, and no trace of the failed attempt."""

import weakref
from typing import ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import DataError
from tests.helpers.limited_memory import Cramped, Weighed, WeighedBefore
from tests.helpers.tables import read_rows
from tests.helpers.tasks import bare_trainer, loader, quiet_trainer, regression_data, weights


def make_data(batch_size, dtype=torch.float64):
    return loader(50, batch_size, dtype=dtype)


def train(tmp_path, task, batch_size, name="run", **options):
    """Return the task, trained for some steps of 16 samples."""
    options = {"max_epochs": 3, "precision": "fp64", "global_batch_size": 16, "log_every_n_steps": 1} | options
    trainer = quiet_trainer(tmp_path / name, **options)
    trainer.fit(task, make_data(batch_size, next(task.parameters()).dtype))
    return trainer


def rows(tmp_path, name):
    return read_rows(tmp_path / name / "runs/run/metrics.csv")


@pytest.mark.parametrize(
    ("where", "batch_size", "kind"),
    [
        *((where, size, Cramped) for where in ("forward", "backward", "norms") for size in (16, 8)),
        ("forward", 16, Weighed), ("backward", 8, Weighed), ("backward", 8, WeighedBefore),
    ],
)  # fmt: skip
def test_halved_training_equals_micro_batches_that_fit(tmp_path, where, batch_size, kind):
    """50 = 3 * 16 + 2: from the first step, which is repeated, micro-batches are parts of 4."""
    small, cramped = kind(where=where), kind(4, where)
    train(tmp_path, small, 4, "small")
    trainer = train(tmp_path, cramped, batch_size, "cramped", halve_on_oom=True)
    assert trainer.global_step == 12
    assert torch.equal(weights(cramped), weights(small))
    torch.testing.assert_close([*cramped.buffers()], [*small.buffers()], rtol=0, atol=0)
    for one, other in zip(rows(tmp_path, "small"), rows(tmp_path, "cramped"), strict=True):
        for key in ("error", "loss_epoch", "loss_step", "most", "step"):
            assert one[key] == other[key] or float(one[key]) == pytest.approx(float(other[key]), rel=1e-12)


class Uneven(Cramped):
    """Task that weighs samples with a positive first feature, and the others a little."""

    little = 0.0

    def training_step(self, batch):
        weight = float((batch[0][:, 0] > 0).sum() * 2000 + self.little)
        return super().training_step(batch), weight


def make_light_first_loader(dtype=torch.float64):
    """Return eight samples; in halves, the first half weighs little or nothing."""
    inputs, targets = regression_data(8, dtype)
    inputs[:4, 0], inputs[4:, 0] = -inputs[:4, 0].abs(), inputs[4:, 0].abs()
    return inputs, targets


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_first_half_of_weight_0_changes_nothing(tmp_path, where):
    halved, by_hand, (inputs, targets) = Uneven(4, where), Cramped(), make_light_first_loader()
    batches = DataLoader(TensorDataset(inputs, targets), 8)
    bare_trainer(tmp_path, max_steps=1, precision="fp64", halve_on_oom=True).fit(halved, batches)
    optimizer = by_hand.configure_optimizers()
    torch.nn.functional.mse_loss(by_hand(inputs[4:]), targets[4:]).backward()
    optimizer.step()
    torch.testing.assert_close(weights(halved), weights(by_hand), rtol=1e-12, atol=1e-14)


def test_light_first_halves_skip_no_fp16_updates(tmp_path):
    seen = []
    for fits in (10**6, 4):
        task, notes = Uneven(fits).float(), Notes()
        task.little = 1.0
        options = {"max_steps": 4, "precision": "fp16", "halve_on_oom": True, "callbacks": notes}
        bare_trainer(tmp_path, **options).fit(
            task, DataLoader(TensorDataset(*make_light_first_loader(torch.float32)), 8)
        )
        seen.append(len(notes.losses))
    assert seen[1] <= seen[0] + 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_fitting_size_is_remembered_also_after_resume(tmp_path, where):
    first, second = Cramped(4, where), Cramped(4, where)
    train(tmp_path, first, 16, halve_on_oom=True, max_epochs=1, callbacks=lumen.ModelCheckpoint())
    assert first.sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]
    trainer = train(tmp_path, second, 16, halve_on_oom=True, max_epochs=2, resume="auto")
    assert trainer.progress.fits == 4
    assert second.sizes == [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]


class Third(Cramped):
    """Task whose third micro-batch of a step does not fit."""

    def training_step(self, batch):
        self.fits = 2 if self.trainer.progress.micro_batches % 4 == 3 else 10**6
        return super().training_step(batch)


def test_later_oversize_repeats_earlier_micro_batches_of_step(tmp_path):
    """The third of four does not fit; the first two are counted only once."""
    whole, third = Cramped(), Third(where="backward")
    train(tmp_path, whole, 4, "whole", max_steps=1)
    train(tmp_path, third, 4, "third", max_steps=1, halve_on_oom=True)
    assert third.sizes == [4, 4, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    torch.testing.assert_close(weights(third), weights(whole), rtol=1e-12, atol=1e-14)
    (one,), (other,) = rows(tmp_path, "whole")[:1], rows(tmp_path, "third")[:1]
    for key in ("error", "loss_epoch", "loss_step"):
        assert float(one[key] or 0) == pytest.approx(float(other[key] or 0), rel=1e-12)


def test_halved_run_with_dropout_resumes_exactly(tmp_path):
    def run(name, **options):
        task = Cramped(4, "backward", dropout=0.5)
        train(
            tmp_path,
            task,
            8,
            name,
            halve_on_oom=True,
            callbacks=lumen.ModelCheckpoint(every_n_train_steps=1),
            **options,
        )
        return weights(task)

    straight = run("straight")
    assert torch.equal(run("again"), straight)
    run("cut", max_steps=5)
    assert torch.equal(run("cut", resume="auto"), straight)


@pytest.mark.parametrize(("kind", "batch_size"), [(Third, 4), (Cramped, 16)])
def test_what_an_attempt_has_drawn_is_drawn_again(tmp_path, kind, batch_size):
    """The same holds after an attempt that ended before it drew a number."""
    found = []
    for where in ("start", "forward", "backward"):
        task = kind(4, where, dropout=0.5)
        train(tmp_path, task, batch_size, where, halve_on_oom=True, max_steps=1)
        found.append(weights(task))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_too(tmp_path, precision):
    results = []
    for fits, batch_size, options in ((10**6, 4, {}), (4, 8, {"halve_on_oom": True})):
        task = Cramped(fits, "backward").float()
        train(tmp_path, task, batch_size, f"{precision}{batch_size}", precision=precision, **options)
        results.append(weights(task))
    assert torch.equal(*results)


class Notes(lumen.Callback):
    """Callback that records the arguments of hooks."""

    needs_step_loss = True

    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.batches.append(("start", batch_idx, len(batch[0]), 0))

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.batches.append(("end", batch_idx, len(batch[0]), outputs))

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.losses.append(float(trainer.step_loss()))


class Telling(Cramped):
    def training_step(self, batch):
        loss = super().training_step(batch)
        return {"loss": loss, "inputs": batch[0], "weight": float(len(batch[0]))}


@pytest.mark.parametrize("kind", [Cramped, Weighed, Telling])
def test_hooks_see_each_batch_once_with_whole_output(tmp_path, kind):
    seen, whole = Notes(), Notes()
    train(tmp_path, kind(3, "backward"), 8, "halved", halve_on_oom=True, callbacks=seen, max_steps=2)
    train(tmp_path, kind(), 8, "whole", callbacks=whole, max_steps=2)
    for (*batch, halves), (*same, output) in zip(seen.batches, whole.batches, strict=True):
        assert batch == same
        torch.testing.assert_close(halves, output, rtol=1e-12, atol=1e-14)
    assert seen.losses == pytest.approx(whole.losses, rel=1e-12)


class Real(Cramped):
    """Task that asks the CPU for more memory than any machine has."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        if len(batch[0]) > 4:
            torch.empty(2**50, dtype=torch.uint8)
        return loss


def test_what_the_cpu_refuses_is_halved_too(tmp_path):
    real, small = Real(), Cramped()
    train(tmp_path, real, 16, "real", halve_on_oom=True)
    train(tmp_path, small, 4, "small")
    assert torch.equal(weights(real), weights(small))


def test_halving_is_reported_once_with_size_and_alternatives(tmp_path, caplog):
    train(tmp_path, Cramped(4, "norms"), 16, halve_on_oom=True, log_level="WARNING")
    (said,) = [record.message for record in caplog.records if "memory" in record.message]
    assert said.startswith("step 1: a micro-batch did not fit into memory. Lumen computes larger micro-batches")
    assert "of at most 4 samples" in said
    assert "BatchNorm normalizes each part alone" in said


def test_oversized_sample_ends_the_run(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, Cramped(0), 16, halve_on_oom=True)
    assert caught.value.__notes__[0] == "A single sample does not fit into memory, so halve_on_oom cannot help."


def test_without_the_flag_the_error_says_what_helps(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, Cramped(4), 16)
    assert caught.value.__notes__[0].startswith(
        "Trainer(halve_on_oom=True) computes a micro-batch that does not fit in halves"
    )


class ByHand(Cramped):
    automatic_optimization = False

    def training_step(self, batch):
        self.manual_backward(super().training_step(batch))


class Searching(Cramped):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [ByHand, Searching])
def test_unrepeatable_step_explains_itself(tmp_path, kind):
    options = {"global_batch_size": None} if kind is ByHand else {}
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(tmp_path, kind(4), 16, halve_on_oom=True, **options)
    assert caught.value.__notes__[0].startswith("halve_on_oom does not repeat steps of manual optimization")


def test_batch_with_unknown_samples_raises(tmp_path):
    class Doubled(Cramped):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [torch.cat([each, each]) for each in batch]

    with pytest.raises(DataError, match=r"a batch of 16 samples does not fit .* a tensor of shape .* this loader"):
        train(tmp_path, Doubled(4), 16, halve_on_oom=True)


def test_batch_size_search_finds_one_that_fits_whole(tmp_path):
    class Loading(lumen.DataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self):
            return make_data(self.batch_size)

    trainer = bare_trainer(tmp_path, precision="fp64", halve_on_oom=True, max_steps=2)
    assert lumen.Tuner(trainer).scale_batch_size(Cramped(8), datamodule=Loading()) == 8


def test_spike_detection_uses_final_losses(tmp_path):
    def run(fits, name, **options):
        spikes, task = lumen.SpikeDetection(rtol=0.4, window=4, warmup=3, max_in_a_row=99), Cramped(fits, "backward")
        train(tmp_path, task, 4, name, callbacks=spikes, max_epochs=8, **options)
        return spikes.spikes, weights(task)

    (spikes, straight), (found, halved) = run(10**6, "whole"), run(2, "halved", halve_on_oom=True)
    assert spikes == found > 0
    torch.testing.assert_close(halved, straight, rtol=1e-10, atol=1e-12)


class Holding(torch.autograd.Function):
    """Autograd function that holds an object as long as its graph exists."""

    held: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, inputs):
        ctx.activation = Notes()
        Holding.held.append(weakref.ref(ctx.activation))
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Remembering(Cramped):
    """Task that checks whether any object of earlier attempts still exists."""

    def training_step(self, batch):
        self.alive = [*getattr(self, "alive", ()), sum(each() is not None for each in Holding.held)]
        return super().training_step([Holding.apply(batch[0] + self.net[0].bias[:1]), batch[1]])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failed_attempt_is_freed_before_the_next(tmp_path, where):
    task = Remembering(4, where)
    Holding.held.clear()
    train(tmp_path, task, 16, halve_on_oom=True, max_steps=1)
    assert task.sizes == [16, 8, 4, 4, 4, 4]
    assert task.alive[:3] == [0, 0, 0]
