"""Runs that combine features, and the hand-written loop with the same final parameters."""

from itertools import combinations, product

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lumen
from tests.helpers.sharded import unshard
from tests.helpers.tasks import FEATURES, quiet_trainer, regression_data

SAMPLES, BATCH_SIZE, EPOCHS, LEARNING_RATE, DECAY = 46, 4, 3, 1e-2, 0.8
FACTORS = {
    "strategy": ("auto", "ddp", "fsdp"),
    "optimization": ("automatic", "manual"),
    "accumulate": (1, 3),
    "average": ("none", "EMA", "SWA"),
    "weights": ("samples", "returned", "batch_weight"),
    "data": ("map", "several", "stream"),
    "halves": (False, True),
    "precision": ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "end": ("plain", "killed", "second fit", "rolled back"),
}
#: Pairs that Lumen refuses, and the error.
REFUSED = {
    (("optimization", "manual"), ("accumulate", 3)): "accumulate_grad_batches",
    (("optimization", "manual"), ("halves", True)): "halve_on_oom",
    (("strategy", "fsdp"), ("halves", True)): "halve_on_oom",
}


class Features(dict):
    """Combination of one value of each factor."""

    def __init__(self, **values):
        super().__init__({name: options[0] for name, options in FACTORS.items()} | values)

    def __getattr__(self, name):
        return self[name]

    @property
    def pairs(self):
        return set(combinations(self.items(), 2))

    @property
    def is_refused(self):
        return any(pair in REFUSED for pair in self.pairs)

    @property
    def label(self):
        changed = [f"{name}={value}" for name, value in self.items() if value != FACTORS[name][0]]
        return ",".join(changed).replace(" ", "-") or "defaults"


def list_combinations():
    every = (Features(**dict(zip(FACTORS, values, strict=True))) for values in product(*FACTORS.values()))
    return [each for each in every if not each.is_refused]


def cover_pairs():
    """Return a few combinations that cover every pair of values, without the refused pairs."""
    every = list_combinations()
    missing, found = set().union(*(each.pairs for each in every)), []
    while missing:
        found.append(max(every, key=lambda each: len(each.pairs & missing)))
        missing -= found[-1].pairs
    return found


