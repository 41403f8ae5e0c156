"""Checkpoints of several processes: each process writes its share, and a save is complete or leaves nothing."""

import ctypes
import errno
import os
import re
import resource
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchmetrics import CatMetric

import lumen
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.distributed.dtensor import is_sharded
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointError, NonFiniteLoss, ProcessLost
from tests.helpers.checkpoints import DTYPES, make_tensor, read_memory_mib, read_tensor_bytes, save_small
from tests.helpers.sharded import unshard
from tests.helpers.tasks import FEATURES, Regression, Saving, bare_trainer, loader

MIB = 1 << 20
LAYOUTS = {
    "copied": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)],
    "hybrid": [Replicate(), Shard(0)], "hybrid columns": [Replicate(), Shard(1)],
}  # fmt: skip


def connect_processes():
    processes = Processes.find()
    processes.connect(torch.device("cpu"))
    return processes


def place_tensor(tensor, layout):
    """Return the shard of a tensor in a `layout`: shards follow torch.chunk, so the last ones may be empty."""
    if layout == "plain":
        return tensor
    world = torch.distributed.get_world_size()
    shape = (2, world // 2) if layout.startswith("hybrid") else (world,)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape)
    cuts = [Replicate() if each.is_shard() and each.dim >= tensor.ndim else each for each in LAYOUTS[layout]]
    part = tensor
    for place, count, cut in zip(_meshes[shape].get_coordinate(), shape, cuts, strict=True):
        if cut.is_shard():
            size = -(-tensor.shape[cut.dim] // count)
            part = part[(slice(None),) * cut.dim + (slice(place * size, (place + 1) * size),)]
    return sharded(part, _meshes[shape], cuts, tensor.shape)


def sharded(part, mesh, cuts, shape):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, cuts, run_check=False, shape=shape, stride=stride)


_meshes = {}


def make_tensors():
    """Return tensors of every kind by name, equal on every process."""
    torch.manual_seed(0)
    found = {f"{dtype}": make_tensor(dtype, (5, 3)) for dtype in DTYPES}
    found |= {
        "scalar": torch.randn(()),
        "one": torch.randn(1),
        "none": torch.randn(0, 3),
        "columnless": torch.randn(3, 0),
    }
    found |= {
        "two rows": torch.randn(2, 7),
        "transposed": torch.randn(3, 9).T,
        "every second": torch.randn(9, 6)[::2, 1:4],
    }
    return found


def read_files_of(path, rank, section="*"):
    """Return the contents of the files of one process, by section and name."""
    found = {}
    for file in sorted(path.glob(f"{section}/{rank:05d}-*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {(file.parent.name, name): tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


# ---------------------------------------------------------------------- files of each process


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "plain"), (2, "copied"), (2, "rows"), (2, "columns"), (4, "rows"), (4, "hybrid"), (4, "hybrid columns")],
)
def test_every_tensor_layout_is_saved_once_and_exactly(group, tmp_path, world, layout):
    group(world).run(save_kinds, tmp_path / "step-1", layout)
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    expected = make_tensors()
    assert checkpoint.list_tensor_names("model") == list(expected)
    for name, tensor in expected.items():
        assert checkpoint.get_spec("model", name) == (tensor.dtype, tensor.shape)
        assert read_tensor_bytes(checkpoint.read_tensor("model", name)) == read_tensor_bytes(tensor), name
    assert checkpoint.aliases == {"tied": "one"}
    shares = [read_files_of(tmp_path / "step-1", rank) for rank in range(world)]
    total = nbytes(expected)
    assert sum(map(nbytes, shares)) == total

    def writers(name):
        return sum(("model", name) in share for share in shares)

    pieces = {"plain": 1, "copied": 1, "rows": min(world, 3)}.get(layout, 2)
    assert all(writers(name) == pieces for name in ("torch.float32", "torch.bfloat16", "transposed"))
    assert all(writers(name) == 1 for name in ("scalar", "none", "columnless"))
    assert writers("two rows") == min(pieces, 2)  # the other processes have none of it
    if layout in ("plain", "copied"):
        assert all(abs(nbytes(share) - total / world) < 100 for share in shares)
    if layout == "hybrid":
        assert abs(nbytes(shares[0]) + nbytes(shares[1]) - total / 2) < 100


