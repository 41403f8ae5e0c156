"""Checkpoints of any strategy and number of processes: others read them bitwise, each rank only its part."""

import re
import warnings
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import lumen
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.format import manifest
from lumen.checkpoint.load.restore import load_model_and_data
from lumen.checkpoint.optimizer_state import iterate_tensors
from lumen.distributed.processes import Processes
from lumen.errors import LumenError
from tests.helpers.checkpoints import count_read_bytes, is_same_tensor, read_memory_mib, read_tensors
from tests.helpers.sharded import unshard
from tests.helpers.tasks import FEATURES, Saving, bare_trainer, loader, quiet_trainer

STRATEGIES = {
    "single": (1, lambda: "single"),
    "ddp-2": (2, lumen.DDP),
    "fsdp-2": (2, lumen.FSDP),
    "ddp-4": (4, lumen.DDP),
    "fsdp-4": (4, lumen.FSDP),
    "hybrid-4": (4, lambda: lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=2)),
}
SHARDED = ("fsdp-2", "fsdp-4", "hybrid-4")
OF_PROCESSES = ("ranks", "loggers", "sharded", "settings")  # keys of state.json that depend on the writer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)  # neither 2 nor 4 processes divide this number

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Everything(lumen.TaskModule):
    """Model with every kind of tensor: tied, frozen and uneven parameters; 16-bit, scalar and empty buffers."""

    def __init__(self, width=5):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(FEATURES, width), nn.ModuleList([Block(), Block()])
        self.again, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.again.weight = self.blocks[0].up.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("quarters", torch.randn(3, 5).bfloat16())
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("columns", torch.randn(4, 3).t())
        self.register_buffer("wide", torch.randn(2, 2, dtype=torch.complex128))

    def get_extra_state(self):
        return {"note": (1, 2), "kept": torch.arange(3)}

    def set_extra_state(self, state):
        assert is_same_tensor(state, self.get_extra_state())

    def training_step(self, batch):
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.last(self.again(x) + self.frozen.sum()), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.quarters.mul_(0.75)
        self.steps += 1
        return loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [each for each in trained if each.ndim == 2], "weight_decay": 0.1},
            {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


class Averages(lumen.Callback):
    """Averages of the parameters by name, with nested newest values, and one gathered average.

    The tensors in a list have no parameter name. The sizes are under the parameters' names, but are not tensors of
    their kind.
    """

    def __init__(self):
        of_a_layer = [torch.zeros(1, 7), torch.zeros(1)]  # their shapes equal the shapes of `last` by chance
        self.state = {"average": {}, "newest": {}, "listed": [], "gathered": {}, "sizes": {}, "chance": of_a_layer}

    def on_step_end(self, trainer, task):
        named = {name: parameter.detach() for name, parameter in task.named_parameters()}
        for name, parameter in named.items():
            self.state["average"].setdefault(name, parameter.clone()).lerp_(parameter, 0.25)
        self.state["newest"] = {name: {"value": parameter.clone()} for name, parameter in named.items()}
        self.state["listed"] = [parameter.clone() for parameter in named.values()]
        self.state["sizes"] = {name: torch.full((1, 1, 2), parameter.numel()) for name, parameter in named.items()}
        weight = named["first.weight"]
        self.state["gathered"] = {"first.weight": weight.full_tensor() if isinstance(weight, DTensor) else weight}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class SaveAtOnce(lumen.Callback):
    """Callback that saves the loaded state and records how the tensors are sharded."""

    def __init__(self, path):
        self.path = path

    def on_fit_start(self, trainer, task):
        trainer.save_checkpoint(self.path)
        self.kinds = {name: is_sharded_state(part) for name, part in trainer.callbacks[0].state.items()}
        self.parts = [
            (parameter, entry)
            for parameter, entries in trainer.run.optim.optimizer.state.items()
            for key, entry in entries.items()
            if key != "step"
        ]


def is_sharded_state(tensors):
    """Return True if the tensors are sharded; all of them must be, or none."""
    (kind,) = {isinstance(each, DTensor) for each in iterate_tensors(tensors)}
    return kind


def train(folder, strategy, callbacks, **options):
    """Train with two savers besides the callbacks; overflows of micro-batches in fp16 change the loss scale."""
    savers = [
        lumen.ModelCheckpoint(every_n_train_steps=2, at_end=False, keep_last=1),
        lumen.ModelCheckpoint(monitor="loss_epoch", dirpath=folder / "best", at_end=False),
    ]
    trainer = quiet_trainer(
        folder, strategy=STRATEGIES[strategy][1](), precision="fp16", global_batch_size=8, logger=False,
        callbacks=[Averages(), *callbacks, *savers], **options,
    )  # fmt: skip
    trainer.fit(Everything(), loader(40))
    return trainer


def write(root, name):
    """Save in the second epoch, after both savers have acted."""
    train(root / f"run-{name}", name, [Saving(5, root / name)], max_steps=5)


def read(root, written, name):
    """Load a checkpoint, save the loaded state, and train one more step. Return how the tensors were sharded."""
    copied = SaveAtOnce(root / f"{written}-as-{name}")
    trainer = train(root / f"{written}-as-{name}-run", name, [copied], resume=root / written, max_steps=6)
    assert trainer.global_step == 6
    for parameter, entry in copied.parts:
        assert isinstance(parameter, DTensor) == isinstance(entry, DTensor) == (name in SHARDED)
        if name in SHARDED:
            assert (entry.placements, entry.device_mesh) == (parameter.placements, parameter.device_mesh)
            assert entry.to_local().shape == parameter.to_local().shape
    return copied.kinds


def write_all(root, names):
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")  # fp16 has skipped a first step
    for name in names:
        write(root, name)


def read_all(root, pairs):
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    return [read(root, *pair) for pair in pairs]


def run_jobs(group, function, root, jobs, world_of):
    """Run each job in a group of its number of processes. Return the results of rank 0."""
    answers = {}
    for world in (1, 2, 4):
        mine = [job for job in jobs if world_of(job) == world]
        if not mine:
            continue
        told = function(root, mine) if world == 1 else group(world).run(function, root, mine)[0]
        answers |= dict(zip(mine, told or mine, strict=True))
    return answers


def read_contents(path):
    """Return every tensor, and every part of the state that does not depend on the writer."""
    checkpoint = Checkpoint.open(path)
    tensors = read_tensors(path, "model", "optimizer", "extra")
    tensors = {key: each for key, each in tensors.items() if not key[1].startswith("ranks")}
    state = {name: part for name, part in checkpoint.state.items() if name not in OF_PROCESSES}
    state["callbacks"] = {key: part for key, part in state["callbacks"].items() if part}
    return tensors, state, checkpoint.aliases


def assert_same(one, other):
    for ours, theirs in zip(read_contents(one), read_contents(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not is_same_tensor(ours[name], theirs[name])] == []


def check(group, root, written, pairs):
    run_jobs(group, write_all, root, written, lambda name: STRATEGIES[name][0])
    kinds = run_jobs(group, read_all, root, pairs, lambda pair: STRATEGIES[pair[1]][0])
    for source, reader in pairs:
        assert_same(root / source, root / f"{source}-as-{reader}")
        cut_up, kept = reader in SHARDED, reader in SHARDED and source in SHARDED
        expected = {
            "average": cut_up, "newest": cut_up, "listed": kept, "gathered": cut_up and not kept, "sizes": False,
            "chance": False,
        }  # fmt: skip
        assert kinds[source, reader] == expected


def test_unusual_parameters_resume_under_other_strategies(group, tmp_path):
    """Tied, frozen, unevenly sharded and empty parameters."""
    pairs = [("single", "fsdp-2"), ("ddp-2", "fsdp-2"), ("fsdp-2", "fsdp-2"), ("fsdp-2", "single")]
    check(group, tmp_path, ["single", "ddp-2", "fsdp-2"], pairs)
    tensors, state, aliases = read_contents(tmp_path / "fsdp-2")
    assert aliases == {"again.weight": "blocks.0.up.weight"}
    assert sum(section == "optimizer" for section, _ in tensors) == 3 * 13
    assert "frozen" not in state["optimizer"]["state"]
    assert {"scale", "_growth_tracker"} < state["precision"].keys()
    scores = [part["scores"] for key, part in state["callbacks"].items() if key.startswith("ModelCheckpoint")]
    assert [len(each) for each in scores] == [1]
    assert (state["progress"]["step"], state["progress"]["epoch"], state["progress"]["batches"]) == (5, 1, 1)


@pytest.mark.slow
@pytest.mark.time_limit(400)
def test_any_strategy_reads_any(group, tmp_path):
    check(group, tmp_path, [*STRATEGIES], [(source, reader) for source in STRATEGIES for reader in STRATEGIES])


class Averaging(lumen.Callback):
    """Torch's own average of a module, whose tensors are sharded like the module's."""

    averaged, saved = None, None

    def on_fit_start(self, trainer, task):
        self.averaged = AveragedModel(task.first)
        if self.saved is not None:
            self.averaged.load_state_dict(self.saved)
        self.begun_with = [unshard(each).tolist() for each in self.averaged.state_dict().values()]

    def on_step_end(self, trainer, task):
        self.averaged.update_parameters(task.first)

    def state_dict(self):
        return {} if self.averaged is None else dict(self.averaged.state_dict())

    def load_state_dict(self, state):
        self.saved = state


def average(folder, strategy, resume, max_steps, save):
    """Return the values of an average at its beginning and at its end."""
    averaging = Averaging()
    options = {"strategy": strategy, "resume": resume, "max_steps": max_steps}
    bare_trainer(folder, callbacks=[averaging, Saving(max_steps, save)], **options).fit(Everything(), loader())
    return averaging.begun_with, [unshard(each).tolist() for each in averaging.averaged.state_dict().values()]


def test_an_averaged_model_goes_on_where_it_was(group, tmp_path):
    _, ended = group(2).run(average, tmp_path, "fsdp", None, 3, tmp_path / "step-3")[0]
    begun, ended_by_two = group(2).run(average, tmp_path, "fsdp", tmp_path / "step-3", 4, tmp_path / "step-4")[0]
    assert begun == ended != ended_by_two
    assert ended[0] == 3  # the number of averaged models
    begun, _ = average(tmp_path, "single", tmp_path / "step-4", 5, tmp_path / "step-5")
    assert begun == ended_by_two


# ---------------------------------------------------------------------- memory and bytes read


class Large(lumen.TaskModule):
    """Task with one parameter of 32 MiB, small ones, and no buffers."""

    def __init__(self, rows=4096):
        super().__init__()
        self.table, self.head = nn.Parameter(torch.zeros(rows, 2048)), nn.Linear(FEATURES, 2)

    def training_step(self, batch):
        return self.head(batch[0]).mean() + self.table[0].mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


MIB, TABLE_MIB = 2**20, 32


class Newest(lumen.Callback):
    """Callback with the trained parameters by name."""

    def __init__(self):
        self.values = {}

    def on_step_end(self, trainer, task):
        self.values = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = state


class Watch(lumen.Callback):
    """Callback that measures the memory of loading beyond the parameters, which exist before."""

    def begin(self, *args):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        self.held, self.read = read_memory_mib("VmRSS"), count_read_bytes()
        load_model_and_data(*args)

    def on_fit_start(self, trainer, task):
        self.held, self.read = read_memory_mib("VmHWM") - self.held, count_read_bytes() - self.read


def save_large(folder, strategy, rows=4096):
    path = folder / f"large-{strategy}"
    callbacks = [Newest(), Saving(1, path)]
    bare_trainer(folder, strategy=strategy, max_steps=1, callbacks=callbacks).fit(Large(rows), loader(8))
    return path


def load_large(folder, path):
    watch = Watch()
    with mock.patch("lumen.trainer.prepare.load_model_and_data", watch.begin):
        options = {"strategy": "fsdp", "max_steps": 2, "resume": path, "callbacks": [Newest(), watch]}
        bare_trainer(folder, **options).fit(Large(), loader(8))
    return watch.held, watch.read


@pytest.mark.parametrize("written_by", ["single", "fsdp"])
def test_ranks_read_and_hold_only_their_shard(group, tmp_path, written_by):
    save = partial(save_large, tmp_path, written_by)
    path = save() if written_by == "single" else group(2).run(save_large, tmp_path, written_by)[0]
    group(2).run(load_large, tmp_path, path)  # imported or allocated once
    for held, read in group(2).run(load_large, tmp_path, path):
        print(f"{held:.1f} MiB held, {read / MIB:.1f} MiB read")
        assert 2 * TABLE_MIB < read / MIB < 2 * TABLE_MIB + 1  # half of the parameter, copy and each moment
        assert held < 1.5 * TABLE_MIB + 6  # all except the parameter; reading itself takes nothing


# ---------------------------------------------------------------------- equal behaviour of all ranks


def open_together(path):
    """Return the files that this rank has hashed to verify a checkpoint."""
    processes = Processes.find()
    processes.connect(torch.device("cpu"))
    with mock.patch.object(manifest, "compute_sha256", wraps=manifest.compute_sha256) as hashing:
        Checkpoint.open(path, processes=processes)
    return [call.args[0].relative_to(path).as_posix() for call in hashing.call_args_list]


def test_every_byte_is_hashed_once_by_all_together(group, tmp_path):
    group(2).run(write_all, tmp_path, ["fsdp-2"])
    hashed = group(2).run(open_together, tmp_path / "fsdp-2")
    files = [path.relative_to(tmp_path / "fsdp-2").as_posix() for path in (tmp_path / "fsdp-2").rglob("*.*")]
    assert sorted(chain(*hashed)) == sorted(set(files) - {"manifest.json"})
    assert all(len(each) >= 3 for each in hashed)


class Changing(lumen.Callback):
    """Callback that changes something on rank 1 after the checkpoint was verified and before it is read."""

    def __init__(self, change):
        self.change = change

    def setup(self, trainer, task, stage):
        trainer.strategy.barrier()
        if trainer.global_rank == 1:
            self.change()
        trainer.strategy.barrier()


class Stumbling(lumen.Callback):
    """Callback that cannot load its state on rank 1."""

    def state_dict(self):
        return {"saved": True}

    def load_state_dict(self, state):
        if torch.distributed.get_rank() == 1:
            raise Mine("not on this rank")


class Mine(ValueError):
    pass


def catch_load_error(folder, path, task, callbacks=(), kind=LumenError, **options):
    trainer = bare_trainer(folder, max_steps=9, resume=path, callbacks=[*callbacks], **options)
    with pytest.raises(kind) as caught:
        trainer.fit(task, loader())
    return type(caught.value).__name__, str(caught.value)


def remove_before_read(folder, path, file, strategy):
    return catch_load_error(folder, path, Large(4), [Changing((path / file).unlink)], strategy=strategy)


@pytest.mark.parametrize("section", ["model", "optimizer"])
def test_file_removed_before_reading_raises_on_all_ranks(group, tmp_path, section):
    path = group(2).run(save_large, tmp_path, "fsdp", 4)[0]
    file = f"{section}/00001-00000.safetensors"  # only rank 1 reads the state of the model
    first, second = group(2).run(remove_before_read, tmp_path, path, file, "fsdp")
    assert first == second
    assert (first[0], file in first[1]) == ("CheckpointDamaged", True)


def stumble(folder, path):
    return catch_load_error(folder, path, Everything(), [Stumbling()], Exception, strategy="ddp")


def test_load_error_on_one_rank_ends_all(group, tmp_path):
    path = tmp_path / "step-1"
    bare_trainer(tmp_path, max_steps=1, callbacks=[Stumbling(), Saving(1, path)]).fit(Everything(), loader())
    first, second = group(2).run(stumble, tmp_path, path)
    assert second == ("Mine", "not on this rank")
    assert first == ("ProcessLost", "rank 1 failed: Mine: not on this rank")


class Renamed(Everything):
    def __init__(self):
        super().__init__()
        self.other = self.last
        del self.last

    def training_step(self, batch):
        raise AssertionError("it never begins")


class Frozen(Everything):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)


MISMATCHES = [
    (lambda: Everything(width=6), {}, r"first\.bias: \(5,\) torch\.float32 saved, \(6,\) torch\.float32"),
    (Everything, {"precision": "fp64"}, r"Set the same precision"),
    (Renamed, {}, r"not in the checkpoint: other\.weight, other\.bias; only in .*: last\.bias, last\.weight"),
    (Frozen, {}, r"over \[4, 5\]; only in the checkpoint: blocks\.1\.down\.bias, blocks\.1\.down\."),
    (Everything, {"precision": "bf16-true", "resume_parts": ["optimizer"]}, r"first\.weight: .*32 saved, .*bfloat16"),
    (lambda: Everything(width=6), {"resume_parts": ["optimizer"]}, r"first\.weight: \(5, 6\) .*saved, \(6, 6\)"),
]


def refuse_mismatches(folder, path, strategy):
    messages = []
    for task, options, message in MISMATCHES:
        kind, found = catch_load_error(folder, path, task(), strategy=strategy, **options)
        assert (kind, re.search(message, found) is not None) == ("CheckpointMismatch", True), found
        messages.append(found)
    return messages


def test_mismatches_raise_equally_on_all_ranks(group, tmp_path):
    """No value is cast to another dtype."""
    group(2).run(write_all, tmp_path, ["fsdp-2"])
    first, second = group(2).run(refuse_mismatches, tmp_path, tmp_path / "fsdp-2", "fsdp")
    assert first == second == refuse_mismatches(tmp_path, tmp_path / "fsdp-2", "single")
