"""Weights of micro-batches in a step, and losses that are not finite."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lumen
from lumen.errors import NonFiniteLoss, TrainingError
from lumen.run.loss_weighting import LossWeighting
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


def weigh_losses(known, returned, *, alone=False, by_task=False, guess=1.0):
    """Return the final factor of each micro-batch's gradient, and the weights themselves."""
    weighting = LossWeighting(is_set_by_task=by_task)
    weighting.begin_step(sum(known), 1 if alone else 2, guess)
    loss_factors = [weighting.get_loss_factor(*pair) for pair in zip(known, returned, strict=True)]
    weighting.finish_sum()
    return [factor * weighting.correction for factor in loss_factors], weighting


@pytest.mark.parametrize("guess", [1.0, 2.0**-20, 2.0**30])
@pytest.mark.parametrize(
    ("known", "returned", "by_task", "expected"),
    [
        ([8, 8, 4], [None] * 3, False, [8, 8, 4]),
        ([8, 8, 4], [10, 0, 5.5], False, [10, 0, 5.5]),
        ([8, 8, 4], [0, 0, 3], False, [0, 0, 3]),
        ([8, 8, 4], [1e-9, 1e9, 1], False, [1e-9, 1e9, 1]),
        ([2.5, 0.5], [None] * 2, True, [2.5, 0.5]),
        ([2.5, 0.5], [2.5, 0.5], True, [2.5, 0.5]),
        ([8], [None], False, [8]),
        ([8], [3], False, [3]),
    ],
)
def test_factors_are_shares_of_the_total(known, returned, by_task, expected, guess):
    factors, weighting = weigh_losses(known, returned, by_task=by_task, alone=len(known) == 1, guess=guess)
    assert factors == [pytest.approx(weight / sum(expected), rel=1e-15) for weight in expected]
    assert weighting.total == sum(expected)


@pytest.mark.parametrize("returned", [None, 3, 1e-30, 1e30])
def test_single_micro_batch_is_never_scaled(returned):
    factors, weighting = weigh_losses([7], [returned], alone=True, guess=3.0)
    assert factors == [1.0]
    assert weighting.correction == 1.0


def test_totals_known_beforehand_need_no_correction():
    for known, returned, by_task in (([3, 3, 1], [None] * 3, False), ([0.1, 0.2], [0.1, 0.2], True)):
        _, weighting = weigh_losses(known, returned, by_task=by_task)
        assert weighting.correction == 1.0


@pytest.mark.parametrize(("total", "guess"), [(1, 32.0), (31, 32.0), (100, 128.0), (1024, 1024.0), (1500.5, 2048.0)])
def test_next_guess_is_power_of_two_near_total(total, guess):
    _, weighting = weigh_losses([1, 1], [total / 2, total / 2], guess=64.0)
    assert weighting.next_guess == guess
    assert weigh_losses([1, 1], [None, None], guess=64.0)[1].next_guess == 64.0


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_none_is_an_error(weight):
    with pytest.raises(TrainingError, match=f"has the weight {float(weight) if weight == weight else 'nan'}|{weight}"):
        weigh_losses([4, 4], [1.0, weight])


@pytest.mark.parametrize("returned", [[1.0, None], [None, 1.0]])
def test_partially_returned_weights_raise(returned):
    with pytest.raises(TrainingError, match=r"Return \(loss, weight\) always or never"):
        weigh_losses([4, 4], returned)


def test_weight_contradicting_batch_weight_raises():
    with pytest.raises(TrainingError, match=r"returned the weight 5.0 .* batch_weight gave 4"):
        weigh_losses([4, 4], [4.0, 5.0], by_task=True)


# ---------------------------------------------------------------------- in a run


