"""FSDP: processes that each hold a shard train exactly like one; an unsupported setup raises one clear error."""

import gc
import re
import warnings
from copy import deepcopy
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError, TrainingError
from lumen.optim import Lookahead
from lumen.strategies.fsdp_units import find_units
from tests.helpers.group import assert_equal, catch_message, run_on_ranks
from tests.helpers.sharded import count_held_bytes, unshard
from tests.helpers.tasks import FEATURES, Regression, bare_trainer, loader, regression_data

WIDTH = 7  # not a multiple of a number of processes


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
    """Least squares with a deep network, in float64."""

    def __init__(self, dropout=0.0, seed=0, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(dropout).to(dtype)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        loss = (self(batch[0]) - batch[1]).square().mean()  # mse_loss of torch 2.11 accepts one dtype only
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_data(samples=50, batch_size=8, dtype=torch.float64, **options):
    return loader(samples, batch_size, dtype=dtype, **options)


def read_state(task):
    return {name: unshard(value).double().numpy() for name, value in task.state_dict().items()}


def fit(folder, task, given=None, **options):
    """Train a task and return the final parameters."""
    bare_trainer(folder, **{"max_epochs": 2} | options).fit(task, make_data() if given is None else given)
    return read_state(task)


def fit_new(folder, kind, *args, **options):
    """Train a new task of this class and return the final parameters."""
    return fit(folder, kind(*args), **options)


def check(group, folder, kind, *args, parts=None, **options):
    """Compare the training of two processes with that of one. Return the result of one process."""
    alone = fit_new(folder, kind, *args, accumulate_grad_batches=2, **options)
    strategy = lumen.FSDP(**parts or {})
    assert_equal(run_on_ranks(group, 2, fit_new, folder, kind, *args, strategy=strategy, **options), alone)
    return alone


def list_units(task):
    return [name for name, module in task.named_modules() if isinstance(module, FSDPModule)]


BLOCKS = ["net.blocks.0", "net.blocks.1", "net.blocks.2"]


class Failing(Deep):
    fails = True

    def validation_step(self, batch):
        super().validation_step(batch)
        if self.fails:
            raise RuntimeError("the disk is full")


def freeze_after_failure(folder):
    task, data = Failing(), make_data()
    options = {"max_steps": 1, "strategy": lumen.FSDP(unshard_in_evaluation=True)}
    with pytest.raises(RuntimeError, match="the disk is full"):
        bare_trainer(folder, **options).fit(task, data, data)
    task.net.first.requires_grad_(False)
    task.fails = False
    trainer = bare_trainer(folder, **options)
    trainer.fit(task, data, data)
    return trainer.global_step


def test_layers_are_frozen_after_a_failed_evaluation(group, tmp_path):
    assert group(2).run(freeze_after_failure, tmp_path) == [1, 1]


class CallsAPart(Deep):
    """Task that calls a part of its network before any step has called the whole network."""

    def on_train_epoch_start(self):
        self.net.blocks[0](torch.zeros(1, WIDTH, dtype=torch.float64))

    def on_validation_epoch_start(self):
        self.net.blocks[0](torch.zeros(1, WIDTH, dtype=torch.float64))


def fit_and_validate(folder, options):
    validated = bare_trainer(folder, **options).validate(CallsAPart(), make_data(), verbose=False)
    return fit(folder, CallsAPart(), max_epochs=1, **options), validated


def test_a_part_may_be_called_before_the_whole(tmp_path, group):
    expected, values = fit_and_validate(tmp_path, {})
    (found, validated), _ = group(2).run(fit_and_validate, tmp_path, {"strategy": lumen.FSDP(wrap=["Block"])})
    assert values == [{"val_loss": pytest.approx(validated[0]["val_loss"], rel=1e-10)}]
    assert found.keys() == expected.keys()


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
    assert_equal(run_on_ranks(group, 2, train_all, tmp_path, OPTIONS, 2), train(tmp_path, None, dropout=0.2))


@pytest.mark.parametrize("world", [1, 4])
def test_so_do_one_and_four_processes(group, tmp_path, world):
    many = (
        [{}] if world == 1 else [{"sharding_strategy": "hybrid_shard", "shard_size": 2}, {"reshard_after_forward": 2}]
    )
    assert_equal(run_on_ranks(group, world, train_all, tmp_path, many, world), train(tmp_path, None, dropout=0.2))


def train_all(folder, many, world):
    results = [train(folder, options, world, dropout=0.2) for options in many]
    for options, each in zip(many, results, strict=True):
        for name, value in each.items():
            assert np.abs(value - results[0][name]).max() <= 1e-13, (options, name)
    return results[0]


def test_sharding_strategies_hold_what_their_names_say(group, tmp_path):
    """Each rank holds given rows of a weight of 21 rows: between steps, and between a block's forward and backward."""
    for part, found in zip((11, 10), group(2).run(hold_by_strategy, tmp_path), strict=True):
        assert found == [
            ("FULL_SHARD", None, part, part),
            ("SHARD_GRAD_OP", None, part, 21),
            ("NO_SHARD", None, 21, 21),
            ("HYBRID_SHARD", 2, part, part),
            ("HYBRID_SHARD", 1, 21, 21),
        ]


class Holding(Deep):
    def training_step(self, batch):
        before = self.local_rows()
        loss = super().training_step(batch)
        self.found = before, self.local_rows()
        return loss

    def local_rows(self):
        weight = self.net.blocks[0].up.weight
        return len(weight.to_local() if isinstance(weight, DTensor) else weight)


def hold_by_strategy(folder):
    found, names = [], ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD")
    for name, shard_size in zip(names, (None, None, None, 2, 1), strict=True):
        task = Holding()
        fit(folder, task, max_steps=2, strategy=lumen.FSDP(sharding_strategy=name, shard_size=shard_size))
        found.append((name, shard_size, *task.found))
    return found


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_algorithm": "value"}], ids=["norm", "value"])
def test_clipping_is_that_of_one_process(group, tmp_path, clip):
    clip = {"gradient_clip_val": 0.003} | clip
    alone = train(tmp_path, None, **clip)
    assert any(np.abs(value - train(tmp_path, None)[name]).max() > 1e-4 for name, value in alone.items())
    assert_equal(run_on_ranks(group, 2, train, tmp_path, {}, 2, **clip), alone)


class Counting(Deep):
    """Task that counts the forwards of its blocks in training."""

    def __init__(self):
        super().__init__()
        self.forwards = 0
        for block in self.net.blocks:
            block.up.register_forward_hook(self.count)

    def count(self, module, args, output):
        self.forwards += self.training


def test_checkpointed_blocks_run_again_in_the_backward(group, tmp_path):
    once, twice = (group(1).run(count_forwards, tmp_path, options)[0] for options in ({}, CHECKPOINTED))
    assert twice == 2 * once == 2 * 3 * 4


CHECKPOINTED = {"activation_checkpointing": "Block"}


def count_forwards(folder, options):
    task = Counting()
    fit(folder, task, strategy=lumen.FSDP(**options), max_steps=4)
    return task.forwards


@pytest.mark.parametrize("options", [{}, CHECKPOINTED], ids=str)
def test_compiled_blocks_train_the_same(group, tmp_path, options):
    alone = train(tmp_path, None, dropout=0.0)
    assert_equal(run_on_ranks(group, 2, train_compiled, tmp_path, options), alone)


def train_compiled(folder, options):
    warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's compiler inspects functions without need
    return train(folder, options, 2, compile={"backend": "aot_eager", "blocks": ["Block"]})


# ---------------------------------------------------------------------- FSDP units


class Choosing(Deep):
    def modules_to_shard(self):
        yield self.net.blocks[1]


class Several(lumen.TaskModule):
    """Two towers of repeated blocks, one in an `nn.Sequential` with other layers."""

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
    for place, name in enumerate(found):  # inner units first
        assert not any(later.startswith(f"{name}.") for later in found[place:])


def test_weights_tied_across_blocks_train_as_unsharded(group, tmp_path):
    alone = fit(tmp_path, Tied(), accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, train_tied, tmp_path), alone)


