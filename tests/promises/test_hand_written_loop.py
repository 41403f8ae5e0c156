"""Lumen computes what the plain PyTorch loop computes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.data.permutation import make_epoch_order
from tests.helpers.tasks import Regression, network, quiet_trainer, regression_data, weights

SEED = 3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_hundred_steps_end_with_the_same_bits(tmp_path, shuffle, clip):
    inputs, targets = regression_data(53)
    task = Regression()
    trainer = quiet_trainer(tmp_path, max_steps=100, gradient_clip_val=clip, logger=False, enable_checkpointing=False)
    trainer.fit(task, DataLoader(TensorDataset(inputs, targets), 8, shuffle=shuffle))

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step, epoch = 0, 0
    while step < 100:
        for batch in make_epoch_order(53, SEED, epoch, shuffle=shuffle).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs[batch]), targets[batch]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            step += 1
            if step == 100:
                break
        epoch += 1

    assert torch.equal(weights(task.net), weights(net))


class Tokens(lumen.TaskModule):
    """Task with a loss over a varying number of tokens per sample, like language models."""

    def __init__(self, how):
        super().__init__()
        self.net = network(dtype=torch.float64)
        self.how = how
        self.gradients = []

    def training_step(self, batch):
        inputs, targets, tokens = batch
        errors = (self.net(inputs) - targets).pow(2).squeeze(1)
        if self.how == "samples":
            return errors.mean()
        loss = (errors * tokens).sum() / tokens.sum()
        return loss if self.how == "weighed beforehand" else (loss, tokens.sum())

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([parameter.grad.clone() for parameter in self.parameters()])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TokensWeighedBeforehand(Tokens):
    def batch_weight(self, batch):
        return batch[2].sum()


@pytest.mark.parametrize("how", ["samples", "returned", "weighed beforehand"])
@pytest.mark.parametrize(("batch_size", "accumulate"), [(32, 1), (8, 4), (5, None)])
def test_accumulation_is_the_full_batch_gradient(tmp_path, how, batch_size, accumulate):
    """32 x 1 = 8 x 4 = seven micro-batches of 5 with a ragged rest, over epochs whose last step is short."""
    inputs, targets = regression_data(75, torch.float64)
    tokens = torch.randint(1, 50, (75,), generator=torch.Generator().manual_seed(1)).double()
    task = (TokensWeighedBeforehand if how == "weighed beforehand" else Tokens)(how)
    options = {"global_batch_size": 32} if accumulate is None else {"accumulate_grad_batches": accumulate}
    trainer = quiet_trainer(tmp_path, max_epochs=2, logger=False, enable_checkpointing=False, **options)
    trainer.fit(task, DataLoader(TensorDataset(inputs, targets, tokens), batch_size, shuffle=True))

    net = network(dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for epoch in range(2):
        for batch in make_epoch_order(75, SEED, epoch, shuffle=True).split(32):
            weights = torch.ones(len(batch), dtype=torch.float64) if how == "samples" else tokens[batch]
            errors = (net(inputs[batch]) - targets[batch]).pow(2).squeeze(1)
            optimizer.zero_grad()
            ((errors * weights).sum() / weights.sum()).backward()
            expected.append([parameter.grad.clone() for parameter in net.parameters()])
            optimizer.step()

    assert trainer.global_step == len(task.gradients) == 6
    for ours, by_hand in zip(task.gradients, expected, strict=True):
        for ours_part, by_hand_part in zip(ours, by_hand, strict=True):
            torch.testing.assert_close(ours_part, by_hand_part, rtol=1e-12, atol=1e-14)
    for ours, by_hand in zip(task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-12, atol=1e-14)


class SometimesNone(Tokens):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 1 else super().training_step(batch)


@pytest.mark.parametrize("how", ["samples", "returned"])
def test_a_micro_batch_left_out_counts_nothing(tmp_path, how):
    inputs, targets = regression_data(24, torch.float64)
    tokens = torch.arange(1, 25).double()
    task = SometimesNone(how)
    trainer = quiet_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3, logger=False, enable_checkpointing=False)
    trainer.fit(task, DataLoader(TensorDataset(inputs, targets, tokens), 4))

    net = network(dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for kept in ([0, 1, 2, 3, 8, 9, 10, 11], [12, 13, 14, 15, 20, 21, 22, 23]):
        weights = torch.ones(8, dtype=torch.float64) if how == "samples" else tokens[kept]
        errors = (net(inputs[kept]) - targets[kept]).pow(2).squeeze(1)
        optimizer.zero_grad()
        ((errors * weights).sum() / weights.sum()).backward()
        optimizer.step()
    for ours, by_hand in zip(task.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, by_hand, rtol=1e-12, atol=1e-14)


def test_dropout_does_not_depend_on_what_else_draws(tmp_path):
    """Validation, logging and careless draws of a user in hooks leave training's masks unchanged."""

    class Careless(Regression):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            torch.rand(batch_idx + 1)

    results = []
    for task, options in (
        (Regression(dropout=0.5), {}),
        (Careless(dropout=0.5), {"val_check_interval": 2, "log_every_n_steps": 1}),
    ):
        data = DataLoader(TensorDataset(*regression_data(40)), 8, shuffle=True)
        trainer = quiet_trainer(tmp_path, max_steps=12, enable_checkpointing=False, **options)
        trainer.fit(task, data, val_dataloaders=data if options else None)
        results.append(torch.cat([parameter.flatten() for parameter in task.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_equals_autocast_by_hand(tmp_path, precision):
    inputs, targets = regression_data(40)
    task = Regression()
    quiet_trainer(tmp_path, max_epochs=2, precision=precision, gradient_clip_val=0.5, enable_checkpointing=False).fit(
        task, DataLoader(TensorDataset(inputs, targets), 8)
    )

    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    for _ in range(2):
        for batch in torch.arange(40).split(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
                loss = nn.functional.mse_loss(net(inputs[batch]), targets[batch])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(weights(task.net), weights(net))


def test_an_overflowing_fp16_update_moves_nothing(tmp_path):
    class Overflowing(Regression):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch)
            return loss * 1e30 if batch_idx == 2 else loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((self.global_step, self.optimizers().param_groups[0]["lr"], self.net[0].bias.tolist()))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    task = Overflowing()
    trainer = quiet_trainer(tmp_path, max_epochs=1, precision="fp16", enable_checkpointing=False)
    trainer.fit(task, DataLoader(TensorDataset(*regression_data(40)), 8))
    assert [step for step, _, _ in task.seen] == [1, 2, 2, 3, 4]
    assert task.seen[2] == task.seen[1]
    assert trainer.run.precision.state_dict()["scale"] == 32768.0
