"""Training loop: the length of a run, the arguments and results of a step, and the micro-batches of an update."""

import functools
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError, TrainingError
from lumen.optim import Lookahead, MultiOptimizer
from tests.helpers.tasks import (
    FEATURES,
    Regression,
    bare_trainer,
    loader,
    network,
    quiet_trainer,
    regression_data,
    weights,
)


class Recorded(Regression):
    """Task that records (epoch, step, batch_idx, samples) of every micro-batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, self.global_step, batch_idx, len(batch[0])))
        return super().training_step(batch)


class StopAt(lumen.Callback):
    """Callback that requests a stop in the given micro-batch of the run."""

    def __init__(self, micro_batch):
        self.micro_batch = micro_batch
        self.ends = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.micro_batch -= 1
        if self.micro_batch == 0:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer, task):
        self.ends.append("epoch")

    def on_train_end(self, trainer, task):
        self.ends.append("train")


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_steps": 7}, 7, 1),
        ({"max_epochs": 2}, 10, 2),
        ({"max_steps": 7, "max_epochs": 2}, 7, 1),
        ({"max_steps": 30, "max_epochs": 2}, 10, 2),
        ({"max_steps": 10, "max_epochs": 3}, 10, 2),
        ({"max_steps": -1, "max_epochs": 1}, 5, 1),
        ({"max_steps": 3, "max_epochs": -1}, 3, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 2, "max_time": "00:01:00"}, 2, 0),
        ({"max_epochs": 2, "max_time": {"seconds": 0}}, 0, 0),
    ],
)
def test_the_first_limit_reached_ends_the_run(tmp_path, options, steps, epochs):
    task = Recorded()
    trainer = bare_trainer(tmp_path, **options)
    trainer.fit(task, loader(40, 8))
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)
    assert len(task.seen) == steps


def test_max_time_ends_run_in_mid_epoch(tmp_path):
    class Slow(Recorded):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    task = Slow()
    trainer = bare_trainer(tmp_path, max_epochs=1, max_time={"seconds": 0.3})
    trainer.fit(task, loader(8000, 8))
    assert 0 < trainer.global_step == len(task.seen) <= 0.3 / 0.02 + 1


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        ("01:30", 90),
        ("02:00:01", 7201),
        ("01:00:00:01", 86401),
        (timedelta(minutes=2), 120),
        ({"minutes": 1, "seconds": 0.5}, 60.5),
    ],
)
def test_durations_can_be_written_in_three_ways(tmp_path, duration, seconds):
    assert bare_trainer(tmp_path, max_time=duration).plan.max_time_s == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": -2}, "max_steps: .* found -2"),
        ({"max_epochs": -3}, "max_epochs: .* found -3"),
        ({"max_time": "soon"}, "max_time: .* found 'soon'"),
        ({"limit_train_batches": 1.5}, "limit_train_batches: .* found 1.5"),
        ({"limit_val_batches": -1}, "limit_val_batches: .* found -1"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches: .* found 0"),
        ({"global_batch_size": 0}, "global_batch_size: .* found 0"),
        ({"global_batch_size": 8, "accumulate_grad_batches": 2}, "Set only one of them"),
        ({"val_check_interval": 0}, "val_check_interval: .* found 0"),
        ({"val_check_interval": 1.5}, "val_check_interval: .* found 1.5"),
        ({"gradient_clip_val": -1.0}, "gradient_clip_val: .* found -1.0"),
        ({"max_time": 60}, "max_time: .* found 60"),
        ({"gradient_clip_algorithm": "median"}, "found 'median'"),
        ({"precision": "fp8"}, "no precision is named 'fp8'; use one of fp32"),
        ({"strategy": "magic"}, "strategy: 'magic' is unknown"),
        ({"devices": "many"}, "devices: .* found 'many'"),
        ({"accelerator": "abacus"}, "accelerator: 'abacus' is not available on this machine; available: auto"),
    ],
)
def test_invalid_trainer_setting_is_named_at_construction(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, **{"max_epochs": 1} | options)


def test_a_second_fit_starts_its_callbacks_anew(tmp_path):
    stopping, saving = lumen.EarlyStopping("val_loss", patience=2), lumen.ModelCheckpoint(monitor="val_loss")
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=[stopping, saving], logger=False)
    found = []
    for _ in range(2):
        trainer.fit(Regression(), loader(40, 8), val_dataloaders=loader(16, 8))
        names = sorted(path.name for path in (trainer.run_directory / "checkpoints").iterdir())
        found.append((trainer.global_step, stopping.best_score, stopping.wait_count, saving.best_model_score, names))
    assert found[0] == found[1]
    assert trainer.run_directory.name == "run-2"


# ---------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("minimum", "steps", "epochs"),
    [
        ({}, 1, 0),
        ({"min_steps": 7}, 7, 1),
        ({"min_epochs": 2}, 10, 2),
        ({"min_steps": 12, "min_epochs": 1}, 12, 2),
        ({"min_steps": 3, "min_epochs": 1}, 5, 1),
        ({"min_steps": 100}, 20, 4),
    ],
)
def test_a_minimum_delays_a_stop(tmp_path, minimum, steps, epochs):
    trainer = bare_trainer(tmp_path, max_epochs=4, callbacks=[StopAt(1)], **minimum)
    trainer.fit(Regression(), loader(40, 8))
    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


@pytest.mark.parametrize(("accumulate", "asked_in", "fetched"), [(1, 3, 3), (4, 5, 8)])
def test_a_stop_leaves_after_the_step_in_progress(tmp_path, accumulate, asked_in, fetched):
    stop = StopAt(asked_in)
    task = Recorded()
    trainer = bare_trainer(tmp_path, max_epochs=3, accumulate_grad_batches=accumulate, callbacks=[stop])
    trainer.fit(task, loader(160, 8))
    assert len(task.seen) == fetched
    assert trainer.global_step == fetched // accumulate
    assert stop.ends == ["epoch", "train"]


class Skipping(Recorded):
    """Task that ends the first epoch at its third micro-batch; an epoch schedule still moves."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 2) else None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@pytest.mark.parametrize(("accumulate", "micro_batches", "steps"), [(1, 2, 2), (2, 2, 1)])