def train_tied(folder):
    task = Tied()
    state = fit(folder, task, strategy=lumen.FSDP())
    assert list_units(task) == ["net.blocks.1"]
    assert task.net.blocks[2].down.weight is task.net.blocks[0].down.weight
    return state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": "Block", "wrap_min_parameters": 3}, "Set only one"),
        ({"sharding_strategy": "zero3"}, "sharding_strategy: expected 'full_shard'"),
        ({"shard_size": 2}, "hybrid_shard"),
        ({"sharding_strategy": "no_shard", "reshard_after_forward": True}, "no_shard keeps parameters unsharded"),
        ({"reshard_after_forward": 1}, "at least 2"),
        ({"param_dtype": "float8"}, "param_dtype: expected 'bf16'"),
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


class Quadratic(Deep):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


REFUSED = [
    (Deep, {"wrap": ["Block", "Bloc"]}, "no module of Deep is a Bloc; its classes are Block, Deep"),
    (Deep, {"wrap": "ModuleList"}, "ModuleList has no forward"),
    (Deep, {"activation_checkpointing": "Attention"}, "activation_checkpointing: no module"),
    (Deep, {"sharding_strategy": "hybrid_shard", "shard_size": 3}, "shard_size = 3"),
    (Deep, {"reshard_after_forward": 3}, "reshard_after_forward = 3 does not divide the 2 processes"),
    (Scalar, {}, "scale has no dimension.*shape \\(1,\\)"),
    (Lazy, {}, "more.weight has no shape"),
    (Mixed, {}, "several dtypes: net.blocks.0.up.weight in float32, net.blocks.0.down.weight in float64"),
    (Quadratic, {}, "LBFGS evaluates the loss within its step"),
]