def save_kinds(path, layout):
    tensors = {name: place_tensor(tensor, layout) for name, tensor in make_tensors().items()}
    write_checkpoint(path, {"model": tensors}, {}, aliases={"tied": "one"}, info={}, processes=connect_processes())


def test_each_rank_has_several_files_of_bounded_size(group, tmp_path):
    group(2).run(save_many, tmp_path / "step-1")
    files = sorted((tmp_path / "step-1" / "optimizer").iterdir())
    assert [file.name for file in files] == [f"{rank:05d}-{k:05d}.safetensors" for rank in (0, 1) for k in range(3)]
    for rank in (0, 1):
        share = read_files_of(tmp_path / "step-1", rank)
        assert {tensor.shape for tensor in share.values()} == {(8,)}
        assert len(share) == 6
    checkpoint = Checkpoint.open(tmp_path / "step-1")
    for k in range(6):
        assert torch.equal(checkpoint.read_tensor("optimizer", f"t{k}"), torch.arange(16.0) + k)


def save_many(path):
    tensors = {f"t{k}": place_tensor(torch.arange(16.0) + k, "rows") for k in range(6)}
    write_checkpoint(path, {"optimizer": tensors}, {}, info={}, max_file_bytes=64, processes=connect_processes())


class Mixed(Regression):
    """Task with unevenly sharded, tied and frozen parameters, buffers, averages, and metrics of each process."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.wide = nn.Linear(FEATURES, 33, bias=False)
        self.narrow = nn.Linear(FEATURES, 33, bias=False)
        self.narrow.weight = self.wide.weight
        self.frozen = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16), requires_grad=False)
        self.seen = CatMetric()

    def forward(self, inputs):
        inputs = self.norm(inputs)
        return super().forward(inputs) + (self.wide(inputs) * self.narrow(inputs)).mean(1, keepdim=True)

    def training_step(self, batch):
        self.seen.update(batch[1].detach())
        return super().training_step(batch)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["averages"] = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if self.trainer.global_rank:
            checkpoint["only here"] = torch.ones(3)


STRATEGIES = {
    "ddp": lambda: lumen.DDP(),
    "full_shard": lambda: lumen.FSDP(wrap="Linear"),
    "shard_grad_op": lambda: lumen.FSDP(wrap="Linear", sharding_strategy="shard_grad_op"),
    "no_shard": lambda: lumen.FSDP(sharding_strategy="no_shard"),
    "hybrid_shard": lambda: lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=2),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_save_their_part_of_run(group, tmp_path, strategy):
    world = 4 if strategy == "hybrid_shard" else 2
    told = group(world).run(train_and_save, tmp_path, strategy)
    path = tmp_path / "step-3"
    checkpoint = Checkpoint.open(path)
    for section in ("model", "optimizer"):
        for name in checkpoint.list_tensor_names(section):
            assert read_tensor_bytes(checkpoint.read_tensor(section, name)) == told[0][section, name], name
    assert checkpoint.aliases == {"narrow.weight": "wide.weight"}
    shares = [read_files_of(path, rank) for rank in range(world)]
    moving = [nbytes({key: tensor for key, tensor in s.items() if key[0] != "extra"}) for s in shares]
    specs = [
        checkpoint.get_spec(section, name)
        for section in ("model", "optimizer")
        for name in checkpoint.list_tensor_names(section)
    ]
    assert sum(moving) == sum(shape.numel() * dtype.itemsize for dtype, shape in specs)
    assert max(moving) < 1.25 * sum(moving) / world
    extra = [{name for section, name in share if section == "extra"} for share in shares]
    for rank, own in enumerate(extra):
        mine = {name for name in own if name.startswith("ranks[")}
        assert mine == {f"ranks[{rank}].torchmetrics.seen[1].value[{k}]" for k in range(3)}
        assert checkpoint.state["ranks"][rank]["torchmetrics"]["seen"]
        for k in range(3):
            assert (
                read_tensor_bytes(checkpoint.read_tensor("extra", f"ranks[{rank}].torchmetrics.seen[1].value[{k}]"))
                == told[rank][k]
            )
    holders = [any(name.startswith("task.averages.") for name in own) for own in extra]
    assert holders == [strategy != "ddp" or rank == 0 for rank in range(world)]
    assert not any("only here" in name for name in checkpoint.list_tensor_names("extra"))


def train_and_save(tmp_path, strategy):
    """Return the bytes of all unsharded tensors."""
    saving, told = Saving(3, tmp_path / "step-3"), {}

    def look(trainer, task):
        if trainer.global_step == 3:
            for name, tensor in task.state_dict().items():
                told["model", name] = read_tensor_bytes(unshard(tensor))
            for name, parameter in task.named_parameters():
                for key, tensor in trainer.optimizers[0].state.get(parameter, {}).items():
                    told["optimizer", f"{name}.{key}"] = read_tensor_bytes(unshard(tensor))
            told.update({k: read_tensor_bytes(value) for k, value in enumerate(task.seen.value)})

    looking = lumen.LambdaCallback(on_step_end=look)
    options = {"strategy": STRATEGIES[strategy](), "max_steps": 4, "callbacks": [looking, saving]}
    bare_trainer(tmp_path, **options).fit(Mixed(), loader(80, 4))
    return told


# ---------------------------------------------------------------------- costs


@pytest.mark.parametrize("layout", ["plain", "rows"])
def test_saving_holds_at_most_one_shard_more(group, tmp_path, layout):
    grown = group(2).run(save_large, tmp_path / "step-1", layout)
    assert max(grown) < (8 if layout == "plain" else 4) + 4  # the largest shard is copied because it is not contiguous


def save_large(path, layout):
    """Return the peak of a save in MiB beyond the tensors; each process also has tensors that the others lack."""
    ctypes.CDLL(None).mallopt(-3, 1_000_000)  # M_MMAP_THRESHOLD: freed memory is returned to the system
    processes = connect_processes()
    tensors = {f"t{k}": place_tensor(torch.ones(1024, 2048), layout) for k in range(8)}
    if layout == "plain":
        tensors = {name: tensor.T for name, tensor in tensors.items()}
    else:
        mesh = tensors["t0"].device_mesh
        parts = {name: tensor.to_local().T.contiguous().T for name, tensor in tensors.items()}
        tensors = {name: sharded(part, mesh, [Shard(0)], (1024, 2048)) for name, part in parts.items()}
    sections = {"model": tensors}
    sections["extra"] = {f"ranks[{processes.rank}].{k}": torch.ones(MIB) for k in range(16)}
    write_checkpoint(path.with_name("step-0"), {"model": {"w": torch.ones(3, 2).T}}, {}, info={}, processes=processes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    start = read_memory_mib("VmRSS")
    write_checkpoint(path, sections, {}, info={}, processes=processes)
    return read_memory_mib("VmHWM") - start


# ---------------------------------------------------------------------- errors


@contextmanager
def limit_file_size(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def removed(folder):
    """Remove the draft during the save, like another user."""
    fsync = os.fsync

    def removing(descriptor):
        fsync(descriptor)
        for temporary in folder.glob("*.tmp-*"):
            while temporary.exists():  # the other process may be writing into it or removing it too
                shutil.rmtree(temporary, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", removing)
        yield


@contextmanager
def refused(folder):
    """Make the system refuse writes, as for a user without permission; root has every permission."""

    def refusing(path, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", refusing)
        yield


HARMS = {
    "full": (limit_file_size, r"model/0000[01]-00000.safetensors: File too large"),
    "removed": (removed, r"step-2.*(removed while in use|it was removed)"),
    "refused": (refused, r"step-2.*: Permission denied. Give this user the right"),
}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("harm", HARMS)
def test_save_error_is_on_all_ranks_without_leftovers(group, tmp_path, harm, ranks):
    older = save_small(tmp_path / "step-1")
    messages = group(2).run(save_in_vain, tmp_path, harm, ranks)
    assert messages[0] == messages[1]
    assert re.search(HARMS[harm][1], messages[0]), messages[0]
    assert os.listdir(tmp_path) == ["step-1"]
    Checkpoint.open(older)


def save_in_vain(folder, harm, ranks):
    processes = connect_processes()
    tensors = {name: torch.ones(10_000) for name in "abcd"}
    harmed = HARMS[harm][0](folder) if processes.rank in ranks else nullcontext()
    with harmed, pytest.raises(CheckpointError) as caught:
        save(folder / "step-2", tensors, processes)
    save(folder / "step-3", tensors, processes)  # the collectives of the processes still match
    processes.barrier()
    if processes.rank == 0:
        Checkpoint.open(folder / "step-3")
        shutil.rmtree(folder / "step-3")
    return str(caught.value)


def save(path, tensors, processes, **options):
    write_checkpoint(path, {"model": tensors}, {}, processes=processes, **{"info": {}} | options)


OTHERS = {
    "sparse": ({"b": torch.eye(2).to_sparse()}, r"model/b: a Tensor of torch.float32, torch.sparse_coo"),
    "shape": (
        {"b": torch.ones(5)},
        r"model/b is torch\.float32 \[[45]\] on rank 0 and torch\.float32 \[[45]\] on rank 1\. Every",
    ),
    "dtype": ({"b": torch.ones(4).half()}, r"model/b is torch.float.* on rank 0 and torch.float.* on rank 1"),
    "one more": (
        {"more": torch.ones(2)},
        r"model/more is (missing on rank 0 and|.* on rank 0 and missing on rank 1)",
    ),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", OTHERS)
def test_unsupported_or_different_state_raises_before_saving(group, tmp_path, kind, rank):
    messages = group(2).run(save_other_tensors, tmp_path / "runs" / "step-1", kind, rank)
    assert messages[0] == messages[1]
    assert re.search(OTHERS[kind][1], messages[0]), messages[0]
    assert os.listdir(tmp_path) == []


def save_other_tensors(path, kind, rank):
    processes = connect_processes()
    tensors = {"a": torch.ones(3), "b": torch.ones(4)}
    if processes.rank == rank:
        tensors |= OTHERS[kind][0]
    return refused(path, tensors, processes)


def refused(path, tensors, processes):
    with pytest.raises(CheckpointError) as caught:
        save(path, tensors, processes)
    return str(caught.value)


def test_ranks_that_fail_differently_say_the_same(group, tmp_path):
    messages = group(2).run(save_different_ones, tmp_path / "step-1")
    assert messages[0] == messages[1]
    assert messages[0].startswith("model/a: a Tensor")


def save_different_ones(path):
    processes = connect_processes()
    tensors = {"a": torch.ones(3), "b": torch.ones(4)} | {"ab"[processes.rank]: torch.eye(2).to_sparse()}
    return refused(path, tensors, processes)


def test_differently_sharded_tensor_raises_before_saving(group, tmp_path):
    messages = group(2).run(save_with_a_gap, tmp_path / "step-1")
    assert messages[0] == messages[1]
    assert re.search(r"model/w is .*Shard\(dim=0\).* on rank 0 and .*Replicate.* on rank 1", messages[0])
    assert os.listdir(tmp_path) == []


def save_with_a_gap(path):
    """Save while the process with the second half takes it for a copy of the unsharded tensor."""
    processes = connect_processes()
    tensors = {"w": place_tensor(torch.arange(8.0).reshape(4, 2), "copied" if processes.rank else "rows")}
    with pytest.raises(CheckpointError) as caught:
        save(path, tensors, processes)
    return str(caught.value)


def test_freed_tensor_on_one_rank_ends_all(group, tmp_path):
    first, second = group(2).run(save_freed_memory, tmp_path / "step-1")
    assert first == ("ProcessLost", second[1])
    assert "rank 1 failed: RuntimeError" in first[1]
    assert os.listdir(tmp_path) == []


def save_freed_memory(path):
    processes = connect_processes()
    tensors = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    if processes.rank == 1:
        for tensor in tensors.values():
            tensor.untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ProcessLost)) as caught:
        save(path, tensors, processes)
    told = f"rank 1 failed: RuntimeError: {caught.value}" if processes.rank else str(caught.value)
    return type(caught.value).__name__, told


def test_error_known_to_rank_0_raises_on_all(group, tmp_path):
    save_small(tmp_path / "step-1")
    for messages in group(2).run(save_badly, tmp_path):
        assert "never overwrites" in messages[0]
        assert "info.x: an object of type object cannot be saved" in messages[1]
    assert os.listdir(tmp_path) == ["step-1"]


def save_badly(folder):
    processes = connect_processes()
    messages = []
    for name, options in (("1", {}), ("2", {"info": {"x": object()}})):
        with pytest.raises(CheckpointError) as caught:
            save(folder / f"step-{name}", {"a": torch.ones(2)}, processes, **options)
        messages.append(str(caught.value))
    return messages


def test_non_finite_parameters_on_one_rank_prevent_saving(group, tmp_path):
    for strategy in ("ddp", "full_shard"):
        messages = group(2).run(save_nan, tmp_path, strategy)
        assert messages[0] == messages[1]
        assert "after step 2 2 parameters are not finite" in messages[0]
        assert ": net.0.weight, net.3.bias." in messages[0]
    assert not list(tmp_path.rglob("step-*"))


def save_nan(tmp_path, strategy):
    """Save NaN on the process that holds the last row, or on both."""

    def harm(trainer, task):
        if trainer.global_step == 2:
            for parameter in (task.net[0].weight, task.net[3].bias):
                local = parameter.detach()
                local = local.to_local() if isinstance(local, DTensor) else local
                if local.numel() and (strategy == "ddp" or trainer.global_rank == 1 or parameter.numel() == 1):
                    local[-1] = torch.nan
            with pytest.raises(NonFiniteLoss) as caught:
                trainer.save_checkpoint(tmp_path / "step-2")
            messages.append(str(caught.value))

    messages = []
    options = {"strategy": STRATEGIES[strategy](), "max_steps": 2}
    bare_trainer(tmp_path, callbacks=lumen.LambdaCallback(on_step_end=harm), **options).fit(Regression(), loader())
    return messages[0]


# ---------------------------------------------------------------------- values that differ between ranks


class Counting(lumen.TaskModule):
    """Task of which every process writes different values into a tensor that no optimizer moves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, 1)
        for name in ("codes", "counts", "more"):
            setattr(self, name, nn.Parameter(torch.zeros(8), requires_grad=False))

    def training_step(self, batch):
        with torch.no_grad():
            for parameter in (self.codes, self.counts, self.more):
                parameter.fill_(10 + self.trainer.global_rank)
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def test_untrained_state_equals_single_process(group, tmp_path):
    group(2).run(train_counting, tmp_path)
    checkpoint = Checkpoint.open(tmp_path / "step-2")
    for name in ("codes", "counts", "more"):
        assert checkpoint.read_tensor("model", name).tolist() == [10.0] * 8


