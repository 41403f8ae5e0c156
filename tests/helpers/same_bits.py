"""Language model whose runs with exact sums are compared bit by bit."""

import hashlib
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.distributed.dtensor import gather_full_tensor
from tests.helpers.tasks import quiet_trainer

VOCAB, WIDTH, TIME = 23, 20, 6  # sizes that 3 and 4 processes do not divide


class Texts(Dataset):
    """Blocks of tokens; augmented ones have a random token, from a careless user's generators."""

    def __init__(self, samples, *, augments=True):
        self.augments = augments
        self.ids = torch.randint(0, VOCAB, (samples, TIME + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index].clone()
        if self.augments:
            ids[random.randrange(TIME)] = torch.randint(1, VOCAB, ())
        return ids[:-1], ids[1:]


class Block(nn.Module):
    """Attention and two layers, with dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.up, self.down = nn.Dropout(dropout), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(lumen.TaskModule):
    """Language model in float32 with tied embeddings.

    Args:
        weights: "samples", "returned" or "known": how the task weighs a micro-batch, the last two by uneven fractions.
        momentum: True to train by SGD with momentum, whose state shows the sign of a gradient of 0.
        dropout: Probability of dropout.
        skips: True if some micro-batches have no loss, and some do not use the last block.
    """

    def __init__(self, weights="samples", *, momentum=False, skips=False, dropout=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head.weight = self.tokens.weight
        self.zero = nn.Parameter(torch.ones(5))
        self.weights, self.momentum, self.skips = weights, momentum, skips
        if skips:
            self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        if weights == "known":
            self.batch_weight = lambda batch: float((batch[1] > 5).sum()) * 0.1

    def forward(self, ids):
        x = self.blocks[0](self.tokens(ids))
        if not (self.skips and self.training and ids[0, 0] % 3):
            x = self.blocks[1](x)
            x = x + self.conv(x.unflatten(-1, (2, -1)).transpose(1, 2)).mean() if self.skips else x
        return self.head(x)

    def training_step(self, batch):
        if self.skips and batch[0][0, 1] % 5 == 0:
            return None
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()) + (self.zero * -0.0).sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("tenths", 0.1 * len(batch[0]), on_step=False, on_epoch=True, reduce_fx="sum")
        return (loss, float((batch[1] > 5).sum()) * 0.1) if self.weights == "returned" else loss

    def validation_step(self, batch):
        self.log("val_loss", F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten()))

    def configure_optimizers(self):
        if self.momentum:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return lumen.optim.adamw(self.parameters(), lr=1e-2)  # fused, which rounds shards differently


def make_loaders(samples=37, *, augments=True):
    """Return a loader for training and one for validation."""
    return DataLoader(Texts(samples, augments=augments), 2, shuffle=True), DataLoader(Texts(samples), 5)


def make_strategy(name):
    """Return the strategy with a short name."""
    return {
        "ddp_unused": lambda: lumen.DDP(find_unused_parameters=True, bucket_cap_mb=0.01),
        "ddp_views": lambda: lumen.DDP(find_unused_parameters=True, gradient_as_bucket_view=True),
        "hybrid": lambda: lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=2),
        "shard_grad_op": lambda: lumen.FSDP(sharding_strategy="shard_grad_op"),
        "mesh": lambda: lumen.Mesh(replicate=2, shard=2),
    }.get(name, lambda: name)()


def hash_run(trainer, task):
    """Return a hash of all parameters and optimizer states, and the text of `metrics.csv`."""
    digest = hashlib.sha256()
    for parameter in task.parameters():
        state = trainer.optimizers[0].state[parameter]
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            digest.update(gather_full_tensor(tensor.detach()).contiguous().numpy().tobytes())
    rows = trainer.run_directory / "metrics.csv"
    return digest.hexdigest()[:16], rows.read_text()


def train(
    folder, strategy="single", weights="samples", samples=37, max_steps=8, *, augments=True, make_task=Model,
    model=None, **options,
):  # fmt: skip
    """Train, and return the hash and the metrics of the run.

    Args:
        model: Further arguments of the task.
        **options: Arguments of the trainer.
    """
    torch.set_num_threads(1)
    task = make_task(weights, **model or {})
    options = {"global_batch_size": 16, "gradient_clip_val": 0.5, "reduction": "exact"} | options
    trainer = quiet_trainer(
        folder, strategy=make_strategy(strategy), max_steps=max_steps, log_every_n_steps=1, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    trainer.fit(task, *make_loaders(samples, augments=augments))
    return hash_run(trainer, task)