def test_unshardable_models_raise_one_clear_error(group, tmp_path):
    group(2).run(refuse_all, tmp_path)


def refuse_all(folder):
    for task, options, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            fit(folder, task(), strategy=lumen.FSDP(**options))


# ---------------------------------------------------------------------- initial state


def test_all_ranks_use_the_model_of_rank_0(group, tmp_path):
    alone = fit(tmp_path, WithBuffers(), accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, train_differently_built, tmp_path), alone)


class WithBuffers(Deep):
    """Task whose loss depends on buffers of several kinds."""

    def __init__(self, rank=0):
        super().__init__(seed=rank)
        self.register_buffer("shift", torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("mask", torch.arange(FEATURES) != rank, persistent=False)
        self.register_buffer("count", torch.tensor(rank))

    def forward(self, x):
        return self.net(x * self.mask + self.count)


def train_differently_built(folder):
    return fit(folder, WithBuffers(int(torch.distributed.get_rank())), strategy=lumen.FSDP())


class Columns(Deep):
    """Task with parameters of another memory layout, and one with an attribute that the user has set."""

    def __init__(self):
        super().__init__()
        up = self.net.blocks[0].up
        up.weight = nn.Parameter(up.weight.detach().t().contiguous().t())
        self.net.last.bias.slow = True
        self.net.blocks[1].up.bias.slow = True

    def configure_optimizers(self):
        slow = [parameter for parameter in self.parameters() if hasattr(parameter, "slow")]
        assert len(slow) == 2
        rest = [parameter for parameter in self.parameters() if not hasattr(parameter, "slow")]
        return torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": rest}], lr=1e-2)


def test_parameters_keep_their_attributes_whatever_their_layout_was(group, tmp_path):
    assert not Columns().net.blocks[0].up.weight.is_contiguous()
    check(group, tmp_path, Columns)


class Thawing(Deep):
    """Task with a partly frozen unit, a unit that a callback unfreezes, and one that the callback freezes."""

    def __init__(self):
        super().__init__()
        self.net.blocks[0].up.requires_grad_(False)
        self.net.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net.blocks[1].requires_grad_(self.current_epoch == 1)
        self.net.blocks[2].requires_grad_(self.current_epoch == 0)


def test_frozen_and_trainable_parameters_mix_and_change(group, tmp_path):
    alone, before = check(group, tmp_path, Thawing), read_state(Thawing())
    frozen = {name for name, value in alone.items() if np.array_equal(value, before[name])}
    assert frozen == {"net.blocks.0.up.weight", "net.blocks.0.up.bias"}


class ThawingInBfloat16(Thawing):
    def on_before_optimizer_step(self, optimizer):
        assert {each.grad.dtype for each in self.parameters() if each.grad is not None} == {torch.float64}


def test_unfrozen_unit_keeps_gradients_in_their_dtype(group, tmp_path):
    group(2).run(fit_new, tmp_path, ThawingInBfloat16, strategy=lumen.FSDP(param_dtype="bf16", output_dtype="fp32"))


class Optimized(Deep):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        return {
            "Lookahead": lambda: Lookahead(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9), k=2),
            "fused": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True),
            "foreach": lambda: torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True),
            "one by one": lambda: torch.optim.RMSprop(self.parameters(), lr=1e-2, foreach=False),
            "Adagrad": lambda: torch.optim.Adagrad(self.parameters(), lr=1e-2),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["Lookahead", "fused", "foreach", "one by one", "Adagrad"])
def test_optimizers_of_every_kind_train_parts(group, tmp_path, kind):
    check(group, tmp_path, Optimized, kind, max_epochs=3)


# ---------------------------------------------------------------------- ranks without a batch


class Choosy(Deep):
    """Task that skips some batches, before or after their forward, but never the first one of a process."""

    def __init__(self, leaves_out, late):
        super().__init__()
        self.leaves_out, self.late = leaves_out, late

    def training_step(self, batch):
        number = int(batch[2][0]) // 8
        out = number >= 4 and number % 4 in self.leaves_out
        if out and not self.late:
            return None
        loss = super().training_step(batch)
        return None if out else loss


def train_choosy(folder, cases, per_rank, options):
    strategy = {} if options is None else {"strategy": lumen.FSDP(**options)}
    numbered = DataLoader(TensorDataset(*regression_data(64, torch.float64), torch.arange(64)), 8)
    states = {
        case: fit(folder, Choosy(*case), numbered, accumulate_grad_batches=per_rank, **strategy) for case in cases
    }
    return {f"{case} {name}": value for case, state in states.items() for name, value in state.items()}