def train_counting(folder):
    bare_trainer(folder, strategy="ddp", max_steps=2, callbacks=Saving(2, folder / "step-2")).fit(Counting(), loader())


class Keeping(torch.optim.Optimizer):
    """SGD with one more state for each parameter, which `make` returns."""

    def __init__(self, parameters, make):
        super().__init__(parameters, {"lr": 0.01})
        self.make = make

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["kept"] = self.make(parameter)
            state["kept"] = state["kept"] + self.make(parameter.grad)  # torch 2.15 needs a new tensor for a new layout
            change = 0.01 * (parameter.grad + self.reach(state["kept"], parameter))
            parameter -= change.redistribute(placements=parameter.placements) if is_sharded(change) else change

    def reach(self, kept, parameter):
        if self.make is ring or isinstance(parameter, DTensor) != isinstance(kept, DTensor):
            return 0.0  # a plain shard does not fit
        return 1e-3 * (kept if kept.ndim == parameter.ndim else kept.unsqueeze(-1))


class Kept(Regression):
    make = None

    def configure_optimizers(self):
        return Keeping([parameter for parameter in self.parameters() if parameter.ndim == 2], self.make)


def keeping(make):
    task = Kept()
    task.make = make
    return task


def get_local_part(tensor):
    return tensor.detach().to_local().clone()