def test_returning_minus_one_skips_rest_of_epoch(tmp_path, accumulate, micro_batches, steps):
    """Schedulers still step at the end of the epoch."""
    task = Skipping(lr=0.1)
    trainer = bare_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(task, loader(40, 8))
    assert [batch for epoch, _, batch, _ in task.seen if epoch == 0] == list(range(micro_batches))
    assert [batch for epoch, _, batch, _ in task.seen if epoch == 1] == list(range(5))
    assert trainer.global_step == steps + -(-5 // accumulate)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5 * 0.5


def test_skipped_epoch_leaves_no_gradient(tmp_path):
    class Skip(lumen.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            return -1 if (trainer.current_epoch, batch_idx) == (0, 3) else None

    task = Regression(optimizer="SGD")
    data = loader(40, 8, shuffle=False)
    bare_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=[Skip()]).fit(task, data)

    inputs, targets = regression_data(40)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for window in ([0, 16], [0, 16], [16, 32], [32, 40]):
        optimizer.zero_grad()
        samples = slice(*window)
        nn.functional.mse_loss(net(inputs[samples]), targets[samples]).backward()
        optimizer.step()
    for ours, by_hand in zip(task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- parts of an epoch


@pytest.mark.parametrize(
    ("limit", "batches"), [(3, 3), (100, 10), (0.5, 5), (0.25, 2), (0.7, 7), (1.0, 10), (1, 1), (0, 0), (0.0, 0)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_limit_is_a_count_or_fraction(tmp_path, limit, batches, workers):
    task = Recorded()
    trainer = bare_trainer(tmp_path, max_epochs=2, limit_train_batches=limit)
    trainer.fit(task, loader(80, 8, num_workers=workers))
    assert [batch for _, _, batch, _ in task.seen] == [*range(batches)] * 2
    assert trainer.num_training_batches == batches


def test_a_fraction_is_not_cut_by_rounding(tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=1, limit_train_batches=0.29)
    trainer.fit(Regression(), loader(100, 1))
    assert trainer.global_step == 29


def test_fraction_below_one_batch_raises(tmp_path):
    task = Recorded()
    with pytest.raises(ConfigError, match=r"limit_train_batches: 0.1 of 5 batches is less than one"):
        bare_trainer(tmp_path, max_epochs=1, limit_train_batches=0.1).fit(task, loader(40, 8))
    with pytest.raises(ConfigError, match=r"limit_val_batches: 0.1 of 5 batches is less than one"):
        bare_trainer(tmp_path, max_epochs=1, limit_val_batches=0.1).fit(task, loader(), val_dataloaders=loader(40, 8))
    assert task.seen == []


def test_fraction_of_unknown_length_raises(tmp_path):
    with pytest.raises(ConfigError, match=r"limit_train_batches: 0.5 is a fraction, but the loader has no length"):
        bare_trainer(tmp_path, max_epochs=1, limit_train_batches=0.5).fit(Regression(), (batch for batch in loader()))


@pytest.mark.parametrize("batches", [True, 1, 3])
def test_fast_dev_run_takes_n_steps_without_writing(tmp_path, batches):
    class Validated(Recorded):
        validations = 0

        def validation_step(self, batch):
            super().validation_step(batch)
            self.validations += 1

    task = Validated()
    trainer = quiet_trainer(
        tmp_path, max_epochs=50, fast_dev_run=batches, val_check_interval=1000, check_val_every_n_epoch=7,
        callbacks=[lumen.ModelCheckpoint(monitor="val_loss"), lumen.EarlyStopping("val_loss")],
    )  # fmt: skip
    trainer.fit(task, loader(80, 8), val_dataloaders=loader(80, 8))
    assert trainer.global_step == len(task.seen) == task.validations == batches
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"accumulate_grad_batches": 3}, [[8, 8, 8], [8, 8, 8], [2]]),
        ({"accumulate_grad_batches": 100}, [[8, 8, 8, 8, 8, 8, 2]]),
        ({"global_batch_size": 8}, [[8], [8], [8], [8], [8], [8], [2]]),
        ({"global_batch_size": 20}, [[8, 8, 4], [8, 8, 4], [8, 2]]),
        ({"global_batch_size": 17}, [[8, 8, 1], [8, 8, 1], [8, 8]]),
        ({"global_batch_size": 20, "limit_train_batches": 4}, [[8, 8, 4], [8]]),
        ({"accumulate_grad_batches": 3, "limit_train_batches": 5}, [[8, 8, 8], [8, 8]]),
    ],
)
def test_epoch_is_cut_into_steps_with_short_last(tmp_path, options, windows):
    task = Recorded()
    trainer = bare_trainer(tmp_path, max_epochs=2, **options)
    trainer.fit(task, loader(50, 8))
    expected = [
        (epoch, step + epoch * len(windows), size)
        for epoch in range(2)
        for step, window in enumerate(windows)
        for size in window
    ]
    assert [(epoch, step, size) for epoch, step, _, size in task.seen] == expected
    assert trainer.global_step == 2 * len(windows)