@pytest.mark.parametrize(
    "options", [{}, {"wrap_min_parameters": 10**6}, {"sharding_strategy": "shard_grad_op"}], ids=str
)
def test_a_rank_may_leave_out_its_micro_batches(group, tmp_path, options):
    cases = [(out, late) for out in ((1,), (2, 3), (0, 1, 2), (0, 1, 2, 3)) for late in (False, True)]
    alone = train_choosy(tmp_path, cases, 4, None)
    assert_equal(run_on_ranks(group, 2, train_choosy, tmp_path, cases, 2, options), alone)


class Skipping(Deep):
    """Task that ends its first epoch in the middle of a step."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, 5) else None


@pytest.mark.parametrize("strategy", [lumen.FSDP, lumen.DDP])
def test_epoch_ending_within_a_step_leaves_no_gradients(group, tmp_path, strategy):
    assert_equal(run_on_ranks(group, 1, skip_alone, tmp_path, strategy), skip_alone(tmp_path, None))


def skip_alone(folder, strategy):
    return fit(folder, Skipping(), strategy=strategy() if strategy else "single", accumulate_grad_batches=4)


def test_forward_without_backward_keeps_no_unsharded_parameters(group, tmp_path):
    cases = [((3,), True), ((2, 3), True)]
    alone = train_choosy(tmp_path, cases, 4, None)
    for options in ({}, {"sharding_strategy": "shard_grad_op"}):
        assert_equal(group(1).run(train_choosy, tmp_path, cases, 4, options)[0], alone)


@pytest.mark.parametrize("samples", [1, 9, 17, 33])
def test_ranks_that_run_out_of_batches_take_part(group, tmp_path, samples):
    check(group, tmp_path, Deep, given=make_data(samples))


class Counted(Deep):
    """Task that counts forwards in buffers which it replaces; one of them does not exist at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forwards", torch.tensor(0.0))
        self.register_buffer("later", None)

    def forward(self, x):
        self.forwards = self.forwards + 1
        self.later = self.forwards * 2 if self.batches else self.later
        return super().forward(x)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches += 1

    batches = 0


def test_assigned_buffers_are_restored_after_dummy_forward(group, tmp_path):
    assert group(2).run(count_by_assignment, tmp_path, 40) == [(3, 6), (2, 4)]
    assert group(2).run(count_by_assignment, tmp_path, 8) == [(1, None), (0, None)]


def count_by_assignment(folder, samples):
    task = Counted()
    bare_trainer(folder, strategy=lumen.FSDP(broadcast_buffers=False), max_epochs=1).fit(task, make_data(samples))
    return int(task.forwards), task.later if task.later is None else int(task.later)


class Branching(Deep):
    """Task with a branch that some ranks use, one that no rank uses, and one that all use."""

    def __init__(self, users):
        super().__init__()
        self.branch, self.never = nn.Linear(FEATURES, 1).double(), nn.Linear(FEATURES, 1).double()
        self.users = users

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return loss + self.branch(batch[0]).square().mean() if batch_idx % 2 in self.users else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


@pytest.mark.parametrize("users", [[], [0], [0, 1]], ids=str)
def test_find_unused_parameters_allows_partial_steps(group, tmp_path, users):
    check(group, tmp_path, Branching, users, parts={"find_unused_parameters": True})


