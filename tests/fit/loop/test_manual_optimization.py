"""Manual optimization: the backwards and steps of the task are counted, clipped, scaled, saved and refused."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.errors import ConfigError, TrainingError
from tests.helpers.manual_optimization import (
    Gan,
    critic_loss,
    generator_loss,
    make_networks,
    make_optimizers,
    make_pair_loader,
    make_pairs,
)
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights


def train_by_hand(steps, dtype=torch.float32, autocast=nullcontext, scaler=None, every=1):
    """Train a `Gan` by a loop written by hand."""
    generator, critic = make_networks(dtype)
    (ours, theirs), schedules = make_optimizers(generator, critic)
    batches = list(zip(*(each.split(8) for each in make_pairs(dtype=dtype)), strict=True))
    for step in range(steps):
        real, noise = batches[step % len(batches)]
        with autocast():
            loss = critic_loss(generator, critic, real, noise)
        move(loss, theirs, scaler)
        schedules[1].step()
        if step % len(batches) % every == every - 1:
            critic.requires_grad_(False)
            with autocast():
                loss = generator_loss(generator, critic, noise)
            move(loss, ours, scaler, clip=0.05)
            critic.requires_grad_(True)
            schedules[0].step()
        if scaler is not None:
            scaler.update()
    return weights(nn.ModuleList([generator, critic]))


def move(loss, optimizer, scaler, clip=None):
    optimizer.zero_grad()
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)


def train_gan(tmp_path, task=None, dtype=torch.float32, **options):
    """Return a `Gan` after some steps, and its trainer."""
    task = Gan(dtype) if task is None else task
    trainer = bare_trainer(tmp_path, **{"max_steps": 12} | options)
    trainer.fit(task, make_pair_loader(dtype=dtype))
    return task, trainer


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_equal_the_manual_loop(tmp_path, every):
    task, trainer = train_gan(tmp_path, Gan(torch.float32, every))
    assert torch.equal(weights(task), train_by_hand(12, every=every))
    assert trainer.global_step == 12
    assert task.indices == [*range(7), *range(5)]


def test_bf16_forward_sees_updated_parameters(tmp_path):
    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    task, _ = train_gan(tmp_path, precision="bf16")
    assert torch.equal(weights(task), train_by_hand(12, autocast=autocast))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")  # torch's, of the manual loop
def test_fp16_scaling_and_skipping_equal_manual_loop(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    expected = train_by_hand(14, autocast=lambda: torch.autocast("cpu", torch.float16), scaler=scaler)
    precision = lumen.precision.Float16(init_scale=2.0**18, growth_interval=3)
    task, trainer = train_gan(tmp_path, precision=precision, max_epochs=2, max_steps=-1)
    assert torch.equal(weights(task), expected)
    assert precision.state_dict()["scale"] == scaler.get_scale()
    assert 0 < precision.skipped_updates < 14
    assert trainer.global_step < 14


def test_manual_accumulation_counts_only_updates_as_steps(tmp_path):
    class Accumulating(Regression):
        def __init__(self):
            super().__init__(dtype=torch.float64, optimizer="SGD")
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.manual_backward(loss / 2)
            if batch_idx % 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    task, whole = Accumulating(), Regression(dtype=torch.float64, optimizer="SGD")
    trainer = bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(48, 4, dtype=torch.float64))
    assert trainer.global_step == 12
    bare_trainer(tmp_path, max_epochs=2).fit(whole, loader(48, 8, dtype=torch.float64))
    torch.testing.assert_close(weights(task), weights(whole), rtol=0, atol=1e-14)


def test_manual_accumulation_is_exact_with_changing_scale(tmp_path):
    class Accumulating(Regression):
        def __init__(self):
            super().__init__(optimizer="SGD")
            self.automatic_optimization = False
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.net[0].weight.sum())
            self.seen.append(float(self.net[0].weight.grad[0, 0]))
            other = self.optimizers()
            if batch_idx % 3 == 2:
                other.step()
                other.zero_grad()

    precision = lumen.precision.Float16(init_scale=4.0, growth_interval=1)
    task = Accumulating()
    bare_trainer(tmp_path, max_epochs=1, precision=precision).fit(task, loader(48))
    assert task.seen == [1.0, 2.0, 3.0] * 2
    assert precision.state_dict()["scale"] == 16.0


def test_overflow_skips_only_the_affected_optimizer(tmp_path):
    class Half(Gan):
        def move_generator(self, optimizer, noise):
            optimizer.zero_grad()
            self.manual_backward(self.generator(noise).float().mean() * 1e38)
            optimizer.step()

    task = Half(torch.float32)
    before = weights(task.generator), weights(task.critic)
    precision = lumen.precision.Float16(init_scale=1024.0)
    trainer = bare_trainer(tmp_path, max_epochs=1, limit_train_batches=3, precision=precision)
    trainer.fit(task, make_pair_loader(dtype=torch.float32))
    assert torch.equal(weights(task.generator), before[0])
    assert not torch.equal(weights(task.critic), before[1])
    assert trainer.global_step == 3
    assert precision.state_dict()["scale"] == 128.0


def test_an_optimizer_with_a_closure_evaluates_it(tmp_path):
    class Searching(Regression):
        def __init__(self):
            super().__init__(dtype=torch.float64)
            self.automatic_optimization = False

        def training_step(self, batch):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(self(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            self.losses = [*getattr(self, "losses", []), optimizer.step(closure).item()]

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)

    task, expected = Searching(), Searching()
    bare_trainer(tmp_path, max_steps=3).fit(task, loader(24, 8, shuffle=False, dtype=torch.float64))
    optimizer = torch.optim.LBFGS(expected.parameters(), lr=0.5, max_iter=4)
    for batch in loader(24, 8, shuffle=False, dtype=torch.float64):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(expected(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    assert torch.equal(weights(task), weights(expected))
    assert len(task.losses) == 3


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.01), ("value", 0.001), (None, 0.02)])
def test_clip_gradients_equals_torch_for_one_optimizer(tmp_path, algorithm, value):
    class Clipping(Gan):
        def training_step(self, batch):
            ours, theirs = self.optimizers()
            for each in (ours, theirs):
                each.zero_grad()
            self.manual_backward(critic_loss(self.generator, self.critic, *batch))
            self.manual_backward(generator_loss(self.generator, self.critic, batch[1]))
            held = list(self.critic.parameters())
            expected = nn.ParameterList([nn.Parameter(each.detach().clone()) for each in held])
            for each, parameter in zip(expected, held, strict=True):
                each.grad = parameter.grad.clone()
            others = [each.grad.clone() for each in self.generator.parameters()]
            (nn.utils.clip_grad_value_ if algorithm == "value" else nn.utils.clip_grad_norm_)(expected, value)
            self.clip_gradients(theirs, gradient_clip_val=value, gradient_clip_algorithm=algorithm)
            self.same = [torch.equal(each.grad, other.grad) for each, other in zip(expected, held, strict=True)]
            left = zip(self.generator.parameters(), others, strict=True)
            self.same += [torch.equal(each.grad, other) for each, other in left]
            theirs.step()

    task, _ = train_gan(tmp_path, Clipping(torch.float32), max_steps=2)
    assert task.same == [True] * 8


# ---------------------------------------------------------------------- steps and checkpoints


def find_newest(trainer):
    return Checkpoint.open(find_checkpoints(trainer.run_directory / "checkpoints")[-1])


class Late(Gan):
    """Task whose generator moves in every second batch, by the gradients of two, and whose critic moves in each."""

    def training_step(self, batch, batch_idx):
        ours, theirs = self.optimizers()
        theirs.zero_grad()
        with self.toggled_optimizer(theirs):
            self.manual_backward(critic_loss(self.generator, self.critic, *batch))
        theirs.step()
        with self.toggled_optimizer(ours):
            self.manual_backward(generator_loss(self.generator, self.critic, batch[1]))
        if batch_idx % 2:
            ours.step()
            ours.zero_grad()


def test_only_gradients_of_later_updates_are_saved(tmp_path):
    ends = []
    for name, cuts in (("whole", (12,)), ("parts", (3, 12))):
        for max_steps in cuts:
            task = Late()
            trainer = quiet_trainer(tmp_path / name, max_steps=max_steps, resume="auto")
            trainer.fit(task, make_pair_loader(64))
            if max_steps == 3:
                saved = find_newest(trainer).state["optimizer"]["gradients"]
                assert [*saved] == [f"generator.{each}" for each, _ in task.generator.named_parameters()]
        ends.append(weights(task))
    assert torch.equal(*ends)
    assert "gradients" not in find_newest(trainer).state["optimizer"]


def test_only_training_steps_with_updates_count(tmp_path):
    """The count decides about checkpoints, validations and limits."""
    task = Gan(every=2)
    checkpoints = lumen.ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    trainer = quiet_trainer(tmp_path, max_steps=10, val_check_interval=5, callbacks=[checkpoints])
    trainer.fit(task, make_pair_loader(), make_pair_loader())
    assert trainer.global_step == 10
    names = [path.name for path in sorted((trainer.run_directory / "checkpoints").iterdir())]
    assert names == ["step-00000004", "step-00000008", "step-00000010"]


class Accumulating(Gan):
    """Task that updates at every fourth batch only."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(critic_loss(self.generator, self.critic, *batch))
        if batch_idx % 4 == 3:
            optimizer = self.optimizers()[1]
            optimizer.step()
            optimizer.zero_grad()


