"""Closures: optimizers that evaluate the loss several times in a step compute every evaluation for that step."""

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.data.permutation import make_epoch_order
from lumen.errors import CheckpointMismatch, ConfigError, TrainingError
from tests.helpers.manual_optimization import SharpByHand, make_sharp
from tests.helpers.tasks import Regression, network, quiet_trainer, regression_data, weights

SEED = 3
UNRECORDED = {"logger": False, "enable_checkpointing": False}


def make_lbfgs(parameters, **options):
    return LBFGS(parameters, **{"lr": 0.3, "max_iter": 4, "history_size": 5, "line_search_fn": None} | options)


class Evaluated(Regression):
    """Task with an optimizer that a function makes of its parameters."""

    build = staticmethod(make_lbfgs)

    def configure_optimizers(self):
        return self.build(self.parameters())


def with_optimizer(build, task=None):
    task = task or Evaluated()
    task.build = build
    return task


def make_data(samples=53, batch_size=8, dtype=torch.float32):
    return DataLoader(TensorDataset(*regression_data(samples, dtype)), batch_size, shuffle=True)


def fit(tmp_path, task, loader, **options):
    trainer = quiet_trainer(tmp_path, **UNRECORDED | {"max_epochs": 2} | options)
    trainer.fit(task, loader)
    return trainer


# ---------------------------------------------------------------------- the loop written by hand


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}, {"clip": 0.05}])
def test_lbfgs_equals_the_manual_loop(tmp_path, precision, options):
    options = dict(options)
    clip = options.pop("clip", None)
    task = with_optimizer(lambda parameters: make_lbfgs(parameters, **options))
    task.net.insert(1, nn.BatchNorm1d(16))
    fit(tmp_path, task, make_data(), precision=precision, gradient_clip_val=clip)

    inputs, targets = regression_data(53)
    net = network()
    net.insert(1, nn.BatchNorm1d(16))
    optimizer = make_lbfgs(net.parameters(), **options)
    evaluations = 0
    for epoch in range(2):
        for batch in make_epoch_order(53, SEED, epoch, shuffle=True).split(8):

            def closure(batch=batch):
                nonlocal evaluations
                evaluations += 1
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = nn.functional.mse_loss(net(inputs[batch]), targets[batch])
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                return loss

            optimizer.step(closure)
    assert evaluations > 3 * 14
    assert torch.isfinite(weights(net)).all()
    for ours, by_hand in zip(task.net.state_dict().values(), net.state_dict().values(), strict=True):
        assert torch.equal(ours, by_hand)


class Tokens(lumen.TaskModule):
    """Task with a loss over a varying number of tokens per sample."""

    def __init__(self, how):
        super().__init__()
        self.net = network(dtype=torch.float64)
        self.how = how

    def training_step(self, batch):
        inputs, targets, tokens = batch
        errors = (self.net(inputs) - targets).pow(2).squeeze(1)
        if self.how == "samples":
            return errors.mean()
        loss = (errors * tokens).sum() / tokens.sum()
        return loss if self.how == "weighed beforehand" else (loss, tokens.sum())

    def configure_optimizers(self):
        return make_lbfgs(self.parameters(), line_search_fn="strong_wolfe")


class TokensWeighedBeforehand(Tokens):
    def batch_weight(self, batch):
        return batch[2].sum()