class Forked(Regression):
    """Task that alternates between blocks, so that each rank calls a different block."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.forks = nn.ModuleList([nn.Linear(FEATURES, size, dtype=torch.float64) for size in (6, 60)])

    def training_step(self, batch, batch_idx):
        return self.forks[batch_idx % 2](batch[0]).square().mean()


def test_ranks_that_call_different_units_are_refused(group, tmp_path):
    strategy = lumen.FSDP(wrap="Linear", find_unused_parameters=True)
    for said in group(2).run(catch_message, TrainingError, fit_new, tmp_path, Forked, strategy=strategy):
        assert re.search(r"FSDP: the ranks call different units .* forks\.0, forks\.1", said)


def test_parameters_without_gradients_are_named(group, tmp_path):
    for said in group(2).run(catch_message, TrainingError, fit_new, tmp_path, Branching, [0], strategy="fsdp"):
        assert re.search(r"of rank \d: (branch.weight, branch.bias, )?never.weight, never.bias. Set", said)


# ---------------------------------------------------------------------- number formats


class Looking(Deep):
    """Task that records the dtypes of its tensors."""

    def __init__(self):
        super().__init__(dtype=torch.float32)
        self.register_buffer("scale", torch.ones(1))
        self.seen = set()

    def training_step(self, batch):
        block = self.net.blocks[0]
        inputs, targets = batch
        handles = (
            block.register_forward_pre_hook(lambda module, args: self.see(block=args[0], weight=module.up.weight)),
            block.up.register_forward_hook(lambda module, args, output: self.see(up=output)),
        )
        outputs = self(inputs * self.scale)
        for handle in handles:
            handle.remove()
        self.see(targets=targets, outputs=outputs, buffer=self.scale)
        return nn.functional.mse_loss(outputs, targets)

    def see(self, **tensors):
        self.seen |= {(name, str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def record_types(folder, options, precision):
    task = Looking()
    state = fit(
        folder, task, make_data(dtype=torch.float32), strategy=lumen.FSDP(**options), precision=precision, max_steps=3
    )
    assert {parameter.dtype for parameter in task.parameters()} == {torch.float32}
    return state, dict(task.seen)


def test_precision_means_autocast_as_everywhere(group, tmp_path):
    task = Looking()
    alone = fit(
        tmp_path, task, make_data(dtype=torch.float32), accumulate_grad_batches=2, precision="bf16", max_steps=3
    )
    state, seen = group(2).run(record_types, tmp_path, {}, "bf16")[0]
    assert seen == dict(task.seen)
    assert (seen["weight"], seen["up"], seen["targets"]) == ("float32", "bfloat16", "float32")
    assert_equal(state, alone, 2e-3)


def test_configured_dtypes_are_used_where_intended(group, tmp_path):
    exact = group(2).run(record_types, tmp_path, {}, "fp32")[0][0]
    options = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32", "buffer_dtype": "bf16"}
    state, seen = group(2).run(record_types, tmp_path, options, "fp32")[0]
    assert seen == {
        "block": "bfloat16", "weight": "bfloat16", "up": "bfloat16", "buffer": "bfloat16",
        "targets": "float32", "outputs": "float32",
    }  # fmt: skip
    assert_equal(state, exact | {"scale": state["scale"]}, 3e-2)
    assert max(np.abs(state[name] - exact[name]).max() for name in exact) > 1e-5


class Reducing(Looking):
    """Task that records whether bfloat16 can represent its gradients after the ranks have summed them."""

    def on_before_optimizer_step(self, optimizer):
        gradients = [unshard(parameter.grad) for parameter in self.net.blocks.parameters()]
        self.fits_bf16 = all(torch.equal(each, each.bfloat16().float()) for each in gradients)


@pytest.mark.parametrize(("reduce_dtype", "rounded"), [("fp32", False), ("bf16", True)])
def test_reduce_dtype_rounds_the_sum_of_gradients(group, tmp_path, reduce_dtype, rounded):
    assert group(2).run(reduce_in, tmp_path, reduce_dtype) == [rounded] * 2


def reduce_in(folder, reduce_dtype):
    task, strategy = Reducing(), lumen.FSDP(param_dtype="bf16", reduce_dtype=reduce_dtype)
    fit(folder, task, make_data(dtype=torch.float32), strategy=strategy, max_steps=1)
    return task.fits_bf16


class Overflowing(Deep):
    """Task with one micro-batch whose gradient is infinite in float16."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return loss * (1e306 if batch_idx == 3 and not self.current_epoch else 1.0)


@pytest.mark.parametrize("precision", ["fp16", "fp64"])
def test_the_gradient_scaler_skips_on_all_ranks(group, tmp_path, precision):
    task = Overflowing if precision == "fp16" else Deep
    alone = fit(tmp_path, task(), accumulate_grad_batches=2, precision=precision)
    assert_equal(run_on_ranks(group, 2, fit_new, tmp_path, task, strategy="fsdp", precision=precision), alone, 1e-4)


def test_parameters_may_be_bfloat16_themselves(group, tmp_path):
    alone = fit(tmp_path, Deep(), accumulate_grad_batches=2, precision="bf16-true", max_steps=2)
    assert_equal(run_on_ranks(group, 2, train_bfloat16, tmp_path), alone, 3e-2)


def train_bfloat16(folder):
    task = Deep()
    state = fit(folder, task, strategy=lumen.FSDP(), precision="bf16-true", max_steps=2)
    assert {parameter.dtype for parameter in task.parameters()} == {torch.bfloat16}
    return state


# ---------------------------------------------------------------------- evaluation, stages, names


class Evaluating(Deep):
    """Task that records how its parameters are sharded."""

    def __init__(self):
        super().__init__()
        self.gathered = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch)
        self.gathered.append(not isinstance(self.net.blocks[0].up.weight, DTensor))

    def test_step(self, batch):
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch):
        return self(batch[0]).flatten().tolist()

    def on_step_end(self):
        assert all(isinstance(parameter, DTensor) for parameter in self.parameters())