def mean_of_rows(tensor):
    return tensor.detach().square().mean(-1)


def mean_of_columns(tensor):
    kept = tensor.detach().new_zeros(1, tensor.shape[1])
    return kept.add_(tensor.detach().square().mean(0))


def test_an_optimizer_that_keeps_bare_parts_is_refused(group, tmp_path):
    messages = group(2).run(train_keeping, tmp_path, get_local_part)
    assert messages[0] == messages[1]
    assert "Keeping keeps 'kept' of net.0.weight as a plain tensor with this process's shard" in messages[0]
    assert not list(tmp_path.rglob("step-*"))


def train_keeping(folder, make):
    options = {"strategy": "fsdp", "max_steps": 2, "callbacks": Saving(2, folder / "step-2")}
    with pytest.raises(CheckpointError) as caught:
        bare_trainer(folder, **options).fit(keeping(make), loader())
    return str(caught.value)


def ring(tensor):
    return torch.ones(16, dtype=tensor.dtype)  # as long as a parameter by chance


@pytest.mark.parametrize("make", [mean_of_rows, mean_of_columns, ring])
@pytest.mark.parametrize("written_by", ["single", "fsdp"])
def test_row_and_column_state_is_sharded_like_parameter(group, tmp_path, written_by, make):
    if written_by == "single":
        train_keeping_on("single", make, 2, save=tmp_path)
    for (straight, lies), (resumed, lies_again) in group(2).run(resume_keeping, tmp_path, written_by, make):
        torch.testing.assert_close(resumed, straight, rtol=0.0 if written_by == "fsdp" else 1e-12, atol=0.0)
        assert lies_again == lies


