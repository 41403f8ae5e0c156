"""Spikes of the loss or the gradient: the update is skipped, or the run ends before it."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError, TrainingError
from tests.helpers.tasks import Regression, loader, quiet_trainer, regression_data, weights

BATCH = 4


def make_spiking_loader(*batches, steps=12, size=20.0):
    """Return an ordered loader with some targets far off."""
    inputs, targets = regression_data(steps * BATCH)
    for batch in batches:
        targets[batch * BATCH : (batch + 1) * BATCH] += size
    return DataLoader(TensorDataset(inputs, targets), BATCH)


def fit(tmp_path, data, callbacks=(), **options):
    task = Regression()
    trainer = quiet_trainer(tmp_path, **{"max_epochs": 1, "callbacks": list(callbacks)} | options)
    trainer.fit(task, data)
    return trainer, task


@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
def test_a_spike_moves_nothing_and_is_no_step(tmp_path, monitor):
    detection = lumen.SpikeDetection(monitor, rtol=9.0, warmup=3)
    trainer, task = fit(tmp_path, make_spiking_loader(5, 8), [detection])
    assert (detection.spikes, trainer.global_step) == (2, 10)
    inputs, targets = regression_data(12 * BATCH)
    kept = [each for batch in range(12) if batch not in (5, 8) for each in range(batch * BATCH, (batch + 1) * BATCH)]
    _, without = fit(tmp_path, DataLoader(TensorDataset(inputs[kept], targets[kept]), BATCH))
    assert torch.equal(weights(task), weights(without))


class LastRate(lumen.Callback):
    def on_train_end(self, trainer, task):
        self.value = trainer.optimizers[0].param_groups[0]["lr"]


class Scheduled(Regression):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def test_spike_skips_schedule_step_and_is_logged(tmp_path):
    rate = LastRate()
    trainer = quiet_trainer(
        tmp_path, max_epochs=1, callbacks=[lumen.SpikeDetection(rtol=9.0, window=3), rate], log_level="INFO"
    )
    trainer.fit(Scheduled(), make_spiking_loader(5))
    assert rate.value == 1e-2 * 0.5**11
    said = [line for line in (trainer.run_directory / "run.log").read_text().splitlines() if "spike: loss " in line]
    assert len(said) == 1
    assert "the mean of the last 3 is" in said[0]
    assert said[0].endswith("skipping the update after step 5")


def test_stop_action_stops_before_the_spiking_update(tmp_path):
    saver = lumen.ModelCheckpoint(at_end=True)
    trainer, task = fit(tmp_path, make_spiking_loader(5), [lumen.SpikeDetection(rtol=9.0, action="stop"), saver])
    assert (trainer.global_step, trainer.run.ending.limit_reached) == (5, "stopped early")
    _, five = fit(tmp_path, make_spiking_loader(), max_steps=5)
    assert torch.equal(weights(task), weights(five))


def test_the_loss_is_that_of_the_whole_step(tmp_path):
    detection = lumen.SpikeDetection(rtol=9.0, warmup=2)
    trainer, _ = fit(tmp_path, make_spiking_loader(9), [detection], accumulate_grad_batches=4)
    assert (detection.spikes, trainer.global_step) == (1, 2)
    none = lumen.SpikeDetection(rtol=9.0, warmup=2)
    fit(
        tmp_path, make_spiking_loader(9, size=4.0), [none], accumulate_grad_batches=4
    )  # the mean of four losses is not so far off
    alone = lumen.SpikeDetection(rtol=9.0, warmup=2)
    fit(tmp_path, make_spiking_loader(9, size=4.0), [alone])
    assert (none.spikes, alone.spikes) == (0, 1)


class Weighed(Regression):
    """Task that returns the loss with its number of units, so that the total is known only after the forward."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch), 1.0 + batch_idx % 3


class Losses(lumen.Callback):
    needs_step_loss = True

    def __init__(self):
        self.values = []

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.values.append((float(trainer.step_loss()), float(trainer.gradient_norm())))


def test_loss_and_norm_respect_batch_weights(tmp_path):
    losses = Losses()
    task = Weighed(dtype=torch.float64)
    start = weights(task)
    data = loader(16, BATCH, shuffle=False, dtype=torch.float64)
    quiet_trainer(tmp_path, max_steps=1, accumulate_grad_batches=4, callbacks=[losses]).fit(task, data)
    torch.nn.utils.vector_to_parameters(start, task.parameters())
    task.zero_grad()
    parts = [torch.nn.functional.mse_loss(task(inputs), targets) for inputs, targets in data]
    loss = sum(part * (1.0 + number % 3) for number, part in enumerate(parts)) / 7.0
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in task.parameters()])
    assert losses.values == [(pytest.approx(loss.item(), rel=1e-14), pytest.approx(norm.item(), rel=1e-14))]


def test_values_that_stay_high_raise(tmp_path):
    with pytest.raises(TrainingError, match=r"4 updates in a row after step 5 are spikes: loss .*max_in_a_row"):
        fit(tmp_path, make_spiking_loader(*range(5, 12)), [lumen.SpikeDetection(rtol=9.0, max_in_a_row=3)])


def test_fp16_scale_grows_despite_skipped_update(tmp_path):
    detection = lumen.SpikeDetection(rtol=9.0, warmup=3)
    precision = lumen.precision.Float16(init_scale=4.0, growth_interval=6)
    trainer, _ = fit(tmp_path, make_spiking_loader(5), [detection], precision=precision)
    assert (detection.spikes, trainer.global_step) == (1, 11)
    assert precision.state_dict()["scale"] == 16.0  # 12 steps without an overflow


class TwiceEvaluated(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_reevaluating_optimizer_is_judged_once_per_step(tmp_path):
    detection = lumen.SpikeDetection(rtol=9.0, warmup=3)
    task = TwiceEvaluated()
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[detection])
    trainer.fit(task, make_spiking_loader(5))
    assert (detection.spikes, trainer.global_step, detection.state_dict()["seen"]) == (1, 11, 11)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_step_end", "on_train_epoch_start"])
def test_skip_update_is_allowed_only_before_an_update(tmp_path, hook):
    calls = lumen.LambdaCallback(**{hook: lambda trainer, *_: trainer.skip_update()})
    if hook == "on_train_batch_start":
        trainer, _ = fit(tmp_path, make_spiking_loader(), [calls])
        assert trainer.global_step == 0
        return
    with pytest.raises(TrainingError, match="skip_update: no update is about to be made"):
        fit(tmp_path, make_spiking_loader(), [calls])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"atol": None, "rtol": None}, "set atol or rtol"),
        ({"rtol": -1.0}, "must be >= 0"),
        ({"window": 0}, "window"),
        ({"monitor": "val_loss"}, "monitor"),
        ({"action": "undo"}, "action"),
        ({"before": -1}, "before"),
        ({"finite_only": True}, "a loss that is not finite is always an error"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        lumen.SpikeDetection(**options)


class ByHand(Regression):
    automatic_optimization = False


def test_a_task_that_optimizes_by_hand_decides_itself(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[lumen.SpikeDetection()])
    with pytest.raises(ConfigError, match="makes its updates itself"):
        trainer.fit(ByHand(), loader())