def test_batches_without_updates_are_not_saved(tmp_path):
    checkpoints = lumen.ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=[checkpoints])
    trainer.fit(Accumulating(), make_pair_loader(128))
    names = sorted(path.name for path in (trainer.run_directory / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002", "step-00000003"]


def test_task_steps_schedulers_and_loop_settings_warn(tmp_path, caplog):
    class Scheduled(Gan):
        def training_step(self, batch, batch_idx):
            theirs = self.optimizers()[1]
            theirs.zero_grad()
            self.manual_backward(critic_loss(self.generator, self.critic, *batch))
            theirs.step()
            if batch_idx == 3:
                self.lr_schedulers().step()

        def configure_optimizers(self):
            ours, theirs = super().configure_optimizers()[0]
            schedule = torch.optim.lr_scheduler.StepLR(theirs, 1, 0.5)
            entry = {"scheduler": schedule, "interval": "step", "frequency": 2}
            return {"optimizer": ours}, {"optimizer": theirs, "lr_scheduler": entry}

    task = Scheduled()
    trainer = quiet_trainer(tmp_path, max_epochs=2, log_level="WARNING")
    with caplog.at_level(logging.WARNING, logger="lumen"):
        trainer.fit(task, make_pair_loader())
    assert [group["lr"] for group in find_newest(trainer).state["optimizer"]["groups"]] == [0.01, 0.1 / 4]
    assert "configure_optimizers returned frequency, interval, which manual optimization ignores" in caplog.text


def test_toggle_optimizer_freezes_others_and_restores_them(tmp_path):
    seen = []

    class Toggling(Gan):
        def training_step(self, batch):
            self.critic[0].bias.requires_grad_(False)
            ours, theirs = self.optimizers()
            self.toggle_optimizer(ours)
            seen.append([each.requires_grad for each in self.parameters()])
            self.untoggle_optimizer(ours)
            with theirs.toggle_model(sync_grad=False):
                seen.append([each.requires_grad for each in self.parameters()])
            self.toggle_optimizer(theirs)  # left frozen: the end of the step restores it

    task = Toggling()
    with pytest.raises(TrainingError, match="made no optimizer step"):
        bare_trainer(tmp_path, max_steps=1, limit_train_batches=1).fit(task, make_pair_loader())
    critic = [True, False, True, True]
    assert seen == [[True] * 4 + [False] * 4, [False] * 4 + critic]
    assert [each.requires_grad for each in task.parameters()] == [True] * 4 + critic


def test_single_optimizer_wraps_the_torch_optimizer(tmp_path):
    seen = {}

    class One(Regression):
        automatic_optimization = False

        def training_step(self, batch):
            optimizer = self.optimizers()
            seen.update(raw=self.optimizers(use_pl_optimizer=False), shown=optimizer, schedulers=self.lr_schedulers())
            self.manual_backward(self(batch[0]).mean())
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups is optimizer.optimizer.param_groups

    trainer = bare_trainer(tmp_path, max_steps=2)
    trainer.fit(One(), loader())
    assert type(seen["raw"]) is torch.optim.AdamW
    assert seen["shown"].optimizer is seen["raw"]
    assert repr(seen["shown"]).startswith("AdamW")
    assert seen["schedulers"] is None


def test_hooks_are_called_around_each_backward_and_step(tmp_path):
    calls = []

    class Watching(lumen.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            calls.append(f"start {batch_idx}")

        def on_before_backward(self, trainer, task, loss):
            calls.append("before backward")

        def on_after_backward(self, trainer, task):
            calls.append("after backward")

        def on_before_optimizer_step(self, trainer, task, optimizer):
            calls.append(type(optimizer).__name__)

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            calls.append(f"end {batch_idx}")

    bare_trainer(tmp_path, max_steps=2, callbacks=[Watching()]).fit(Gan(every=2), make_pair_loader())
    backward = ["before backward", "after backward"]
    assert calls == [
        "start 0", *backward, "SGD", "end 0", "start 1", *backward, "SGD", *backward, "Adam", "end 1",
    ]  # fmt: skip


def test_a_hook_ends_the_epoch_before_the_step(tmp_path):
    class Leaving(Gan):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    task = Leaving()
    trainer = bare_trainer(tmp_path, max_epochs=3)
    trainer.fit(task, make_pair_loader())
    assert task.indices == [0, 1] * 3
    assert trainer.global_step == 6


def test_lumens_callbacks_see_its_steps(tmp_path):
    callbacks = [lumen.LearningRateMonitor(), lumen.ThroughputMonitor()]
    trainer = quiet_trainer(tmp_path, max_steps=4, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(Gan(every=2), make_pair_loader())
    rows = read_rows(trainer.run_directory / "metrics.csv")
    assert [row["lr/group_1"] for row in rows if row["lr/group_1"]][:4] == ["0.1", "0.1", "0.1", "0.05"]
    system = read_rows(trainer.run_directory / "system.csv")
    assert [row["step"] for row in system] == ["1", "2", "3", "4"]
    assert all(float(row["samples_per_s"]) > 0 for row in system)


def test_an_error_in_a_step_leaves_nothing_frozen(tmp_path):
    class Failing(Gan):
        def training_step(self, batch):
            self.toggle_optimizer(self.optimizers()[0])
            raise ZeroDivisionError

    task = Failing()
    with pytest.raises(ZeroDivisionError):
        bare_trainer(tmp_path, max_steps=1).fit(task, make_pair_loader())
    assert all(parameter.requires_grad for parameter in task.parameters())


@pytest.mark.parametrize("first", [True, False])
def test_exception_between_updates_saves_nothing(tmp_path, caplog, first):
    class Failing(Gan):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3 and not first:
                raise ZeroDivisionError
            super().training_step(batch, batch_idx)

        def move_generator(self, optimizer, noise):
            if self.global_step == 3:
                raise ZeroDivisionError
            super().move_generator(optimizer, noise)

    trainer = quiet_trainer(tmp_path, max_steps=9, callbacks=[lumen.OnExceptionCheckpoint()], log_level="WARNING")
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.WARNING, logger="lumen"):
        trainer.fit(Failing(), make_pair_loader())
    saved = [path.name for path in (trainer.run_directory / "checkpoints").glob("*")]
    assert saved == ([] if first else ["exception-step-00000003"])
    assert ("after an optimizer's update, so the step may be incomplete" in caplog.text) == first


def test_steps_can_be_called_without_a_trainer():
    task = Regression()
    task.manual_backward(task(torch.ones(2, 6)).mean())
    assert task.net[0].weight.grad is not None
    with pytest.raises(ConfigError, match=r"self.optimizers\(\): there is no optimizer"):
        task.optimizers()


# ---------------------------------------------------------------------- refused code


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches: 2, but Gan has automatic_optimization"),
        ({"gradient_clip_val": 0.5}, r"call self.clip_gradients\(optimizer, gradient_clip_val"),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "gradient_clip_val: 0.5"),
    ],
)
def test_manual_optimization_rejects_loop_settings(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        bare_trainer(tmp_path, max_steps=1, **options).fit(Gan(), make_pair_loader())


@pytest.mark.parametrize("call", ["manual_backward", "toggle_optimizer", "untoggle_optimizer"])
def test_manual_calls_are_rejected_in_automatic_optimization(tmp_path, call):
    class Mistaken(Regression):
        def training_step(self, batch):
            getattr(self, call)(self.optimizers() if "toggle" in call else super().training_step(batch))

    with pytest.raises(TrainingError, match=rf"{call} is for manual optimization.*automatic_optimization = False"):
        bare_trainer(tmp_path, max_steps=1).fit(Mistaken(), loader())


def test_step_of_a_raw_optimizer_is_rejected(tmp_path):
    class Keeping(Gan):
        def training_step(self, batch):
            self.manual_backward(critic_loss(self.generator, self.critic, *batch))
            self.kept.step()

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()[0]
            self.kept = optimizers[1]
            return optimizers

    with pytest.raises(TrainingError, match=r"SGD.step was called .* self.optimizers\(\)"):
        bare_trainer(tmp_path, max_steps=1).fit(Keeping(), make_pair_loader())


def test_fp16_rejects_plain_backward(tmp_path):
    class Plain(Gan):
        def training_step(self, batch):
            critic_loss(self.generator, self.critic, *batch).backward()
            self.optimizers()[1].step()

    with pytest.raises(
        TrainingError, match=r"manual_backward was not called for its parameters.*instead of loss.backward\(\)"
    ):
        bare_trainer(tmp_path, max_steps=1, precision="fp16").fit(
            Plain(torch.float32), make_pair_loader(dtype=torch.float32)
        )


def test_detached_or_infinite_loss_raises(tmp_path):
    class Lossless(Gan):
        def training_step(self, batch):
            with torch.no_grad():
                self.manual_backward(critic_loss(self.generator, self.critic, *batch))

    class Infinite(Gan):
        def training_step(self, batch):
            self.manual_backward(critic_loss(self.generator, self.critic, *batch) * torch.inf)

    with pytest.raises(TrainingError, match="without a gradient"):
        bare_trainer(tmp_path, max_steps=1).fit(Lossless(), make_pair_loader())
    with pytest.raises(lumen.errors.NonFiniteLoss, match="step 1"):
        bare_trainer(tmp_path, max_steps=1).fit(Infinite(), make_pair_loader())


def test_several_optimizers_explain_both_ways(tmp_path):
    class Automatic(Gan):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(ConfigError, match=r"automatic_optimization = False.*MultiOptimizer"):
        bare_trainer(tmp_path, max_steps=1).fit(Automatic(), make_pair_loader())


# ---------------------------------------------------------------------- combinations of features


class ByHand(Regression):
    """Task with the step of a `Regression` by hand; subclasses change a part of it."""

    def __init__(self, dtype=torch.float64):
        super().__init__(dtype=dtype)
        self.automatic_optimization = False

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        optimizer = optimizers[batch_idx % 2] if isinstance(optimizers, list) else optimizers
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Sharing(ByHand):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01), torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def test_optimizers_may_share_parameters_and_resume(tmp_path):
    data = loader(24, 4, shuffle=False, dtype=torch.float64)
    for name, cuts in (("whole", (9,)), ("parts", (4, 9))):
        for max_steps in cuts:
            task = Sharing()
            quiet_trainer(tmp_path / name, max_steps=max_steps, resume="auto").fit(task, data)
        expected = Sharing()
        optimizers = expected.configure_optimizers()
        batches = list(data)
        for step in range(9):
            optimizer = optimizers[step % 6 % 2]
            optimizer.zero_grad()
            expected.loss(batches[step % 6]).backward()
            optimizer.step()
        assert torch.equal(weights(task), weights(expected)), name