def train_keeping_on(strategy, make, max_steps, *, save=None, resume=None):
    task, folder = keeping(make).double(), save or resume.parent
    trainer = bare_trainer(
        folder, strategy=strategy, max_steps=max_steps, resume=resume, global_batch_size=8,
        callbacks=Saving(2, save / "step-2") if save else [],
    )  # fmt: skip
    trainer.fit(task, loader(dtype=torch.float64))
    values = [unshard(parameter.detach()) for parameter in task.parameters()]
    return values, [getattr(entry["kept"], "placements", None) for entry in trainer.run.optim.optimizer.state.values()]


def resume_keeping(folder, written_by, make):
    save = folder if written_by == "fsdp" else folder / "another"
    straight = train_keeping_on("fsdp", make, 4, save=save)
    return straight, train_keeping_on("fsdp", make, 4, resume=folder / "step-2")


def test_other_error_on_one_rank_outranks_damage(group):
    first, second = group(2).run(fail_differently)
    assert first == "RuntimeError"
    assert second == "ProcessLost"


def fail_differently():
    processes = connect_processes()

    def fail():
        raise [RuntimeError("of torch"), CheckpointDamaged("a file")][processes.rank]

    with pytest.raises(Exception, match="of torch") as caught:
        processes.run_on_all(fail)
    return caught.type.__name__
