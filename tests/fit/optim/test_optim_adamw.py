"""Fused AdamW: equal to AdamW with clipping, loss scaling and a restored state; clipping has one meaning everywhere."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lumen.optim import adamw, decay_groups
from tests.helpers.tasks import Regression, loader, network, quiet_trainer, regression_data, weights

UNRECORDED = {"logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize("form", ["parameters", "names", "groups", "a group of one"])
def test_its_steps_are_those_of_adamw(form):
    nets = [network(dtype=torch.float64) for _ in range(2)]
    options = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True}
    given = {
        "parameters": lambda net: net.parameters(),
        "names": lambda net: net.named_parameters(),
        "groups": lambda net: decay_groups(net, 0.3),
        "a group of one": lambda net: [{"params": net[0].weight}, {"params": net[3].parameters(), "lr": 0.5}],
    }[form]
    optimizers = adamw(given(nets[0]), **options), torch.optim.AdamW(given(nets[1]), fused=False, **options)
    assert all(group["fused"] for group in optimizers[0].param_groups)
    inputs, targets = regression_data(dtype=torch.float64)
    for _ in range(10):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]), rtol=1e-10, atol=1e-12)


def test_frozen_parameters_and_their_groups_are_left_out():
    net = network()
    net[0].requires_grad_(False)
    assert [len(group["params"]) for group in adamw(net.parameters()).param_groups] == [2]
    groups = [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 0.5}]
    (group,) = adamw(groups).param_groups
    assert (group["lr"], group["params"]) == (0.5, list(net[3].parameters()))
    with pytest.raises(ValueError, match="empty parameter list"):
        adamw(net[0].parameters())


def test_where_torch_has_no_fused_kernel_torch_chooses():
    net = nn.Linear(2, 2, device="meta")
    assert not adamw(net.parameters()).param_groups[0]["fused"]
    assert adamw(nn.Linear(2, 2).parameters()).param_groups[0]["fused"]


class Fused(Regression):
    """Task that trains with the fused AdamW a loss whose first gradients overflow in half precision."""

    scale = 3e3

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def training_step(self, batch):
        return super().training_step(batch) * self.scale

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((self.global_step, self.optimizers().param_groups[0]["lr"], weights(self)))

    def configure_optimizers(self):
        optimizer = adamw(decay_groups(self, 0.1), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("clip", [None, 0.3])
def test_fused_scaled_updates_equal_the_manual_loop(tmp_path, clip):
    task = Fused()
    data = DataLoader(TensorDataset(*regression_data(40)), 8)
    quiet_trainer(tmp_path, max_epochs=4, precision="fp16", gradient_clip_val=clip, **UNRECORDED).fit(task, data)

    inputs, targets = regression_data(40)
    net = network()
    optimizer = adamw(decay_groups(net, 0.1), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu")
    steps = skipped = 0
    for position in range(20):
        batch = torch.arange(40).split(8)[position % 5]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(net(inputs[batch]), targets[batch])
        scaler.scale(loss * 3e3).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
            steps += 1
        else:
            skipped += 1
        step, rate, found = task.seen[position]
        assert (step, rate) == (steps, optimizer.param_groups[0]["lr"])
        assert torch.equal(found, weights(net))
    assert skipped >= 3
    assert steps >= 3


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, precision):
    def train(folder, **options):
        task = Fused(dropout=0.1)
        trainer = quiet_trainer(folder, precision=precision, log_level="CRITICAL", **options)
        trainer.fit(task, loader())
        return trainer.optimizers[0], task

    _, whole = train(tmp_path / "whole", max_steps=15)
    train(tmp_path, max_steps=6)
    optimizer, task = train(tmp_path, max_steps=15, resume="auto")
    assert torch.equal(weights(task), weights(whole))
    assert optimizer.param_groups[0]["fused"]


def test_fused_and_foreach_are_not_restored(tmp_path):
    """A checkpoint of one machine does not carry its kernels to another."""

    class Plain(Fused):
        def configure_optimizers(self):
            return torch.optim.AdamW(decay_groups(self, 0.1), lr=0.02, foreach=True)

    class FusedAlone(Fused):
        def configure_optimizers(self):
            return adamw(decay_groups(self, 0.1), lr=0.3)

    for kinds in ((FusedAlone, Plain), (Plain, FusedAlone)):
        folder = tmp_path / kinds[0].__name__
        for kind, steps in zip(kinds, (3, 6), strict=True):
            task = kind()
            trainer = quiet_trainer(folder, max_steps=steps, resume="auto")
            trainer.fit(task, loader())
        (group, _) = trainer.optimizers[0].param_groups
        assert (bool(group["fused"]), bool(group["foreach"])) == (kinds[1] is FusedAlone, kinds[1] is Plain)
        assert group["lr"] == (0.3 if kinds[0] is FusedAlone else 0.02)


# ---------------------------------------------------------------------- clipping


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_uses_unscaled_gradients_in_every_precision(tmp_path, precision, algorithm):
    clipped = []

    class Clipped(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            clipped.append([parameter.grad.clone() for parameter in self.parameters()])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    task = Clipped()
    inputs, targets = regression_data(40)
    trainer = quiet_trainer(
        tmp_path, max_epochs=2, precision=precision, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm,
        enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(task, DataLoader(TensorDataset(inputs, targets), 8))

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"fp16": torch.float16}.get(precision, torch.bfloat16)
    norms = []
    for number in range(10):
        batch = torch.arange(40).split(8)[number % 5]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=precision != "fp32"):
            loss = nn.functional.mse_loss(net(inputs[batch]), targets[batch])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if algorithm == "norm":
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
            total = torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).norm()
            assert total == pytest.approx(0.05, rel=1e-4)
        else:
            nn.utils.clip_grad_value_(net.parameters(), 0.05)
            assert max(parameter.grad.abs().max() for parameter in net.parameters()) == pytest.approx(0.05)
        scaler.step(optimizer)
        scaler.update()
        for ours, parameter in zip(clipped[number], net.parameters(), strict=True):
            assert torch.equal(ours, parameter.grad)
    assert torch.equal(weights(task), weights(net))
    rows = [row.split(",") for row in (trainer.run_directory / "metrics.csv").read_text().splitlines()]
    if algorithm == "norm":  # the recorded norm is the one before clipping
        column = rows[0].index("grad_norm")
        assert [float(row[column]) for row in rows[1:] if row[column]] == pytest.approx(norms, rel=1e-6)
        assert min(norms) > 0.05