class Looking(ByHand):
    def training_step(self, batch, batch_idx):
        first, *_ = self.optimizers()
        raw, *_ = self.optimizers(use_pl_optimizer=False)
        self.seen = (first.optimizer is raw, isinstance(first, torch.optim.Adam), isinstance(first, torch.optim.SGD))
        with pytest.raises(ConfigError, match=r"optimizer\.step: expected a function"):
            first.step(closure=3)
        super().training_step(batch, batch_idx)

    configure_optimizers = Sharing.configure_optimizers


class LookingInSteps(Regression):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        mine, raw = self.optimizers(), self.trainer.optimizers[0]
        self.seen = [(each.optimizer is raw, isinstance(each, type(raw)), each.defaults) for each in (optimizer, mine)]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def test_optimizers_of_a_task_have_attributes_of_lightning(tmp_path):
    task = Looking()
    bare_trainer(tmp_path, max_steps=1).fit(task, loader(24, 4, dtype=torch.float64))
    assert task.seen == (True, True, False)
    task = LookingInSteps()
    trainer = bare_trainer(tmp_path, max_steps=1)
    trainer.fit(task, loader())
    assert task.seen == [(True, True, trainer.optimizers[0].defaults)] * 2
    for owner in (trainer, trainer.strategy):
        with pytest.raises(ConfigError, match=r"optimizers cannot be set\. Change trainer\.optimizers\[0\]"):
            owner.optimizers = []
    with pytest.raises(AttributeError, match=r"Read trainer\.optimizers"):
        trainer.strategy.optimizers  # noqa: B018