def run_stages(folder, options, samples):
    strategy = "single" if options is None else lumen.FSDP(**options)
    task, evaluated = Evaluating(), make_data(samples, 2, shuffle=False)
    per_rank = 2 if options is None else 1
    trainer = bare_trainer(folder, max_epochs=2, strategy=strategy, accumulate_grad_batches=per_rank)
    if options is None:
        task.on_step_end = lambda: None
    trainer.fit(task, make_data(), val_dataloaders=evaluated)
    values = {"fitted": trainer.newest_values["val_loss"], "gathered": all(task.gathered)}
    values["validated"] = trainer.validate(task, evaluated)[0]["val_loss"]
    other = bare_trainer(folder, strategy="single" if options is None else lumen.FSDP(**options))
    values["tested"] = other.test(task, evaluated)[0]["test_loss"]
    values["predicted"] = np.concatenate(other.predict(task, evaluated))
    trainer.plan.max_epochs = 3
    trainer.fit(task, make_data())
    return values | read_state(task)


@pytest.mark.parametrize("samples", [1, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_evaluation_equals_single_process_sharded_or_unsharded(group, tmp_path, samples):
    alone = run_stages(tmp_path, None, samples)
    gathered = [{}, {"cpu_offload": True}, {"sharding_strategy": "shard_grad_op"}, {"sharding_strategy": "no_shard"}]
    for options in (
        *gathered[: None if samples == 5 else 1],
        {"unshard_in_evaluation": False},
        {"reshard_after_forward": 2},
    ):
        for ours in group(2).run(run_stages, tmp_path, options, samples):
            assert ours.pop("gathered") is (options in gathered)
            assert_equal(ours, {name: value for name, value in alone.items() if name != "gathered"})


def test_all_gather_for_an_evaluation_or_none(group, tmp_path):
    for gathered, needs_dummies in group(2).run(evaluate_with_little_memory, tmp_path):
        assert (gathered, needs_dummies) == (False, True)


def evaluate_with_little_memory(folder):
    task, strategy = Evaluating(), lumen.FSDP()
    free_pages = 0 if torch.distributed.get_rank() else 10**9
    with mock.patch("os.sysconf", lambda name: free_pages if "PAGES" in name else 4096):
        bare_trainer(folder, strategy=strategy).validate(task, make_data(8, 2))
    return any(task.gathered), strategy.has_collectives_in("evaluation")


def test_sharded_task_is_refused_by_other_strategy_options(group, tmp_path):
    group(2).run(train_twice, tmp_path)


def train_twice(folder):
    task = Deep()
    fit(folder, task, strategy=lumen.FSDP())
    with pytest.raises(ConfigError, match="is already sharded"):
        fit(folder, task, strategy=lumen.FSDP(wrap="Linear"))


class Breaking(Deep):
    """Task whose n-th backward is interrupted when the first of two blocks has its gradients."""

    def __init__(self, number):
        super().__init__()
        self.left = number
        self.net.blocks[1].register_forward_hook(self.watch)

    def watch(self, module, inputs, output):
        output.register_hook(self.break_off)

    def on_train_start(self):
        for ours, fresh in zip(self.parameters(), Deep().parameters(), strict=True):
            values = distribute_tensor(fresh.detach(), ours.device_mesh, ours.placements)
            ours.detach().to_local().copy_(values.to_local())

    def break_off(self, gradient):
        self.left -= 1
        if self.left == 0:
            raise InterruptedError


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"param_dtype": "fp32", "reduce_dtype": "fp32"}], ids=["", "other dtype"])
def test_run_after_an_interrupted_one_is_exact(group, tmp_path, number, options):
    undisturbed = run_on_ranks(group, 2, train_again, tmp_path, 0, options)
    assert_equal(run_on_ranks(group, 2, train_again, tmp_path, number, options), undisturbed, 0.0)


def train_again(folder, number, options):
    """Train with two micro-batches a step and rank, after a run whose n-th backward was interrupted."""
    task = Breaking(number)
    if number:
        with pytest.raises(InterruptedError):
            fit(folder, task, strategy=lumen.FSDP(**options), accumulate_grad_batches=2)
    return fit(folder, task, strategy=lumen.FSDP(**options), accumulate_grad_batches=2)


def test_device_mesh_is_available_in_configure_model(group, tmp_path):
    assert group(2).run(see_mesh, tmp_path, {}) == [(("shard",), (2,))] * 2
    hybrid = {"sharding_strategy": "hybrid_shard", "shard_size": 1}
    assert group(2).run(see_mesh, tmp_path, hybrid) == [(("replicate", "shard"), (2, 1))] * 2
    assert Deep().device_mesh is None


def see_mesh(folder, options):
    class Seeing(Deep):
        def configure_model(self):
            self.mesh = self.device_mesh

    task = Seeing()
    fit(folder, task, strategy=lumen.FSDP(**options))
    return task.mesh.mesh_dim_names, tuple(task.mesh.shape)