class Stream(IterableDataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        yield from zip(*self.tensors, strict=True)


class Killed(Exception):
    pass


def network(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def compute_weight(targets):
    return float(targets.double().exp().sum())


def compute_loss(net, batch, is_weighted):
    """Return the mean of squared errors, over samples or weighted by the exponential of their targets."""
    inputs, targets = batch
    errors = (net(inputs) - targets).square()
    return (errors * targets.exp()).sum() / targets.exp().sum() if is_weighted else errors.mean()


class Combined(lumen.TaskModule):
    """Task with the features of a combination."""

    def __init__(self, features, dtype):
        super().__init__()
        self.features, self.net = features, network(dtype)
        self.automatic_optimization = features.optimization == "automatic"
        if features.weights == "batch_weight":
            self.batch_weight = lambda batch: compute_weight(self.batch_of(batch)[1])

    def batch_of(self, batch):
        return batch["first"] if isinstance(batch, dict) else batch

    def training_step(self, batch):
        batch = self.batch_of(batch)
        if self.features.halves and len(batch[0]) > BATCH_SIZE // 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100 GiB")
        loss = compute_loss(self.net, batch, self.features.weights != "samples")
        if self.automatic_optimization:
            return (loss, compute_weight(batch[1])) if self.features.weights == "returned" else loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        return None

    def validation_step(self, batch):
        self.log("val_loss", compute_loss(self.net, batch, is_weighted=False))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


def batches_of_step(features):
    return features.accumulate * (1 if features.strategy == "auto" else 2)


def steps_of_epoch(features):
    return -(-SAMPLES // (BATCH_SIZE * batches_of_step(features)))


class Disturbs(lumen.Callback):
    """Callback that once, in the second step of the second epoch, ends the run with an error or rolls it back."""

    def __init__(self, features):
        self.end, self.step = features.end, steps_of_epoch(features) + 1

    def on_before_optimizer_step(self, trainer, task, optimizer):
        if trainer.global_step == self.step and self.end in ("killed", "rolled back"):
            end, self.end = self.end, "plain"
            if end == "killed":
                raise Killed
            trainer.roll_back()


def loaders(features, dtype):
    tensors = [each.to(dtype) for each in regression_data(SAMPLES, torch.float64)]
    validation = DataLoader(TensorDataset(*tensors), BATCH_SIZE)
    training = DataLoader(Stream(tensors) if features.data == "stream" else TensorDataset(*tensors), BATCH_SIZE)
    if features.data == "several":
        training = lumen.CombinedLoader({"first": training, "second": validation}, mode="min_size")
    return training, validation


def dtype_of(features):
    return torch.float64 if features.precision == "64-true" else torch.float32


def average_of(features):
    options = {"swa_lrs": LEARNING_RATE, "swa_epoch_start": 1, "annealing_epochs": 0}
    return {"none": [], "EMA": [lumen.EMA(DECAY)], "SWA": [lumen.SWA(**options)]}[features.average]


def train(folder, features):
    """Return the final parameters of the task, as lists, and the newest val_loss."""
    dtype = dtype_of(features)
    task, average, disturbs = Combined(features, dtype), average_of(features), Disturbs(features)

    def fit(name):
        manual = features.optimization == "manual"
        trainer = quiet_trainer(
            folder / name, max_epochs=EPOCHS, accumulate_grad_batches=features.accumulate, strategy=features.strategy,
            precision=features.precision, halve_on_oom=features.halves, resume="auto", num_sanity_val_steps=0,
            gradient_clip_val=None if manual else 0.5,
            callbacks=[*average, disturbs, lumen.ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(task, *loaders(features, dtype))
        return trainer

    if features.end == "killed":
        try:
            fit("run")
        except Killed:
            task, average = Combined(features, dtype), average_of(features)
        else:
            raise AssertionError("the run was not killed")
    trainer = fit("run")
    if features.end == "second fit":
        trainer = fit("second")
    return [unshard(each).tolist() for each in task.parameters()], trainer.newest_values["val_loss"]


@torch.no_grad()
def mean_loss(parameters, tensors):
    net = network(torch.float64)
    for each, value in zip(net.parameters(), parameters, strict=True):
        each.copy_(value)
    return float(compute_loss(net, tensors, is_weighted=False))


def train_by_hand(features):
    """Return the results of a plain float64 loop in one process."""
    dtype = torch.float64
    net = network(dtype)
    tensors = regression_data(SAMPLES, dtype)
    batches = list(DataLoader(TensorDataset(*tensors), BATCH_SIZE))
    size = batches_of_step(features)
    left_out = steps_of_epoch(features) + 1 if features.end == "rolled back" else None
    for _ in range(2 if features.end == "second fit" else 1):
        optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
        average, means = [each.detach().clone() for each in net.parameters()], 0
        for epoch in range(EPOCHS):
            for number, first in enumerate(range(0, len(batches), size)):
                if epoch * steps_of_epoch(features) + number == left_out:
                    continue
                window = batches[first : first + size]
                weights = [len(t) if features.weights == "samples" else compute_weight(t) for _, t in window]
                optimizer.zero_grad()
                for batch, weight in zip(window, weights, strict=True):
                    loss = compute_loss(net, batch, features.weights != "samples")
                    (loss * weight / sum(weights)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                if features.average == "EMA":
                    for mean, each in zip(average, net.parameters(), strict=True):
                        mean.lerp_(each.detach(), 1 - DECAY)
            if features.average == "SWA" and epoch >= 1:
                means += 1
                for mean, each in zip(average, net.parameters(), strict=True):
                    mean.lerp_(each.detach(), 1 / means)
            validated = average if features.average == "EMA" or means else net.parameters()
            val_loss = mean_loss(validated, tensors)
        if features.average != "none":
            for mean, each in zip(average, net.parameters(), strict=True):
                each.data.copy_(mean)
    return [each.tolist() for each in net.parameters()], val_loss