class SkipsSome(lumen.Callback):
    def on_before_optimizer_step(self, trainer, task, optimizer):
        if trainer.progress.batches % 2:
            trainer.skip_update()


@pytest.mark.parametrize("precision", ["fp64", "fp16"])
def test_skip_update_leaves_out_an_update_by_hand(tmp_path, precision):
    task = ByHand(torch.float32)
    trainer = bare_trainer(tmp_path, max_epochs=1, callbacks=[SkipsSome()], precision=precision)
    trainer.fit(task, loader(24, 4, shuffle=False, dtype=torch.float64 if precision == "fp64" else torch.float32))
    assert trainer.global_step == 3
    if precision == "fp64":
        expected = ByHand()
        expected.load_state_dict(ByHand(torch.float32).state_dict())
        optimizer = expected.configure_optimizers()
        for number, batch in enumerate(loader(24, 4, shuffle=False, dtype=torch.float64)):
            if number % 2 == 0:
                optimizer.zero_grad()
                expected.loss(batch).backward()
                optimizer.step()
        assert torch.equal(weights(task), weights(expected))


class Weighed(ByHand):
    def __init__(self, weights_):
        super().__init__()
        self.weights, self.step_every = weights_, 1

    def batch_weight(self, batch):
        return self.weights[int(self.trainer.progress.batches)]

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        if batch_idx % self.step_every == self.step_every - 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_batches_that_weigh_nothing_make_no_update(tmp_path, caplog):
    task = Weighed([1.0, 0.0, 0.0])
    before = []
    task.on_train_batch_end = lambda *_: before.append(weights(task))
    trainer = bare_trainer(tmp_path, max_epochs=1, log_level="WARNING")
    with caplog.at_level(logging.WARNING, logger="lumen"):
        trainer.fit(task, loader(12, 4, dtype=torch.float64))
    assert trainer.global_step == 1
    assert torch.equal(before[0], before[2])
    assert "a step of AdamW was skipped: the weights of its batches sum to 0" in caplog.text