@pytest.mark.parametrize("max_steps", [1, 3, 4])
def test_max_steps_with_accumulation_ends_exactly(tmp_path, max_steps):
    task = Recorded()
    trainer = bare_trainer(tmp_path, max_steps=max_steps, accumulate_grad_batches=3)
    trainer.fit(task, loader(50, 8))
    assert trainer.global_step == max_steps
    assert len(task.seen) == sum([3, 3, 1, 3][:max_steps])


def test_global_batch_below_batch_size_raises(tmp_path):
    with pytest.raises(ConfigError, match="global_batch_size: 4 is smaller than the loader's batch_size 8"):
        bare_trainer(tmp_path, max_steps=1, global_batch_size=4).fit(Regression(), loader())


# ---------------------------------------------------------------------- arguments and results of a step


def loss_of(task, batch):
    return nn.functional.mse_loss(task.net(batch[0]), batch[1])


def note_loss(task, batch, *others):
    task.given = [len(batch), *others]
    return loss_of(task, batch)


def passing_on(step):
    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)

    return wrapper


STEPS = {
    "batch": (lambda task, batch: note_loss(task, batch), [2]),
    "index": (lambda task, batch, batch_idx: note_loss(task, batch, batch_idx), [2, 1]),
    "loader": (lambda task, batch, batch_idx, dataloader_idx: note_loss(
        task, batch, batch_idx, dataloader_idx), [2, 1, 0]),
    "batch and loader": (lambda task, batch, dataloader_idx=7: note_loss(task, batch, dataloader_idx), [2, 0]),
    "other names": (lambda task, xy, number, *, debug=False: note_loss(task, xy, number), [2, 1]),
    "anything": (lambda task, *args: note_loss(task, *args), [2, 1]),
    "batch and anything": (lambda task, batch, *args, **kwargs: note_loss(
        task, batch, *args, *kwargs.values()), [2, 1]),
    "all and anything": (lambda task, batch, batch_idx, dataloader_idx, *more: note_loss(
        task, batch, batch_idx, dataloader_idx, *more), [2, 1, 0]),
    "more": (lambda task, batch, batch_idx, how="own", why=None: note_loss(task, batch, batch_idx, how, why),
             [2, 1, "own", None]),
    "no more than three": (lambda task, batch, batch_idx, how="own", dataloader_idx=0: note_loss(
        task, batch, batch_idx, how, dataloader_idx), [2, 1, "own", 0]),
    "wrapped": (passing_on(lambda task, batch, batch_idx: note_loss(task, batch, batch_idx)), [2, 1]),
    "bound": (functools.partialmethod(lambda task, how, batch, number: note_loss(task, batch, number, how), "bound"),
              [2, 1, "bound"]),
}  # fmt: skip