def test_parameter_names_and_class_are_unchanged(group, tmp_path):
    names, kind, own_forward = group(2).run(see_names, tmp_path)[0]
    assert names == [*Deep().state_dict()]
    assert (kind, own_forward) == ("Deep", True)


def see_names(folder):
    task = Deep()
    strategy = lumen.FSDP(activation_checkpointing="Block", param_dtype="bf16")
    fit(folder, task, strategy=strategy)
    return [*task.state_dict()], type(task).__name__, "forward" not in vars(task)


# ---------------------------------------------------------------------- memory


class Large(lumen.TaskModule):
    """Task that records how many bytes of tensors this process holds at the end of a step."""

    BLOCKS, WIDTH = 12, 64

    def __init__(self):
        super().__init__()
        gc.collect()
        self.before = count_held_bytes()
        self.net = nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.BLOCKS)))

    def training_step(self, batch):
        return self.net(batch[0].repeat(1, 11)[:, : self.WIDTH]).square().mean()

    def validation_step(self, batch):
        self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_step_end(self):
        gc.collect()
        assert all(parameter.grad is not None for parameter in self.parameters())
        self.held = count_held_bytes() - self.before


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_hold_their_share_of_training_state(group, tmp_path, world):
    unit = 4 * (Large.WIDTH**2 + Large.WIDTH)
    total = 4 * Large.BLOCKS * unit  # parameter, gradient and two moments
    for options in ({}, {"sharding_strategy": "shard_grad_op"}):
        for held in group(world).run(hold, tmp_path, options):
            print(f"{world} processes {options}: {held / total:.4f} of the whole, one unit is {unit / total:.4f}")
            assert 0.95 * total / world <= held <= 1.05 * total / world + unit


def hold(folder, options):
    task = Large()
    given = loader(samples=16)
    bare_trainer(folder, max_epochs=1, strategy=lumen.FSDP(**options), num_sanity_val_steps=1).fit(
        task, given, val_dataloaders=given
    )
    return task.held


# ---------------------------------------------------------------------- checked on an accelerator only


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "bf16"), ({}, "fp16"), ({"cpu_offload": True}, "fp32"), ({"param_dtype": "bf16"}, "fp32")],
)
def test_gpu_training_equals_unsharded_training(group, tmp_path, options, precision):
    given = {"accelerator": "cuda", "precision": precision}
    alone = fit(tmp_path, Deep(dtype=torch.float32), make_data(dtype=torch.float32), **given)
    (ours,) = group(1).run(train_on_gpu, tmp_path, options, given)
    assert_equal(ours, alone, 1e-6 if not options.get("param_dtype") else 3e-2)


def train_on_gpu(folder, options, given):
    task = Deep(dtype=torch.float32)
    state = fit(folder, task, make_data(dtype=torch.float32), strategy=lumen.FSDP(**options), **given)
    where = "cpu" if options.get("cpu_offload") else "cuda"
    assert {parameter.to_local().device.type for parameter in task.parameters()} == {where}
    return state


# ---------------------------------------------------------------------- refused writes to gathered parameters


class Writing(Regression):
    """Task that writes a parameter in a hook or in its step."""

    def __init__(self, where):
        super().__init__(dtype=torch.float64)
        self.where = where

    def write(self, *args):
        with torch.no_grad():
            self.net[0].weight.mul_(0.5)

    def training_step(self, batch):
        loss = super().training_step(batch)
        if self.where == "training_step":
            self.write()
        return loss


def write_in(folder, where, strategy="fsdp", **options):
    task = Writing(where)
    if where != "training_step":
        setattr(task, where, task.write)
    data = [loader(samples, dtype=torch.float64) for samples in (48, 8)]
    bare_trainer(folder, max_epochs=2, num_sanity_val_steps=0, strategy=strategy, **options).fit(
        task, data[0], val_dataloaders=data[1]
    )
    return unshard(task.net[0].weight).tolist()


@pytest.mark.parametrize("where", ["training_step", "on_validation_epoch_start", "on_validation_epoch_end"])
def test_lost_parameter_write_raises(group, tmp_path, where):
    strategy = lumen.FSDP(wrap_min_parameters=10**6)  # one unit only: the parameters stay gathered for the whole step
    for said in group(2).run(catch_message, TrainingError, write_in, tmp_path, where, strategy):
        assert "net.0.weight was written" in said


@pytest.mark.parametrize("where", ["on_validation_start", "on_validation_end"])
def test_a_write_between_forwards_is_kept(group, tmp_path, where):
    alone = torch.tensor(write_in(tmp_path, where, "single", accumulate_grad_batches=2))
    assert (torch.tensor(group(2).run(write_in, tmp_path, where)[0]) - alone).abs().max() < 1e-12


