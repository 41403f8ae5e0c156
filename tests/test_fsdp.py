"""FSDP: what one process trains, several train that each hold a part; what cannot work is one clear error."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError, TrainingError
from lumen.optim import Lookahead
from tests.tasks import FEATURES, bare_trainer, loader, numbers, regression_data

WIDTH = 7  # no multiple of a number of processes


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Deep(lumen.TaskModule):
    """Least squares with a deep net, in float64."""

    def __init__(self, dropout=0.0, seed=0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(dropout).to(dtype)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(samples=50, batch_size=8, dtype=torch.float64, **options):
    return loader(samples, batch_size, dtype=dtype, **options)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def state_of(task):
    return {name: whole(value).double().numpy() for name, value in task.state_dict().items()}


def fit(folder, task, given=None, **options):
    """Train a task; where its parameters end."""
    bare_trainer(folder, **{"max_epochs": 2} | options).fit(task, data() if given is None else given)
    return state_of(task)


def on_ranks(group, world, function, *args, **options):
    """Results of all ranks, which must be equal."""
    results = group(world).run(function, *args, **options)
    for each in results[1:]:
        assert_equal(each, results[0], 0.0)
    return results[0]


def assert_equal(ours, theirs, tolerance=1e-12):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert np.abs(value - theirs[name]).max(initial=0.0) <= tolerance, name


def units_of(task):
    return [name for name, module in task.named_modules() if isinstance(module, FSDPModule)]


BLOCKS = ["net.blocks.0", "net.blocks.1", "net.blocks.2"]


# ---------------------------------------------------------------------- options


def train(folder, options, world=1, *, dropout=0.0, **trainer):
    strategy = {} if options is None else {"strategy": lumen.FSDP(**options)}
    return fit(folder, Deep(dropout), accumulate_grad_batches=4 // world, **strategy, **trainer)


def is_linear(name, module):
    return isinstance(module, nn.Linear) and "up" in name


OPTIONS = [
    {},
    {"wrap": "Linear"},
    {"wrap": ["Net", "Block"], "reduce_every_backward": True},
    {"wrap_if": is_linear},
    {"wrap_min_parameters": 100_000},
    {"sharding_strategy": "shard_grad_op"},
    {"sharding_strategy": "no_shard"},
    {"sharding_strategy": "hybrid_shard", "shard_size": 1},
    {"reshard_after_forward": False, "reduce_every_backward": True},
    {"cpu_offload": True},
    {"activation_checkpointing": "Block"},
    {"find_unused_parameters": True, "broadcast_buffers": False, "unshard_in_evaluation": False},
    {"param_dtype": None, "reduce_dtype": None, "output_dtype": None},
]


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}], ids=["", "clipped"])
def test_every_option_trains_what_one_process_trains(group, tmp_path, clip):
    alone = train(tmp_path, None, dropout=0.2, **clip)
    assert_equal(on_ranks(group, 2, train_all, tmp_path, OPTIONS, 2, clip), alone | {"options": np.zeros(1)})


def train_all(folder, many, world, clip):
    results = [train(folder, options, world, dropout=0.2, **clip) for options in many]
    for options, each in zip(many, results, strict=True):
        for name, value in each.items():
            assert np.abs(value - results[0][name]).max() <= 1e-13, (options, name)
    return results[0] | {"options": np.zeros(1)}


def test_clipping_by_value_trains_what_one_process_trains(group, tmp_path):
    clip = {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}
    alone = train(tmp_path, None, **clip)
    assert any(np.abs(value - train(tmp_path, None)[name]).max() > 1e-4 for name, value in alone.items())
    assert_equal(on_ranks(group, 2, train_clipped, tmp_path, clip), alone)


def train_clipped(folder, clip):
    return train(folder, {}, 2, **clip)


@pytest.mark.parametrize("world", [1, 4])
def test_so_do_one_and_four_processes(group, tmp_path, world):
    many = [{}, {"sharding_strategy": "hybrid_shard", "shard_size": 2}, {"reshard_after_forward": 2}]
    alone = train(tmp_path, None, dropout=0.2) | {"options": np.zeros(1)}
    assert_equal(on_ranks(group, world, train_all, tmp_path, many[: 3 if world == 4 else 1], world, {}), alone)