def test_accumulated_gradients_survive_a_weightless_batch(tmp_path):
    task = Weighed([1.0, 0.0])
    task.step_every = 2
    before = weights(task)
    trainer = bare_trainer(tmp_path, max_epochs=1)
    trainer.fit(task, loader(8, 4, dtype=torch.float64))
    assert trainer.global_step == 1
    assert not torch.equal(weights(task), before)


class ReadsLoss(lumen.Callback):
    needs_step_loss = True

    def on_before_optimizer_step(self, trainer, task, optimizer):
        trainer.step_loss()


def test_step_loss_is_refused_by_hand(tmp_path):
    with pytest.raises(ConfigError, match="ByHand uses manual optimization, so Lumen does not know the loss"):
        bare_trainer(tmp_path, max_steps=2, callbacks=[ReadsLoss()]).fit(ByHand(), loader(dtype=torch.float64))


class Searching(ByHand):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            predicted = self(batch[0])
            self.seen.append(predicted.dtype)
            loss = nn.functional.mse_loss(predicted.float(), batch[1].float())
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def test_a_closure_by_hand_runs_under_autocast(tmp_path):
    task = Searching(torch.float32)
    task.seen = []
    bare_trainer(tmp_path, max_steps=2, precision="bf16").fit(task, loader(16, 8, shuffle=False))
    expected = Searching(torch.float32)
    optimizer = expected.configure_optimizers()
    for inputs, targets in loader(16, 8, shuffle=False):

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.mse_loss(expected(inputs).float(), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert {*task.seen} == {torch.bfloat16}
    assert torch.equal(weights(task), weights(expected))


def test_a_step_without_its_closure_is_one_error(tmp_path):
    class Forgetting(Searching):
        training_step = ByHand.training_step

    with pytest.raises(TrainingError, match=r"LBFGS.step evaluates the loss and needs a closure"):
        bare_trainer(tmp_path, max_steps=1).fit(Forgetting(), loader(dtype=torch.float64))