# ---------------------------------------------------------------------- references and hooks


class Held(Deep):
    """Task that keeps references to its parameters and has hooks on them, before and after they are sharded."""

    def __init__(self, *, clips=False):
        super().__init__()
        self.clips = clips
        self.held = {"weights": [self.net.first.weight], "all": list(self.parameters())}
        self.shapes, self.view = [], None
        self.net.blocks[1].up.weight.register_hook(self.halve)
        self.net.first.bias.register_post_accumulate_grad_hook(self.mask)

    def halve(self, gradient):
        self.shapes.append(tuple(gradient.shape))
        return gradient.clamp(-1e-3, 1e-3) if self.clips else gradient * torch.linspace(0, 1, gradient.shape[1])

    def mask(self, parameter):
        parameter.grad[::2] = 0
        if self.clips:
            parameter.grad.clamp_(-0.01, 0.01)

    def on_fit_start(self):
        self.net.last.weight.register_hook(self.halve)
        self.undone = self.net.last.bias.register_hook(self.halve)

    def training_step(self, batch):
        self.undone.remove()
        reads = 0.0 if self.view is None else self.view.sum()
        return super().training_step(batch) + 0.1 * sum(each.square().sum() for each in self.held["weights"]) + reads

    def configure_optimizers(self):
        return torch.optim.SGD(self.held["all"][2:], lr=1e-2, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": self.held["all"][:2]})


@pytest.mark.parametrize("world", [1, 2])
def test_references_and_hooks_of_parameters_keep_working(group, tmp_path, world):
    expected = fit(tmp_path, Held(), max_steps=6, max_epochs=None, accumulate_grad_batches=2)
    for ours in group(world).run(train_held, tmp_path, 2 // world):
        assert_equal(ours, expected)


def train_held(folder, accumulate):
    options = {"max_steps": 6, "max_epochs": None, "accumulate_grad_batches": accumulate}
    local = [fit(folder, Held(clips=True), strategy=strategy, **options) for strategy in ("ddp", "fsdp")]
    assert_equal(*local)  # a nonlinear function sees the gradient of this process only
    task = Held()
    ours = fit(folder, task, strategy="fsdp", **options)
    assert set(task.shapes) == {(3 * WIDTH, WIDTH), (1, WIDTH)}
    assert [each.shape for each in task.held["all"]] == [each.shape for each in task.parameters()]
    assert deepcopy(task.held["weights"][0]).shape == (WIDTH, FEATURES)
    return ours


class Early(Deep):
    """Task that builds its optimizer before the parameters are sharded."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)

    def configure_optimizers(self):
        return self.optimizer


def test_optimizer_built_too_early_trains_sharded_parameters(group, tmp_path):
    expected = fit(tmp_path, Deep(), max_steps=4, accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, fit_new, tmp_path, Early, max_steps=4, strategy="fsdp"), expected)


def test_references_to_sharded_parameters_raise_clearly(group, tmp_path):
    group(2).run(refuse_references, tmp_path)


def refuse_references(folder):
    task = Held()
    task.held["weights"].append(task.net.blocks[0].up.weight)
    with pytest.raises(ConfigError, match=r"uses net.blocks.0.up.weight through a reference .* Units are net.blocks.0"):
        fit(folder, task, strategy="fsdp")
    task = Held()
    task.view = task.net.first.weight.t()
    with pytest.raises(TrainingError, match=r"a gradient reached net.first.weight through a view"):
        fit(folder, task, strategy="fsdp")


class Empty(Deep):
    def __init__(self, requires_grad=True):
        super().__init__()
        self.net.first.more = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64), requires_grad)

    def training_step(self, batch):
        return super().training_step(batch) + self.net.first.more.sum()


def test_trainable_empty_parameter_raises_one_error(group, tmp_path):
    expected = fit(tmp_path, Empty(), accumulate_grad_batches=2)
    for ours in group(2).run(train_empty, tmp_path):
        assert_equal(ours, expected)


def train_empty(folder):
    with pytest.raises(ConfigError, match=r"net.first.more has no elements to train. Set its requires_grad"):
        fit(folder, Empty(), strategy="fsdp")
    return fit(folder, Empty(requires_grad=False), strategy="fsdp")


class LoggingNorms(Regression):
    def on_train_epoch_end(self):
        self.log("norm", self.net[0].weight.detach().norm())


def log_norm(folder):
    with pytest.raises(ConfigError, match="this number is a sharded tensor"):
        bare_trainer(folder, max_epochs=1, strategy="fsdp").fit(LoggingNorms(), loader())
    return True


def test_partial_value_of_sharded_parameter_is_not_logged(group, tmp_path):
    assert group(2).run(log_norm, tmp_path) == [True, True]