class Given(lumen.TaskModule):
    """Task whose batches contain the loss (times the parameter) and the weight to return."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.gradients = []

    def training_step(self, batch):
        loss, weight = batch[0]
        return self.scale * loss, weight

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.scale.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class WeighedByBatch(Given):
    """Task that knows its weights before the forward."""

    def training_step(self, batch):
        return super().training_step(batch)[0]

    def batch_weight(self, batch):
        return batch[0][1]


def make_batches(*pairs):
    """Return one micro-batch for each (loss, weight)."""
    return DataLoader(torch.tensor(pairs, dtype=torch.float64), 1)


@pytest.mark.parametrize("kind", [Given, WeighedByBatch])
def test_gradients_are_weighted_means(tmp_path, kind):
    """The weights come out of the forward, or are known before it."""
    task = kind()
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(task, make_batches((3.0, 1.0), (5.0, 4.0), (-7.0, 0.0), (2.0, 1000.0), (4.0, 3000.0)))
    expected = [(3 * 1 + 5 * 4) / 5, (2 * 1000 + 4 * 3000) / 4000]
    assert task.gradients == [pytest.approx(value, rel=1e-14) for value in expected]
    assert kind is WeighedByBatch or trainer.run.progress.weight_guess == 4096.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_zero_weight_step_is_skipped_with_a_warning(tmp_path, caplog, accumulate):
    task = Given()
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate, log_level="WARNING")
    trainer.fit(task, make_batches((3.0, 1.0), (5.0, 1.0), (1.0, 0.0), (2.0, 0.0)))
    assert trainer.global_step == len(task.gradients) == 2 // accumulate
    assert f"update after step {2 // accumulate} skipped: the weights of its micro-batches sum to 0" in caplog.text
    assert task.scale.item() == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("accumulate", "step"), [(1, 4), (2, 2), (100, 1)])
def test_non_finite_loss_raises_and_names_the_step(tmp_path, value, accumulate, step):
    task = Given()
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate)
    with pytest.raises(NonFiniteLoss, match=rf"loss of step {step} \(epoch 0, micro-batch 3 of the run\) is {value}"):
        trainer.fit(task, make_batches((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (value, 1.0), (1.0, 1.0)))
    assert trainer.global_step == len(task.gradients) == step - 1


def test_the_epoch_is_named_too(tmp_path):
    class Later(Given):
        def training_step(self, batch):
            loss, weight = super().training_step(batch)
            return loss / (self.global_step != 3), weight

    with pytest.raises(NonFiniteLoss, match=r"step 4 \(epoch 1, micro-batch 3 of the run\) is inf"):
        bare_trainer(tmp_path, max_epochs=2).fit(Later(), make_batches((1.0, 1.0), (1.0, 1.0)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_non_finite_loss_of_weight_zero_raises(tmp_path, precision, accumulate):
    """0 x NaN is NaN: a masked mean over no token would spoil the gradients of the whole step."""
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=accumulate, precision=precision)
    with pytest.raises(NonFiniteLoss, match=r"although its weight is 0.*Divide by max\(count, 1\)"):
        trainer.fit(Given(), make_batches((1.0, 1.0), (math.nan, 0.0)))


class Root(Regression):
    """Task with a finite loss whose gradient is NaN in one step: the derivative of sqrt at 0, times 0."""

    def __init__(self, bad_step):
        super().__init__()
        self.bad_step = bad_step

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss + (self(batch[0]) * 0.0).sqrt().mean() if self.global_step == self.bad_step else loss


def test_non_finite_gradient_norm_raises_before_the_update(tmp_path):
    task = Root(3)
    with pytest.raises(NonFiniteLoss, match=r"gradient norm of step 4 \(epoch 0, .* is nan, although its losses"):
        bare_trainer(tmp_path, max_steps=8, gradient_clip_val=1.0).fit(task, loader())
    assert all(parameter.isfinite().all() for parameter in task.parameters())


def test_parameters_that_are_not_finite_are_never_committed(tmp_path):
    def trainer():
        saver = lumen.ModelCheckpoint(every_n_train_steps=1)
        return quiet_trainer(tmp_path, max_steps=8, callbacks=[saver], resume="auto")

    first = trainer()
    with pytest.raises(NonFiniteLoss, match=r"after step 4 4 parameters are not finite.*net.0.weight"):
        first.fit(Root(3), loader())
    assert first.checkpoint_callback.last_model_path.endswith("step-00000003")
    second = trainer()
    second.fit(Root(None), loader())  # the bug is fixed
    assert second.global_step == 8


class Overflowing(Regression):
    """Task that overflows in fp16 until the scale has fallen far."""

    def training_step(self, batch):
        return super().training_step(batch) * 2e4


def test_skipped_fp16_updates_are_logged_without_flooding(tmp_path, caplog):
    caplog.set_level("INFO", "lumen")

    def run(**options):
        caplog.clear()
        trainer = quiet_trainer(tmp_path, precision="fp16", log_level="INFO", resume="auto", **options)
        trainer.fit(Overflowing(), loader(80, 8))
        return trainer.run.precision.skipped_updates

    skipped = run(max_steps=4)
    assert skipped >= 5
    assert caplog.text.count("skipped an update, because its gradients overflow at a loss scale of 65536") == 1
    assert "skipped 5 updates in a row, and the loss scale has fallen to 2048" in caplog.text
    assert f"fp16: {skipped} updates were skipped" in caplog.text
    assert run(max_steps=6) >= skipped  # the count includes all of the run
    assert "an update was skipped" not in caplog.text


@pytest.mark.parametrize("kind", [Given, WeighedByBatch])
def test_a_negative_weight_is_an_error(tmp_path, kind):
    with pytest.raises(TrainingError, match=r"a micro-batch has the weight -2.0; a weight is a finite number >= 0"):
        bare_trainer(tmp_path, max_epochs=1).fit(kind(), make_batches((1.0, 1.0), (1.0, -2.0)))
