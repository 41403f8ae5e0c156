"""Overridden parts of a step: backward, clipping, the update, its schedule, dropping gradients."""

import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, bare_trainer, loader, weights


def train(tmp_path, kind, data=None, **options):
    task = kind()
    trainer = bare_trainer(tmp_path, **{"max_steps": 6} | options)
    trainer.fit(task, loader() if data is None else data)
    return task, trainer


class Every(Regression):
    """Task that overrides all of them, and does the same as Lumen in each."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def backward(self, loss, *args, **kwargs):
        self.calls.append("backward")
        super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append(("zero", epoch, batch_idx, type(optimizer).__name__))
        optimizer.zero_grad()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.calls.append(("clip", gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.calls.append(("step", epoch, batch_idx))
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler, metric):
        self.calls.append(("schedule", metric))
        scheduler.step()

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": get_schedule(optimizer), "interval": "step"}}


class Plain(Regression):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": get_schedule(optimizer), "interval": "step"}}


def get_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "fp16", "gradient_clip_val": 0.05},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_equivalent_overrides_change_no_bit(tmp_path, options):
    task, trainer = train(tmp_path, Every, **options)
    assert torch.equal(weights(task), weights(train(tmp_path, Plain, **options)[0]))
    assert trainer.global_step == 6


def test_overrides_are_called_in_order_of_lightning(tmp_path):
    task, _ = train(tmp_path, Every, max_steps=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    step = ["backward", "backward", ("clip", 0.5, "norm")]
    assert task.calls == [
        ("zero", 0, 0, "AdamW"), *step, ("step", 0, 1), ("schedule", None),
        ("zero", 0, 2, "AdamW"), *step, ("step", 0, 3), ("schedule", None),
    ]  # fmt: skip


def test_optimizer_step_may_warm_up_and_skip_updates(tmp_path):
    class WarmingUp(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.losses = [*getattr(self, "losses", []), float(optimizer_closure())]
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (self.global_step + 1)
            if batch_idx != 2:
                optimizer.step(closure=optimizer_closure)

    task, trainer = train(tmp_path, WarmingUp, loader(48, shuffle=False), max_epochs=1, max_steps=-1)
    assert trainer.global_step == 5
    expected = Regression()
    optimizer = expected.configure_optimizers()
    for number, (inputs, targets) in enumerate(loader(48, shuffle=False)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(expected(inputs), targets)
        loss.backward()
        assert task.losses[number] == float(loss.detach())
        optimizer.param_groups[0]["lr"] = 1e-3 * (number + 1 - (number > 2))
        if number != 2:
            optimizer.step()
    assert torch.equal(weights(task), weights(expected))


def test_custom_clipping_is_applied(tmp_path):
    class ByParts(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            nn.utils.clip_grad_norm_(self.net[0].parameters(), 0.01)
            nn.utils.clip_grad_norm_(self.net[3].parameters(), 0.02)

        def on_train_batch_end(self, *_):
            self.norms = [nn.utils.get_total_norm([each.grad for each in self.net[n].parameters()]) for n in (0, 3)]

    task, _ = train(tmp_path, ByParts)
    assert [round(float(each), 4) for each in task.norms] == [0.01, 0.02]


def test_fp16_trains_with_skipped_and_repeated_updates(tmp_path):
    class Uneven(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            for _ in range(batch_idx % 3):
                optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    task, trainer = train(tmp_path, Uneven, loader(48, shuffle=False), max_epochs=1, max_steps=-1, precision="fp16")
    assert trainer.global_step == 4
    expected = Uneven()
    optimizer = expected.configure_optimizers()
    for number, (inputs, targets) in enumerate(loader(48, shuffle=False)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(expected(inputs), targets)
        (loss * 65536.0).backward()
        for parameter in expected.parameters():
            parameter.grad /= 65536.0
        for _ in range(number % 3):
            optimizer.step()
    assert torch.equal(weights(task), weights(expected))


def test_a_step_that_clips_nothing_shows_no_norm(tmp_path):
    class Sometimes(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            if self.global_step % 2 == 0:
                self.clip_gradients(optimizer, 0.05, "norm")

        def on_train_batch_end(self, *_):
            self.norms = [*getattr(self, "norms", []), self.trainer.run.step.grad_norm is not None]

    task, _ = train(tmp_path, Sometimes)
    assert task.norms == [True, False] * 3


def test_clip_gradients_alone_may_be_overridden(tmp_path):
    class Sign(Regression):
        def clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.seen = gradient_clip_val, gradient_clip_algorithm
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    task, _ = train(tmp_path, Sign, gradient_clip_val=0.02, gradient_clip_algorithm="value")
    assert task.seen == (0.02, "value")
    assert torch.equal(weights(task), weights(train(
        tmp_path, Regression, gradient_clip_val=0.02, gradient_clip_algorithm="value"
    )[0]))  # fmt: skip


def test_a_plateau_is_given_its_value(tmp_path):
    class Watching(Regression):
        def lr_scheduler_step(self, scheduler, metric):
            self.seen = [*getattr(self, "seen", []), metric]
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    task = Watching()
    trainer = bare_trainer(tmp_path, max_epochs=3)
    trainer.fit(task, loader(), loader(shuffle=False))
    assert len(task.seen) == 3
    assert task.seen[-1] == trainer.newest_values["val_loss"]


def test_an_optimizer_with_a_closure_gets_lumens(tmp_path):
    class Searching(Regression):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)

    class Own(Searching):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)

    task, _ = train(tmp_path, Own, max_steps=3)
    assert torch.equal(weights(task), weights(train(tmp_path, Searching, max_steps=3)[0]))


class Curved(torch.optim.SGD):
    """Optimizer that divides each gradient by its derivative, like the optimizers with second derivatives."""

    def step(self, closure=None):
        held = [each for group in self.param_groups for each in group["params"]]
        second = torch.autograd.grad(sum(each.grad.sum() for each in held), held)
        for parameter, curve in zip(held, second, strict=True):
            parameter.data.sub_(0.01 * parameter.grad.detach() / (1.0 + curve.abs()))


class Curving(Regression):
    def configure_optimizers(self):
        return Curved(self.parameters())


class CurvingTwice(Curving):
    def backward(self, loss, *args, **kwargs):
        loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_derivatives_need_a_kept_graph(tmp_path):
    task, _ = train(tmp_path, CurvingTwice, loader(48, shuffle=False))
    expected = CurvingTwice()
    optimizer = expected.configure_optimizers()
    for inputs, targets in loader(48, shuffle=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(expected(inputs), targets).backward(create_graph=True)
        optimizer.step()
    assert torch.equal(weights(task), weights(expected))
    with pytest.raises(RuntimeError) as caught:
        train(tmp_path, Curving)
    assert "If Curved computes second derivatives, let the task's backward" in caught.value.__notes__[0]


def test_lightning_1_arguments_are_rejected_before_training(tmp_path):
    class Old(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_lbfgs):
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(
        ConfigError, match=r"Lumen calls this method with \(epoch, batch_idx, optimizer, optimizer_closure\)"
    ):
        train(tmp_path, Old)


def test_an_unknown_way_to_clip_is_refused(tmp_path):
    class Mistaken(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="nrom")

    with pytest.raises(lumen.LumenError, match='expected "norm" or "value", found \'nrom\''):
        train(tmp_path, Mistaken)
