"""Same training: for one global batch size, hardware changes only the rounding.

The tests compare every loss, gradient norm and parameter of every step with a plain loop on one process.
"""

import random
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.data.permutation import make_epoch_order
from lumen.random import Domain, make_key, seed_generators
from tests.helpers.tasks import FEATURES, quiet_trainer, regression_data

SEED, SAMPLES, BATCH, STEP = 3, 75, 4, 16
TOLERANCE = 1e-10


class Case(NamedTuple):
    """Features of a training that could reveal its partition."""

    tokens: bool = False
    dropout: float = 0.0
    augment: bool = False
    clip: float | None = None
    scaler: bool = False
    ragged: bool = True


CASES = {
    "mean loss": Case(ragged=False),
    "ragged last batch": Case(),
    "token weights": Case(tokens=True),
    "dropout": Case(dropout=0.3),
    "augmentation": Case(augment=True),
    "clipping": Case(clip=0.05, tokens=True),
    "scaler": Case(scaler=True),
}
#: All these features in three trainings, for each strategy on several processes.
TOGETHER = {
    "mean loss": CASES["mean loss"],
    "scaler": CASES["scaler"],
    "weights, dropout, augmentation, clipping": Case(tokens=True, dropout=0.3, augment=True, clip=0.05),
}


class Samples(Dataset):
    """Data set of inputs, targets and numbers of tokens; with noise from three generators, like careless user code."""

    def __init__(self, case):
        self.inputs, self.targets = regression_data(SAMPLES, torch.float64)
        self.tokens = torch.randint(1, 50, (SAMPLES,), generator=torch.Generator().manual_seed(1)).double()
        self.augment = case.augment

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(FEATURES, dtype=torch.float64) + np.random.randn() + random.random() if self.augment else 0
        return self.inputs[index] + 0.1 * noise, self.targets[index], self.tokens[index]


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(case):
    torch.manual_seed(0)
    return Net(case.dropout).double()


class FirstGradients(lumen.TaskModule):
    """Task that keeps the gradients of its first step, in float32."""

    def __init__(self):
        super().__init__()
        self.net = build(Case()).float()
        self.gradients = {}

    def training_step(self, batch):
        return compute_loss(self.net, [part.float() for part in batch], Case(tokens=True))

    def on_before_optimizer_step(self, optimizer):
        self.gradients = {name: whole(parameter.grad).numpy() for name, parameter in self.net.named_parameters()}

    def configure_optimizers(self):
        return make_optimizer(self)


def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def compute_loss(net, batch, case):
    """Return the mean loss of a micro-batch and its weight."""
    inputs, targets, tokens = batch
    with torch.autocast("cpu", enabled=False):  # the test of the scaler runs in float64
        errors = (net(inputs) - targets).square().squeeze(1)
    weights = tokens if case.tokens else torch.ones_like(tokens)
    return (errors * weights).sum() / weights.sum(), float(weights.sum())


OVERFLOWS_AT = 7  # of all micro-batches