@pytest.mark.parametrize("signature", STEPS)
def test_training_step_gets_what_its_signature_takes(tmp_path, signature):
    step, given = STEPS[signature]
    task = type("Taking", (Regression,), {"training_step": step})()
    bare_trainer(tmp_path, max_steps=2).fit(task, loader())
    assert task.given == given


class Several(Regression):
    """Task that records the arguments of its steps."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def note(self, step, *arguments):
        self.given.setdefault(step, []).append(arguments)

    def training_step(self, batch, *others):
        self.note("training", *others)
        return loss_of(self, batch)

    def validation_step(self, *args, **kwargs):
        self.note("validation", *args[1:])

    def test_step(self, batch, number, place=None):
        self.note("test", number, place)


def test_var_args_get_dataloader_idx_with_several_loaders(tmp_path):
    def pair():
        return [loader(8, 8), loader(8, 8)]

    task, trainer = Several(), bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(task, lumen.CombinedLoader(pair(), "sequential"), pair())
    trainer.test(task, pair())
    assert task.given == {"training": [(0, 0), (1, 1)], "validation": [(0, 0), (0, 1)], "test": [(0, 0), (0, 1)]}
    task = Several()
    trainer.fit(task, loader(8, 8), loader(8, 8))
    trainer.test(task, loader(8, 8))
    assert task.given == {"training": [(0,)], "validation": [(0,)], "test": [(0, None)]}


class TakesTooMuch(Regression):
    def training_step(self, batch, batch_idx, dataloader_idx, extra):
        pass


class TakesNothing(Regression):
    def training_step(self):
        pass


class TakesAKeyword(Regression):
    def training_step(self, batch, *, epoch):
        pass


@pytest.mark.parametrize("kind", [TakesTooMuch, TakesNothing, TakesAKeyword])
def test_invalid_step_signature_is_rejected(tmp_path, kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.training_step\(.*\): a step takes \(batch\)"):
        bare_trainer(tmp_path, max_steps=1).fit(kind(), loader())


class Returns(Regression):
    """Task that returns the result of a function of its loss."""

    def __init__(self, form):
        super().__init__(optimizer="SGD")
        self.form = form

    def training_step(self, batch):
        return self.form(loss_of(self, batch))


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: {"loss": loss},
        lambda loss: {"loss": loss, "predictions": "anything"},
        lambda loss: {"loss": loss, "weight": 5},
        lambda loss: (loss, 5),
        lambda loss: (loss, torch.tensor(5)),
        lambda loss: (loss, None),
    ],
)
def test_every_form_of_a_loss_trains_alike(tmp_path, form):
    expected, task = Returns(lambda loss: loss), Returns(form)
    for each in (expected, task):
        bare_trainer(tmp_path, max_steps=3).fit(each, loader())
    assert torch.equal(weights(task), weights(expected))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda loss: loss.item(), r"the loss found is float [\d.]+\. Return the tensor itself, not its value"),
        (lambda loss: 3, "the loss found is int 3. Return the tensor itself"),
        (lambda loss: loss.detach().numpy(), "the loss found is ndarray. Return the tensor itself"),
        (
            lambda loss: loss.expand(3),
            r"a tensor of shape \(3,\) and torch.float32. Reduce the loss to one number, by mean",
        ),
        (lambda loss: loss.expand(0), r"a tensor of shape \(0,\) and torch.float32. The loss is empty"),
        (lambda loss: loss.long(), r"a tensor of shape \(\) and torch.int64. Whole numbers have no gradient"),
        (lambda loss: loss > 0, r"a tensor of shape \(\) and torch.bool. Whole numbers have no gradient"),
        (lambda loss: loss * 1j, r"a tensor of shape \(\) and torch.complex64. A complex number cannot be minimized"),
        (lambda loss: "loss", "the loss found is str 'loss'. Return the loss"),
        (lambda loss: (loss, 1, 2), "the loss found is tuple of 3. Return the loss"),
        (lambda loss: [loss], "the loss found is list of 1. Return the loss"),
        (
            lambda loss: {"los": loss, "logits": 1},
            "dict with the keys 'los', 'logits'. Store the loss under the key 'loss'",
        ),
        (lambda loss: {}, "dict with the keys of none. Store the loss"),
        (lambda loss: {"loss": 3.0}, "the loss found is float 3.0. Return the tensor itself"),
        (lambda loss: (loss, torch.ones(4)), r"the weight found is a tensor of shape \(4,\)"),
        (lambda loss: (loss, "many"), "the weight found is str 'many'. A weight is one number"),
        (lambda loss: (loss, {"accuracy": 1.0}), "the weight found is dict with the keys 'accuracy'"),
    ],
)
def test_a_wrong_return_is_one_clear_error(tmp_path, form, message):
    with pytest.raises(TrainingError, match=f"training_step must return .*; .*{message}"):
        bare_trainer(tmp_path, max_steps=1).fit(Returns(form), loader())


def without_gradients(loss):
    torch.set_grad_enabled(False)
    return loss.detach()


class Frozen(Regression):
    def on_train_start(self):
        self.freeze()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Returns(lambda loss: loss.detach()), "the loss was detached, created by torch.tensor"),
        (Returns(lambda loss: {"loss": torch.tensor(loss.item())}), "the loss was detached, created by torch.tensor"),
        (Returns(lambda loss: (loss.detach(), 3)), "the loss was detached"),
        (Returns(without_gradients), r"gradients are disabled, by torch.set_grad_enabled\(False\)"),
        (Frozen(), "no parameter of the task has requires_grad. Unfreeze"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loss_without_gradient_is_one_clear_error(tmp_path, task, message, precision):
    trainer = bare_trainer(tmp_path, max_steps=1, precision=precision)
    try:
        with pytest.raises(TrainingError, match=f"a loss without a gradient .*: {message}"):
            trainer.fit(task, loader())
    finally:
        torch.set_grad_enabled(True)


def test_constant_of_zero_weight_skips_a_micro_batch(tmp_path):
    def every_second(loss):
        task.calls += 1
        return (torch.zeros(()), 0) if task.calls % 2 else (loss, 1)

    task = Returns(every_second)
    task.calls = 0
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(task, loader(32, 8))
    assert trainer.global_step == 2


@pytest.mark.parametrize("form", [lambda loss: None, lambda loss: {"loss": None}, lambda loss: (None, 3)])
@pytest.mark.parametrize("limit", [{"max_steps": 1}, {"max_epochs": 2}, {"max_steps": 3, "precision": "fp16"}])
def test_run_without_any_step_raises(tmp_path, form, limit):
    endless = ", so training would never end" if "max_steps" in limit else ""
    why = "training_step returned None, or the weight 0, for all of its 7 micro-batches. Does it end with `return loss`"
    with pytest.raises(TrainingError, match=f"epoch 0 made no optimizer step{endless}: {why}"):
        bare_trainer(tmp_path, **limit).fit(Returns(form), loader())


def test_later_epoch_without_steps_changes_nothing(tmp_path, caplog):
    class Late(Regression):
        def training_step(self, batch):
            return None if self.current_epoch else super().training_step(batch)

        def on_train_epoch_start(self):
            self.before = [parameter.clone() for parameter in self.parameters()]

    task = Late()
    trainer = bare_trainer(tmp_path, max_epochs=2, log_level="WARNING")
    trainer.fit(task, loader(16, 8))
    assert (trainer.global_step, trainer.current_epoch) == (2, 2)
    assert all(torch.equal(*pair) for pair in zip(task.before, task.parameters(), strict=True))
    assert "the weights of its micro-batches sum to 0" in caplog.text
    assert "epoch 1 made no optimizer step" in caplog.text


# ---------------------------------------------------------------------- actions of a step that duplicate Lumen's


def make_stepping_task(kind=torch.optim.SGD, scheduler=False, inside=lambda optimizer: optimizer, **options):
    """Return a task with an optimizer, perhaps with a scheduler that wraps its step, or inside another optimizer."""

    class Stepping(Returns):
        def configure_optimizers(self):
            optimizer = inside(kind(self.parameters(), **{"lr": 0.01} | options))
            if not scheduler:
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Stepping


OPTIMIZERS = {
    "plain": make_stepping_task(),
    "with a scheduler": make_stepping_task(scheduler=True),
    "in Lookahead": make_stepping_task(inside=Lookahead),
    "in MultiOptimizer": make_stepping_task(inside=lambda optimizer: MultiOptimizer([optimizer])),
    "with a closure": make_stepping_task(torch.optim.LBFGS, max_iter=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("at", [1, 3])
def test_optimizer_step_in_training_step_raises(tmp_path, kind, at):
    def also_steps(loss):
        if task.global_step + 1 == at:
            task.optimizers().step(*[lambda: loss] * (kind == "with a closure"))
        return loss

    task = OPTIMIZERS[kind](also_steps)
    trainer = bare_trainer(tmp_path, max_steps=4)
    with pytest.raises(TrainingError, match="step was called in a training step, but Lumen calls step once"):
        trainer.fit(task, loader())
    assert trainer.global_step == at - 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_optimizer_step_by_loop_or_afterwards_is_allowed(tmp_path, kind, precision):
    if kind == "with a closure" and precision == "fp16":
        pytest.skip("refused")
    task = OPTIMIZERS[kind](lambda loss: loss)
    trainer = bare_trainer(tmp_path, max_steps=3, precision=precision)
    trainer.fit(task, loader())
    assert trainer.global_step == 3
    before = weights(task)
    loss = loss_of(task, next(iter(loader())))
    loss.backward()
    trainer.optimizers[0].step(*[lambda: loss.detach()] * (kind == "with a closure"))
    assert not torch.equal(weights(task), before)


def backward_too(loss):
    loss.backward()
    return loss


def backward_with_the_graph_kept(loss):
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize("form", [backward_too, backward_with_the_graph_kept])
def test_a_backward_by_the_user_is_an_error(tmp_path, form):
    with pytest.raises(TrainingError, match="training_step has called a backward itself"):
        bare_trainer(tmp_path, max_steps=2).fit(Returns(form), loader())


def test_zero_grad_within_a_step_raises(tmp_path):
    def drop(loss):
        task.optimizers().zero_grad()
        return loss

    task = Returns(drop)
    bare_trainer(tmp_path, max_steps=2).fit(task, loader())  # alone in its step, the call has no effect
    with pytest.raises(TrainingError, match="training_step has called zero_grad itself"):
        bare_trainer(tmp_path, max_steps=2, accumulate_grad_batches=2).fit(task, loader())


def test_autograd_grad_on_inputs_is_allowed(tmp_path):
    class Penalised(Regression):
        def training_step(self, batch):
            inputs, targets = batch[0].requires_grad_(), batch[1]
            loss = nn.functional.mse_loss(self(inputs), targets)
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            return loss + gradient.square().mean()

    trainer = bare_trainer(tmp_path, max_steps=3, accumulate_grad_batches=2)
    trainer.fit(Penalised(), loader())
    assert trainer.global_step == 3


def test_graph_of_an_earlier_step_raises(tmp_path):
    class Recurrent(Regression):
        hidden = torch.zeros(())

        def training_step(self, batch):
            self.hidden = (self.hidden + self(batch[0]).mean()).tanh()
            return self.hidden.square()

    with pytest.raises(TrainingError, match=r"backward was already called on the graph .* such as a hidden state"):
        bare_trainer(tmp_path, max_steps=3).fit(Recurrent(), loader())


# ---------------------------------------------------------------------- gradients


def test_gradients_are_readable_until_the_next_step(tmp_path):
    class Reading(Regression):
        norms = ()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
            self.norms = (*self.norms, gradient.norm().item())

        def on_before_zero_grad(self, optimizer):
            if self.norms:
                gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
                assert gradient.norm().item() == self.norms[-1]

    task = Reading()
    bare_trainer(tmp_path, max_steps=4).fit(task, loader())
    assert len(set(task.norms)) == 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_begins_without_gradients_of_the_last(tmp_path, accumulate):
    """Gradients are None, as after `zero_grad(set_to_none=True)`: with zeros, momentum would move `once` further."""

    class Once(Regression):
        def __init__(self):
            super().__init__()
            self.once = nn.Parameter(torch.ones(()))
            self.freed = []

        def training_step(self, batch):
            self.freed.append([parameter.grad is None for parameter in self.parameters()])
            loss = super().training_step(batch)
            return loss + self.once.square() if self.global_step == 0 else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.9)

    task = Once()
    bare_trainer(tmp_path, max_steps=3, accumulate_grad_batches=accumulate).fit(task, loader())
    assert [all(freed) for freed in task.freed[::accumulate]] == [True] * 3
    assert not any(any(freed[1:]) for number, freed in enumerate(task.freed) if number % accumulate)
    assert task.once.item() == 0.5


@pytest.mark.parametrize("held", ["trainable", "all"])
def test_frozen_parameters_neither_move_nor_have_state(tmp_path, held):
    class Chosen(Regression):
        def configure_optimizers(self):
            chosen = [each for each in self.parameters() if each.requires_grad or held == "all"]
            return torch.optim.AdamW(chosen, lr=1e-2)

    task, net = Chosen(), network()
    for layers in (task.net, net):
        layers[0].requires_grad_(False)
    trainer = bare_trainer(tmp_path, max_epochs=1, gradient_clip_val=0.1)
    trainer.fit(task, loader(shuffle=False))

    optimizer = torch.optim.AdamW(net[3].parameters(), lr=1e-2)
    for inputs, targets in loader(shuffle=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    assert torch.equal(weights(task), weights(net))
    (ours,) = trainer.optimizers
    assert {*ours.state} == {*task.net[3].parameters()}
    if held == "trainable":
        assert [{*group["params"]} for group in ours.param_groups] == [{*task.net[3].parameters()}]


def test_loaders_may_live_on_the_task(tmp_path):
    class Complete(Recorded):
        opened = ()

        def train_dataloader(self):
            self.opened = (*self.opened, "train")
            return DataLoader(TensorDataset(torch.randn(16, FEATURES), torch.randn(16, 1)), 8)

        def val_dataloader(self):
            self.opened = (*self.opened, "validate")
            return loader(16, 8)

    for limit, opened in ((None, ("train", "validate")), (0, ("train",))):
        task = Complete()
        bare_trainer(tmp_path, max_epochs=3, limit_val_batches=limit).fit(task)
        assert task.opened == opened  # once, and never for a disabled stage
