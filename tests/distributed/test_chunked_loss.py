"""Chunked cross entropy on two processes: the training of one process with the plain loss."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError
from tests.helpers.group import assert_equal, catch_message, run_on_ranks
from tests.helpers.sharded import unshard
from tests.helpers.tasks import bare_trainer

WIDTH, WORDS = 6, 20
chunked = partial(lumen.chunked_cross_entropy, chunk_size=8, reduction="sum")


def plain(hidden, head, targets):
    return F.cross_entropy(head(hidden).flatten(0, -2), targets.flatten(), reduction="sum")


def of_weight(hidden, head, targets):
    return chunked(hidden, head.weight, targets, bias=head.bias)


class Head(nn.Linear):
    pass


class Adapter(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.base, self.low, self.high = nn.Linear(*sizes), nn.Linear(WIDTH, 2), nn.Linear(2, WORDS)
        self.base.requires_grad_(False)

    def forward(self, hidden):
        return self.base(hidden) + self.high(self.low(hidden))


class Language(lumen.TaskModule):
    """Language model that ignores some targets and weights its loss by the number of the others."""

    def __init__(self, loss, head=Head, is_tied=False, is_manual=False, plan=None):
        super().__init__()
        self.automatic_optimization, self.parallel_plan = not is_manual, plan
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), head(WIDTH, WORDS)
        if is_tied:
            self.head.weight = self.embed.weight
        self.double()
        self.loss = loss

    def mean(self, batch):
        ids, targets = batch
        count = (targets != -100).sum()
        return self.loss(self.layer(self.embed(ids)).tanh(), self.head, targets) / count, count

    def training_step(self, batch):
        loss, count = self.mean(batch)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss, count

    def validation_step(self, batch):
        loss, count = self.mean(batch)
        self.log("val_loss", loss, weight=count)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder, loss, strategy="single", batches=2, task=None, **options):
    """Train and validate; return parameters and the validation loss."""
    warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's compiler inspects functions without need
    ids = torch.randint(WORDS, (22, 9), generator=torch.Generator().manual_seed(2))
    targets = ids.roll(-1, 1).where(torch.arange(9) < ids[:, :1] % 9 + 1, -100)
    data = DataLoader(TensorDataset(ids, targets), 3)
    task, options = Language(loss, **task or {}), {"max_epochs": 2, "accumulate_grad_batches": batches} | options
    trainer = bare_trainer(folder, strategy=strategy, **{"gradient_clip_val": 0.1} | options)
    trainer.fit(task, data, data)
    parameters = {name: unshard(value).numpy() for name, value in task.state_dict().items()}
    return parameters | {"val_loss": float(trainer.newest_values["val_loss"])}


STRATEGIES = {
    "ddp": lumen.DDP(),
    "fsdp": lumen.FSDP(),
    "head is a unit": lumen.FSDP(wrap="Head"),
    "adapter is a unit": lumen.FSDP(wrap="Adapter"),
    "checkpointed head is a unit": lumen.FSDP(wrap="Head", activation_checkpointing="Head"),
}


@pytest.mark.parametrize(
    ("strategy", "task", "options"),
    [
        ("ddp", {}, {}),
        ("ddp", {"is_tied": True}, {}),
        ("ddp", {"head": Adapter}, {}),
        ("fsdp", {}, {}),
        ("fsdp", {"is_tied": True}, {}),
        ("fsdp", {"head": Adapter}, {}),
        ("head is a unit", {}, {}),
        ("head is a unit", {}, {"compile": {"backend": "eager"}}),
        ("adapter is a unit", {"head": Adapter}, {}),
        ("checkpointed head is a unit", {}, {}),
    ],
)
def test_chunked_loss_on_two_processes_equals_one(group, tmp_path, strategy, task, options):
    alone = fit(tmp_path, plain, batches=4, task=task)
    ours = run_on_ranks(group, 2, fit, tmp_path, chunked, STRATEGIES[strategy], task=task, **options)
    assert_equal(ours, alone)


@pytest.mark.parametrize(
    ("loss", "head", "units", "message"),
    [
        (of_weight, Head, "Head", "expected the module as head, because its weight is sharded; found torch.float64"),
        (chunked, Adapter, "Linear", "expected the head to be one FSDP unit or part of one (option wrap); found units"),
    ],
)
def test_chunked_loss_refuses_heads_that_gather_per_chunk(group, tmp_path, loss, head, units, message):
    options = {"strategy": lumen.FSDP(wrap=units), "task": {"head": head}}
    for found in group(2).run(catch_message, ConfigError, fit, tmp_path, loss, **options):
        assert f"chunked_cross_entropy: {message}" in found


@pytest.mark.parametrize("strategy", [lumen.FSDP(param_dtype="bf16"), lumen.FSDP(param_dtype="bf16", wrap="Head")])
def test_chunked_loss_in_dtype_of_fsdp_is_accurate(group, tmp_path, strategy):
    ours = run_on_ranks(group, 2, fit, tmp_path, chunked, strategy)
    assert_equal(ours, run_on_ranks(group, 2, fit, tmp_path, plain, strategy), 0.05)


@pytest.mark.parametrize("shape", [{"tensor": 2}, {"tensor": 2, "shard": 2}], ids=str)
def test_chunked_loss_of_a_cut_vocabulary_equals_one(group, tmp_path, shape):
    """The head is called on each chunk, and gathers the logits of the chunk."""
    task, processes = {"plan": {"head": "vocab"}, "head": nn.Linear}, 2 * shape.get("shard", 1)
    alone = fit(tmp_path, plain, batches=4)
    ours = run_on_ranks(group, processes, fit, tmp_path, chunked, lumen.Mesh(**shape), 8 // processes, task=task)
    assert_equal(ours, alone)


def test_chunked_loss_in_manual_optimization_equals_plain(group, tmp_path):
    options = {"task": {"is_manual": True}, "gradient_clip_val": None, "accumulate_grad_batches": 1}
    ours = run_on_ranks(group, 2, fit, tmp_path, chunked, lumen.FSDP(), **options)
    assert_equal(ours, run_on_ranks(group, 2, fit, tmp_path, plain, lumen.FSDP(), **options))