class Task(lumen.TaskModule):
    """Task with this loss, which records every step."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.net = build(case)
        self.norms, self.states = [], []

    def training_step(self, batch, batch_idx):
        loss, weight = compute_loss(self.net, batch, self.case)
        if self.case.scaler and batch_idx == OVERFLOWS_AT and not self.current_epoch:
            loss = loss * 1e306
        self.log("loss", loss, weight=weight)
        return (loss, weight) if self.case.tokens else loss

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(compute_norm([whole(parameter.grad) for parameter in self.parameters()]))

    def on_step_end(self):
        self.states.append(torch.cat([whole(p.detach()).flatten() for p in self.parameters()]).numpy())

    def configure_optimizers(self):
        return make_optimizer(self)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def compute_norm(gradients):
    return float(torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])))


class Losses(lumen.Logger):
    """Logger that keeps the loss of every written step."""

    def __init__(self):
        self.losses = []

    def open(self, directory, *, resumed):
        pass

    def log_metrics(self, metrics, step, epoch):
        if "loss" in metrics:
            self.losses.append(metrics["loss"])


def train_with_lumen(folder, case, steps, strategy, accumulate):
    """Train with Lumen on all processes of the group; return losses, gradient norms and parameters of every step."""
    if isinstance(strategy, tuple):
        strategy = getattr(lumen, strategy[0])(**strategy[1])
    task, losses = Task(case), Losses()
    samples = Samples(case)
    trainer = quiet_trainer(
        folder, max_steps=steps, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=case.clip,
        precision="fp16" if case.scaler else "fp32", logger=[losses], log_every_n_steps=1, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(task, DataLoader(samples, BATCH, shuffle=True, drop_last=not case.ragged))
    return losses.losses, task.norms, task.states


@cache
def train_by_hand(case, steps):
    """Train in a plain loop on one process, which adds up the micro-batches' parts of the full-batch gradient."""
    net, samples = build(case), Samples(case)
    optimizer = make_optimizer(net)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaler)
    losses, norms, states = [], [], []
    epoch = micro = done = 0
    while done < steps:
        order = make_epoch_order(SAMPLES, SEED, epoch, shuffle=True)
        pieces = [piece for piece in order.split(STEP) if case.ragged or len(piece) == STEP]
        if not case.ragged and SAMPLES % STEP >= BATCH:
            pieces.append(order[SAMPLES // STEP * STEP :][: SAMPLES % STEP // BATCH * BATCH])
        for index, piece in enumerate(pieces):
            batches = []
            for part in piece.split(BATCH):
                rows = []
                for sample in part.tolist():
                    seed_generators(make_key(SEED, Domain.SAMPLE, epoch, sample))
                    rows.append(samples[sample])
                batches.append([torch.stack(column) for column in zip(*rows, strict=True)])
            total = sum(float(batch[2].sum()) if case.tokens else len(batch[2]) for batch in batches)
            optimizer.zero_grad()
            mean = 0.0
            for number, batch in enumerate(batches):
                seed_generators(make_key(SEED, Domain.TRAIN, micro))
                loss, weight = compute_loss(net, batch, case)
                if case.scaler and epoch == 0 and index * STEP // BATCH + number == OVERFLOWS_AT:
                    loss = loss * 1e306
                scaler.scale(loss * (weight / total)).backward()
                mean += loss.item() * weight / total
                micro += 1
            scaler.unscale_(optimizer)
            norms.append(compute_norm([parameter.grad for parameter in net.parameters()]))
            if case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            updated = scaler.get_scale() >= before
            states.append(torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).numpy())
            if updated:
                losses.append(mean)
                done += 1
            if done == steps:
                break
        epoch += 1
    return losses, norms, states


def compute_difference(ours, expected):
    """Return the largest difference of losses, finite gradient norms and parameters over all steps."""
    worst = []
    for one, other in zip(ours, expected, strict=True):
        one, other = np.array(one), np.array(other)
        assert one.shape == other.shape
        finite = np.isfinite(other)
        assert (np.isfinite(one) == finite).all()
        worst.append(float(np.abs(one - other)[finite].max()))
    return worst


STRATEGIES = {
    "DDP": "ddp",
    "full_shard": ("FSDP", {"sharding_strategy": "full_shard"}),
    "shard_grad_op": ("FSDP", {"sharding_strategy": "shard_grad_op"}),
    "hybrid 2x2": ("FSDP", {"sharding_strategy": "hybrid_shard", "shard_size": 2}),
}


def train_with_strategy(folder, strategy, accumulate, steps, name):
    return train_with_lumen(folder, (CASES | TOGETHER)[name], steps, STRATEGIES[strategy], accumulate)


def check(results, steps, title):
    for name, ours in results.items():
        loss, norm, parameters = compute_difference(ours, train_by_hand((CASES | TOGETHER)[name], steps))
        print(f"{title:24} {name:40} loss {loss:.1e}  norm {norm:.1e}  parameters {parameters:.1e}")
        assert max(loss, norm, parameters) < TOLERANCE, f"{title}, {name}"


@pytest.mark.parametrize("name", CASES)
def test_one_process_with_four_micro_batches(tmp_path, name):
    check({name: train_with_lumen(tmp_path, CASES[name], 50, "single", 4)}, 50, "single, 1 x 4")


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ("DDP", 2),
        ("DDP", 4),
        ("full_shard", 2),
        ("full_shard", 4),
        ("shard_grad_op", 2),
        pytest.param("shard_grad_op", 4, marks=pytest.mark.torture),
        ("hybrid 2x2", 4),
    ],
)
def test_several_processes_over_fifty_steps(tmp_path, group, strategy, world):
    for name in TOGETHER:
        ours = group(world).run(train_with_strategy, tmp_path, strategy, 4 // world, 50, name)[0]
        check({name: ours}, 50, f"{strategy}, {world} x {4 // world}")


@pytest.mark.everyday
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("strategy", ["DDP", "hybrid 2x2"])
def test_four_processes_over_a_few_steps(tmp_path, group, strategy):
    for name in ("ragged last batch", "clipping"):
        check({name: group(4).run(train_with_strategy, tmp_path, strategy, 1, 6, name)[0]}, 6, f"{strategy}, 4 x 1")


def train_to_first_gradients(folder, strategy, accumulate):
    strategy = STRATEGIES[strategy]
    task = FirstGradients()
    trainer = quiet_trainer(
        folder, max_steps=1, strategy=strategy if isinstance(strategy, str) else lumen.FSDP(**strategy[1]),
        accumulate_grad_batches=accumulate, logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(task, DataLoader(Samples(Case()), BATCH, shuffle=True))
    return task.gradients


@pytest.mark.parametrize("strategy", ["DDP", "full_shard"])
def test_first_gradients_in_float32_are_equal_within_rounding(tmp_path, group, strategy):
    ours = group(2).run(train_to_first_gradients, tmp_path, strategy, 2)[0]
    net, samples = build(Case()).float(), Samples(Case())
    order = make_epoch_order(SAMPLES, SEED, 0, shuffle=True)[:STEP]
    compute_loss(net, [values[order].float() for values in (samples.inputs, samples.targets, samples.tokens)],
            Case(tokens=True))[0].backward()  # fmt: skip
    for name, parameter in net.named_parameters():
        by_hand = parameter.grad.numpy()
        assert np.linalg.norm(ours[name] - by_hand) <= 1e-5 * np.linalg.norm(by_hand), name
