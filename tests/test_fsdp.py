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
from lumen.strategies.units import find_units
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


def test_every_option_trains_what_one_process_trains(group, tmp_path):
    assert_equal(on_ranks(group, 2, train_all, tmp_path, OPTIONS, 2), train(tmp_path, None, dropout=0.2))


@pytest.mark.parametrize("world", [1, 4])
def test_so_do_one_and_four_processes(group, tmp_path, world):
    many = (
        [{}] if world == 1 else [{"sharding_strategy": "hybrid_shard", "shard_size": 2}, {"reshard_after_forward": 2}]
    )
    assert_equal(on_ranks(group, world, train_all, tmp_path, many, world), train(tmp_path, None, dropout=0.2))


def train_all(folder, many, world):
    results = [train(folder, options, world, dropout=0.2) for options in many]
    for options, each in zip(many, results, strict=True):
        for name, value in each.items():
            assert np.abs(value - results[0][name]).max() <= 1e-13, (options, name)
    return results[0]


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
def test_clipping_is_that_of_one_process(group, tmp_path, clip):
    clip = {"gradient_clip_val": 0.003} | clip
    alone = train(tmp_path, None, **clip)
    assert any(np.abs(value - train(tmp_path, None)[name]).max() > 1e-4 for name, value in alone.items())
    assert_equal(on_ranks(group, 2, train_clipped, tmp_path, clip), alone)


def train_clipped(folder, clip):
    return train(folder, {}, 2, **clip)


# ---------------------------------------------------------------------- what is wrapped


class Choosing(Deep):
    def modules_to_shard(self):
        yield self.net.blocks[1]


class Several(lumen.TaskModule):
    """Two towers of repeated blocks, one in an `nn.Sequential` with layers of its own inside."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        self.layers = nn.ModuleDict({"a": Block(), "b": Block(), "scale": nn.PReLU()})

    def training_step(self, batch):
        pass


class Tied(Deep):
    def __init__(self):
        super().__init__()
        self.net.blocks[2].down.weight = self.net.blocks[0].down.weight


@pytest.mark.parametrize(
    ("task", "options", "expected"),
    [
        (Deep, {}, BLOCKS),
        (Deep, {"wrap": "Block"}, BLOCKS),
        (Deep, {"wrap": ["Net", "Block"]}, ["net", *BLOCKS]),
        (Deep, {"wrap_if": is_linear}, [f"{block}.up" for block in BLOCKS]),
        (Deep, {"wrap_if": lambda name, module: True}, None),
        (Deep, {"wrap_min_parameters": 2 * 3 * WIDTH * WIDTH}, BLOCKS),
        (Deep, {"wrap_min_parameters": 3 * WIDTH * WIDTH}, [f"{b}.{part}" for b in BLOCKS for part in ("up", "down")]),
        (Deep, {"wrap_min_parameters": 700}, ["net"]),
        (Deep, {"wrap_min_parameters": 10**6}, []),
        (Choosing, {}, ["net.blocks.1"]),
        (Choosing, {"wrap": "Block"}, BLOCKS),
        (Several, {}, ["tower.1", "tower.2", "layers.a", "layers.b"]),
        (Tied, {}, ["net.blocks.1"]),
    ],
)
def test_units_are_what_is_asked_for(task, options, expected):
    task, strategy = task(), lumen.FSDP(**options)
    units = find_units(task, *strategy._wrap)
    names = {module: name for name, module in task.named_modules()}
    found = [names[unit] for unit in units]
    if expected is None:
        expected = ["net", *BLOCKS, *(f"{b}.{part}" for b in BLOCKS for part in ("up", "down", "dropout"))]
        expected = [name for name in names.values() if name in expected or name in ("net.first", "net.last")]
        expected = [name for name in expected if "dropout" not in name]
    assert sorted(found) == sorted(expected)
    for place, name in enumerate(found):  # inner ones first
        assert not any(later.startswith(f"{name}.") for later in found[place:])


def test_tied_weights_in_two_blocks_train_what_one_process_trains(group, tmp_path):
    alone = fit(tmp_path, Tied(), accumulate_grad_batches=2)
    assert_equal(on_ranks(group, 2, train_tied, tmp_path), alone)


def train_tied(folder):
    task = Tied()
    state = fit(folder, task, strategy=lumen.FSDP())
    assert units_of(task) == ["net.blocks.1"]
    assert task.net.blocks[2].down.weight is task.net.blocks[0].down.weight
    return state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": "Block", "wrap_min_parameters": 3}, "Set one"),
        ({"sharding_strategy": "zero3"}, "expected one of full_shard"),
        ({"shard_size": 2}, "hybrid_shard"),
        ({"sharding_strategy": "no_shard", "reshard_after_forward": True}, "no_shard keeps parameters whole"),
        ({"reshard_after_forward": 1}, "at least 2"),
        ({"param_dtype": "float8"}, "param_dtype: expected bf16"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        lumen.FSDP(**options)


class Scalar(Deep):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Lazy(Deep):
    def __init__(self):
        super().__init__()
        self.more = nn.LazyLinear(3)


class Mixed(Deep):
    def __init__(self):
        super().__init__()
        self.net.blocks[0].up.float()


class Early(Deep):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters())

    def configure_optimizers(self):
        return self.optimizer


class Quadratic(Deep):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


REFUSED = [
    (Deep, {"wrap": ["Block", "Bloc"]}, "no module of Deep is a Bloc; its classes are Block, Deep"),
    (Deep, {"wrap": "ModuleList"}, "ModuleList has no forward"),
    (Deep, {"activation_checkpointing": "Attention"}, "activation_checkpointing: no module"),
    (Deep, {"sharding_strategy": "hybrid_shard", "shard_size": 3}, "shard_size = 3"),
    (Deep, {"reshard_after_forward": 3}, "reshard_after_forward = 3 is no divisor of the 2 processes"),
    (Scalar, {}, "scale has no dimension.*shape \\(1,\\)"),
    (Lazy, {}, "more.weight has no shape"),
    (Mixed, {}, "several dtypes: net.blocks.0.up.weight in float32, net.blocks.0.down.weight in float64"),
    (Early, {}, "not the task's. Build it in configure_optimizers"),
    (Quadratic, {}, "LBFGS works on all parameters as one vector"),
]


def test_what_cannot_be_cut_up_is_one_clear_error(group, tmp_path):
    group(2).run(refuse_all, tmp_path)


def refuse_all(folder):
    for task, options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            fit(folder, task(), strategy=lumen.FSDP(**options))