@pytest.mark.parametrize("how", ["samples", "returned", "weighed beforehand"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_evaluation_equals_the_full_batch(tmp_path, how, clip):
    inputs, targets = regression_data(75, torch.float64)
    tokens = torch.randint(1, 50, (75,), generator=torch.Generator().manual_seed(1)).double()
    task = (TokensWeighedBeforehand if how == "weighed beforehand" else Tokens)(how)
    loader = DataLoader(TensorDataset(inputs, targets, tokens), 5, shuffle=True)
    fit(tmp_path, task, loader, global_batch_size=32, gradient_clip_val=clip)

    net = network(dtype=torch.float64)
    optimizer = make_lbfgs(net.parameters(), line_search_fn="strong_wolfe")
    for epoch in range(2):
        for batch in make_epoch_order(75, SEED, epoch, shuffle=True).split(32):
            of_samples = torch.ones(len(batch), dtype=torch.float64) if how == "samples" else tokens[batch]

            def closure(batch=batch, of_samples=of_samples):
                optimizer.zero_grad()
                errors = (net(inputs[batch]) - targets[batch]).pow(2).squeeze(1)
                loss = (errors * of_samples).sum() / of_samples.sum()
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                return loss

            optimizer.step(closure)
    torch.testing.assert_close(weights(task.net), weights(net), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- contents of an evaluation


class Evaluating(SGD):
    """Optimizer that evaluates three times without moving and keeps the results, then makes one ordinary step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.found = []

    def step(self, closure):
        for _ in range(3):
            with torch.enable_grad():
                loss = closure()
            gradients = [parameter.grad.clone() for group in self.param_groups for parameter in group["params"]]
            self.found.append((loss, torch.cat([gradient.flatten() for gradient in gradients])))
        return super().step()


class Drawing(Evaluated):
    """Task that draws in the step and before it, and records the hooks of the step."""

    def __init__(self):
        super().__init__(dropout=0.4)
        self.build = Evaluating
        self.mean = torchmetrics.MeanMetric()
        self.calls = []

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.calls.append("transfer")
        return [batch[0] + 0.1 * torch.randn(batch[0].shape), batch[1]]

    def on_train_batch_start(self, batch, batch_idx):
        self.calls.append("start")
        torch.rand(batch_idx + 1)

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        self.log("epoch_loss", loss, on_epoch=True, on_step=False)
        return loss * torch.rand(())

    def on_before_zero_grad(self, optimizer):
        self.calls.append("zero")

    def on_before_backward(self, loss):
        self.calls.append("backward")

    def on_after_backward(self):
        self.calls.append("after")

    def on_before_optimizer_step(self, optimizer):
        self.calls.append("step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append("end")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_evaluation_of_a_step_draws_the_same(tmp_path, accumulate):
    task = Drawing()
    trainer = fit(tmp_path, task, make_data(40), accumulate_grad_batches=accumulate)
    found = trainer.optimizers[0].found
    assert len(found) == 3 * trainer.global_step
    for step in range(trainer.global_step):
        (loss, gradient), *others = found[3 * step : 3 * step + 3]
        assert all(torch.equal(loss, other) and torch.equal(gradient, theirs) for other, theirs in others)
    assert len({loss.item() for loss, _ in found}) == trainer.global_step


def test_only_the_first_evaluation_logs_and_counts(tmp_path):
    task = Drawing()
    trainer = fit(tmp_path, task, make_data(40), accumulate_grad_batches=5, max_epochs=1)
    assert trainer.global_step == 1
    assert task.mean._update_count == 0  # reset at the end of the epoch
    assert trainer.run.progress.micro_batches == trainer.run.progress.units / 8 == 5
    assert trainer.callback_metrics["mean"] == pytest.approx(trainer.callback_metrics["epoch_loss"])
    inner = ["backward", "after"]
    first = ["transfer", "start", "zero", *inner, "end"] + ["transfer", "start", *inner, "end"] * 3
    last = ["transfer", "start", *inner, "step"] + 2 * (5 * inner + ["step"]) + ["end"]
    assert task.calls == first + last


def test_the_metric_is_that_of_the_first_evaluations(tmp_path):
    values = []

    class Moving(Evaluated):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()
            self.evaluations = 0

        def on_train_batch_start(self, batch, batch_idx):
            self.fresh = True

        def training_step(self, batch):
            loss = super().training_step(batch)
            self.evaluations += 1
            self.mean.update(loss.detach())
            self.log("mean", self.mean, on_epoch=True)
            self.log("logged", loss, on_epoch=True, on_step=False)
            if self.fresh:
                values.append(loss.item())
            self.fresh = False
            return loss

    task = Moving()
    trainer = fit(tmp_path, task, make_data(40), max_epochs=1)
    assert task.evaluations > 3 * trainer.global_step == 15
    assert trainer.callback_metrics["mean"] == pytest.approx(sum(values) / 5)
    assert trainer.callback_metrics["logged"] == pytest.approx(sum(values) / 5)


@pytest.mark.parametrize(("optimizer", "accumulate"), [("SGD", 1), ("SGD", 2), ("LBFGS", 1), ("LBFGS", 2)])
def test_backward_runs_once_per_micro_batch_and_evaluation(tmp_path, optimizer, accumulate):
    class Counting(Evaluated):
        backwards = forwards = 0

        def training_step(self, batch):
            self.forwards += 1
            return super().training_step(batch)

        def on_after_backward(self):
            self.backwards += 1

    task = with_optimizer(
        make_lbfgs if optimizer == "LBFGS" else lambda parameters: SGD(parameters, lr=0.1), Counting()
    )
    trainer = fit(tmp_path, task, make_data(48), max_epochs=1, accumulate_grad_batches=accumulate)
    assert trainer.global_step == 6 / accumulate
    state = next(iter(trainer.optimizers[0].state.values()), {})
    evaluations = state["func_evals"] if optimizer == "LBFGS" else trainer.global_step
    assert task.forwards == task.backwards == evaluations * accumulate
    assert optimizer == "SGD" or evaluations == 4 * trainer.global_step


def test_optional_closure_is_not_passed(tmp_path):
    given = []

    class Asking(SGD):
        def step(self, closure=None):
            given.append(closure)
            return super().step()

    fit(tmp_path, with_optimizer(lambda parameters: Asking(parameters, lr=0.1)), make_data(16), max_epochs=1)
    assert given == [None, None]


@pytest.mark.parametrize("before", ["moves", "zeroes"])
def test_an_optimizer_may_act_before_its_first_evaluation(tmp_path, before):
    """Sharpness-aware optimizers climb first: the gradients are then those at the new point."""

    class Ahead(SGD):
        @torch.no_grad()
        def step(self, closure):
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            starts = [parameter.clone() for parameter in parameters]
            for parameter in parameters if before == "moves" else ():
                parameter.add_(parameter.grad, alpha=0.5)
            if before == "zeroes":
                self.zero_grad()
            with torch.enable_grad():
                closure()
            for parameter, start in zip(parameters, starts, strict=True):
                parameter.copy_(start)
            super().step()

    task = with_optimizer(lambda parameters: Ahead(parameters, lr=0.1))
    fit(tmp_path, task, make_data(40), max_epochs=1)

    inputs, targets = regression_data(40)
    net = network()
    optimizer = SGD(net.parameters(), lr=0.1)
    for batch in make_epoch_order(40, SEED, 0, shuffle=True).split(8):
        starts = [parameter.detach().clone() for parameter in net.parameters()]
        for climbing in (True, False) if before == "moves" else (False,):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs[batch]), targets[batch]).backward()
            with torch.no_grad():
                for parameter, start in zip(net.parameters(), starts, strict=True):
                    parameter.copy_(start + 0.5 * parameter.grad if climbing else start)
        optimizer.step()
    torch.testing.assert_close(weights(task.net), weights(net), rtol=1e-6, atol=1e-7)


def test_line_search_allows_infinite_loss(tmp_path):
    class Cliff(Evaluated):
        evaluations = 0

        def training_step(self, batch):
            loss = super().training_step(batch)
            self.evaluations += 1
            return loss * float("inf") if self.evaluations % 3 == 2 else loss

    class Searching(SGD):
        def step(self, closure):
            for _ in range(3):
                loss = closure()
            assert torch.isfinite(loss)
            return super().step()

    task = with_optimizer(lambda parameters: Searching(parameters, lr=0.1), Cliff())
    fit(tmp_path, task, make_data(16), max_epochs=1)
    assert task.evaluations == 6
    assert torch.isfinite(weights(task)).all()


def test_skipped_step_is_not_evaluated(tmp_path):
    class Sparing(Evaluated):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch)

    trainer = fit(tmp_path, Sparing(), make_data(32), max_epochs=1)
    assert trainer.global_step == 3
    assert next(iter(trainer.optimizers[0].state.values()))["func_evals"] == 12


def test_evaluation_without_loss_raises(tmp_path):
    class Fickle(Evaluated):
        evaluations = 0

        def training_step(self, batch):
            self.evaluations += 1
            return super().training_step(batch) if self.evaluations == 1 else None

    with pytest.raises(TrainingError, match="LBFGS evaluated step 1 again, and now all its micro-batches have"):
        fit(tmp_path, Fickle(), make_data(16))


@pytest.mark.parametrize("optimizer", [make_lbfgs, Evaluating])
def test_fp16_is_refused_before_training(tmp_path, optimizer):
    seen = []

    class Watched(Evaluated):
        def training_step(self, batch):
            seen.append(batch)

    with pytest.raises(ConfigError, match=r"(LBFGS|Evaluating) evaluates the loss several times .* bf16 or fp32"):
        fit(tmp_path, with_optimizer(optimizer, Watched()), make_data(), precision="fp16")
    assert seen == []


# ---------------------------------------------------------------------- checkpoints


def is_same(ours, theirs):
    """Return True if two values are bitwise equal, in nested lists too."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_resumed_closure_run_equals_uninterrupted_run(tmp_path, precision, line_search):
    def train(folder, **options):
        task = with_optimizer(
            lambda parameters: make_lbfgs(parameters, line_search_fn=line_search), Evaluated(dropout=0.2)
        )
        trainer = quiet_trainer(folder, precision=precision, accumulate_grad_batches=2, **options)
        trainer.fit(task, make_data())
        return trainer.optimizers[0], task

    whole_optimizer, whole = train(tmp_path / "whole", max_steps=11)
    for cut in (1, 6, 11):
        optimizer, task = train(tmp_path, max_steps=cut, resume="auto")
    assert torch.equal(weights(task), weights(whole))
    (ours,), (theirs,) = optimizer.state.values(), whole_optimizer.state.values()
    assert len(ours["old_dirs"]) == 5
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert is_same(value, theirs[key]), key
    states = [
        (find_checkpoints(folder / "runs/run/checkpoints")[-1] / "optimizer")
        for folder in (tmp_path, tmp_path / "whole")
    ]
    ours, theirs = ([file.read_bytes() for file in sorted(state.iterdir())] for state in states)
    assert ours == theirs


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    quiet_trainer(tmp_path, max_steps=2).fit(Evaluated(), make_data())
    with pytest.raises(CheckpointMismatch, match=r"saved with LBFGS .* this run has SGD"):
        quiet_trainer(tmp_path, max_steps=4, resume="auto").fit(
            with_optimizer(lambda parameters: SGD(parameters, lr=0.1)), make_data()
        )


class ReadsLoss(lumen.Callback):
    needs_step_loss = True

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.losses.append((float(trainer.step_loss()), float(outputs)))


def test_step_loss_is_the_first_evaluations_loss(tmp_path):
    callback = ReadsLoss()
    fit(tmp_path, Evaluated(), make_data(16), callbacks=[callback], max_epochs=1)
    assert all(shown == returned for shown, returned in callback.losses)
    assert len(callback.losses) == 2


@pytest.mark.parametrize("build", [lambda: with_optimizer(make_sharp), SharpByHand], ids=["automatic", "by hand"])
def test_an_optimizer_with_two_steps_trains_and_resumes(tmp_path, build):
    whole, parts, expected = build(), build(), build()
    data = DataLoader(TensorDataset(*regression_data(48)), 8)
    quiet_trainer(tmp_path / "whole", max_steps=9, logger=False).fit(whole, data)
    for task, steps in ((build(), 4), (parts, 9)):
        quiet_trainer(tmp_path / "parts", max_steps=steps, resume="auto", logger=False).fit(task, data)
    optimizer, batches = make_sharp(expected.parameters()), list(data)
    for step in range(9):
        for move in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            nn.functional.mse_loss(expected(batches[step % 6][0]), batches[step % 6][1]).backward()
            move()
    assert torch.equal(weights(whole), weights(expected))
    assert torch.equal(weights(parts), weights(expected))


class TwoModes(SGD):
    """Optimizer that exchanges its parameters for others, like the optimizers of schedulefree."""

    def train(self):
        pass

    def eval(self):
        pass


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: lumen.optim.MultiOptimizer([each])])
def test_an_optimizer_with_modes_is_refused(tmp_path, wrap):
    task = with_optimizer(lambda parameters: wrap(TwoModes(parameters, 0.1)))
    with pytest.raises(ConfigError, match=r"TwoModes has methods train\(\) and eval\(\).*lumen.EMA"):
        fit(tmp_path, task, make_data())
