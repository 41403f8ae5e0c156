"""`lumen export`: standard tools load its files, and a refused export writes nothing."""

import json
import math
import os
import resource
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lumen
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.cli import main
from tests.helpers.checkpoints import FILES, REGIONS, is_same_tensor, make_tensor, save, save_small, write_chunked
from tests.helpers.export import STEPS, Net, Task, export, fit
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Average(lumen.Callback):
    """Callback like a user's: averages of the parameters, by name."""

    def __init__(self):
        self.values = {}

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        for name, parameter in task.net.named_parameters(prefix="net"):
            before = self.values.get(name, parameter.detach())
            self.values[name] = before.lerp(parameter.detach(), 0.3)

    def state_dict(self):
        return {"values": dict(self.values), "updates": 3}


class Trailing(Average):
    """Callback with two averages."""

    def state_dict(self):
        return {"slow": dict(self.values), "fast": dict(self.values)}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def export_tensors(*words):
    """Return the tensors in the file that an export of the run writes."""
    export("runs/run", "--output", "weights.safetensors", *words)
    found = load_file("weights.safetensors")
    Path("weights.safetensors").unlink()
    return found


@pytest.fixture
def catch_error(capsys):
    """Export in a way that must fail without leaving a file; return the message."""

    def run(*words, code):
        before = sorted(Path().rglob("*"))
        capsys.readouterr()
        assert main(["export", *map(str, words)]) == code
        out, message = capsys.readouterr()
        assert out == ""
        assert message.count("error: ") == 1
        assert sorted(Path().rglob("*")) == before
        return message.partition("error: ")[2]

    return run


# ---------------------------------------------------------------------- contents


def test_export_loads_into_plain_module_with_same_outputs():
    task = fit()
    plain = Task().eval()
    plain.load_state_dict(export_tensors(), strict=True)
    net = Net().eval()
    net.load_state_dict(export_tensors("--module", "net"), strict=True)
    inputs = torch.randn(5, 6)
    expected = task.net.eval()(inputs)
    assert torch.equal(plain.net(inputs), expected)
    assert torch.equal(net(inputs), expected)
    assert not torch.equal(Net().eval()(inputs), expected)


def test_export_keeps_names_dtypes_and_bits():
    state = fit().state_dict()
    found = export_tensors()
    assert sorted(found) == sorted(state)
    assert all(is_same_tensor(found[name], state[name]) for name in state)
    assert found["net.again.weight"].data_ptr() != found["net.first.weight"].data_ptr()


def test_last_best_or_any_checkpoint_is_exported():
    fit()
    by_step = {}
    for step in STEPS:
        export(f"runs/run/checkpoints/{step}", "--output", f"{step}.safetensors")
        by_step[step] = load_file(f"{step}.safetensors")["net.scale"]
    assert len({float(value) for value in by_step.values()}) == 3
    assert export_tensors()["net.scale"] == by_step[STEPS[2]]
    assert export_tensors("--which", "last")["net.scale"] == by_step[STEPS[2]]
    assert export_tensors("--which", "best")["net.scale"] == by_step[STEPS[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_floating_point_tensors_are_cast(dtype, capsys):
    state = fit().state_dict()
    found = export_tensors("--dtype", str(dtype).removeprefix("torch."))
    integers = {name for name, tensor in state.items() if not tensor.is_floating_point()}
    assert integers == {
        "net.norm.num_batches_tracked",
        "averaged.n_averaged",
        "averaged.module.norm.num_batches_tracked",
    }
    for name, tensor in state.items():
        assert is_same_tensor(found[name], tensor if name in integers else tensor.to(dtype)), name
    assert "3 tensors without floating-point numbers are as saved" in capsys.readouterr().out


def test_numbers_that_a_dtype_cannot_hold_are_reported(capsys):
    save(Path("step-1"), model={"large": torch.tensor([1.0, -1e5, 1e6, torch.inf]), "fine": torch.ones(3)})
    export("step-1", "--output", "half.safetensors", "--dtype", "float16")
    said = capsys.readouterr().err
    assert "large: 2 numbers are too large for torch.float16 and became infinite" in said
    assert "fine" not in said
    export("step-1", "--output", "brain.safetensors", "--dtype", "bfloat16")
    assert capsys.readouterr().err == ""


def test_every_dtype_that_safetensors_has_arrives(catch_error):
    kinds = [torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16, torch.int8]
    values = {f"{number}": make_tensor(kind, shape) for number, kind in enumerate(kinds) for shape in [(2, 3)]}
    save(Path("step-1"), model={**values, "empty": torch.ones(0, 2), "scalar": torch.tensor(3.0)})
    export("step-1", "--output", "all.safetensors")
    found = load_file("all.safetensors")
    assert all(is_same_tensor(found[name], tensor) for name, tensor in values.items())
    assert (found["empty"].shape, found["scalar"].item()) == ((0, 2), 3.0)
    save(Path("step-2"), model={"a.wide": torch.ones(2, dtype=torch.complex128), "b": torch.ones(1)})
    assert "a.wide is torch.complex128, which safetensors" in catch_error("step-2", "--output", "x.safetensors", code=1)


# bits of the mantissa, and the bias of the exponent
FLOAT8 = {
    torch.float8_e4m3fn: (3, 7), torch.float8_e4m3fnuz: (3, 8),
    torch.float8_e5m2: (2, 15), torch.float8_e5m2fnuz: (2, 16),
}  # fmt: skip


def decode_byte(byte, kind):
    """Return the value of a byte by the definition of the format."""
    if kind == torch.float8_e8m0fnu:
        return math.nan if byte == 255 else 2.0 ** (byte - 127)
    mantissa_bits, bias = FLOAT8[kind]
    sign, rest = (-1.0 if byte & 128 else 1.0), byte & 127
    exponent, mantissa = divmod(rest, 2**mantissa_bits)
    if "fnuz" in str(kind) and byte == 128:
        return math.nan
    if kind == torch.float8_e4m3fn and rest == 127:
        return math.nan
    if kind == torch.float8_e5m2 and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / 2**mantissa_bits
    return sign * (2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*FLOAT8, torch.float8_e8m0fnu])
def test_every_number_of_eight_bits_is_cast_rightly(kind, dtype, capsys):
    save(Path("step-1"), model={"w": torch.arange(256).to(torch.uint8).view(kind)})
    export("step-1", "--output", "cast.safetensors", "--dtype", str(dtype).removeprefix("torch."))
    exact = torch.tensor([decode_byte(byte, kind) for byte in range(256)], dtype=torch.float64)
    found = load_file("cast.safetensors")["w"]
    torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    lost = int((exact.isfinite() & ~exact.to(dtype).isfinite()).sum())
    assert bool(lost) == (kind == torch.float8_e8m0fnu and dtype == torch.float16)
    said = capsys.readouterr().err
    assert said == (f"warning: w: {lost} numbers are too large for {dtype} and became infinite\n" if lost else "")


def test_what_no_cast_concerns_is_as_saved():
    kinds = [torch.complex64, torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.uint64]
    values = {str(kind): make_tensor(kind, (2, 3)) for kind in kinds}
    save(Path("step-1"), model={**values, "w": torch.tensor([math.pi, math.nan])})
    export("step-1", "--output", "cast.safetensors", "--dtype", "bfloat16")
    found = load_file("cast.safetensors")
    assert found.pop("w").dtype == torch.bfloat16
    assert found.keys() == values.keys()
    assert all(is_same_tensor(found[name], tensor) for name, tensor in values.items())


def test_packed_dtypes_are_rejected(catch_error):
    save(Path("step-1"), model={"a.packed": make_tensor(torch.float4_e2m1fn_x2, (2, 3)), "b.w": torch.ones(2)})
    for words in ([], ["--dtype", "bfloat16"]):
        said = catch_error("step-1", "--output", "x.safetensors", *words, code=1)
        assert "a.packed is torch.float4_e2m1fn_x2, which safetensors files cannot store. Leave the tensor out" in said
    export("step-1", "--output", "x.safetensors", "--module", "b")


# ---------------------------------------------------------------------- averages


def test_lookaheads_slow_weights_stand_for_the_parameters(capsys):
    task = fit(k=4)  # the sixth step is between two exchanges
    slow = {name: task.optimizers().state[p].get("slow") for name, p in task.named_parameters() if p.requires_grad}
    found = export_tensors("--average", "Lookahead")
    trained = [name for name, value in slow.items() if value is not None]
    assert sorted(trained) == sorted(
        f"net.{each}" for each in ("first.weight", "first.bias", "norm.weight", "norm.bias", "scale")
    )
    for name in trained:
        assert is_same_tensor(found[name], slow[name]), name
        assert not torch.equal(found[name], task.get_parameter(name))
    assert is_same_tensor(found["net.again.weight"], slow["net.first.weight"])
    assert is_same_tensor(found["net.norm.running_mean"], task.net.norm.running_mean)
    assert f"{len(trained) + 1} tensors are averages of Lookahead" in capsys.readouterr().out


def test_a_callbacks_averages_stand_for_the_parameters():
    average = Average()
    task = fit(average)
    found = export_tensors("--average", "Average")
    assert all(is_same_tensor(found[name], value) for name, value in average.values.items())
    assert not torch.equal(found["net.scale"], task.net.scale)
    assert sorted(found) == sorted(task.state_dict())
    assert is_same_tensor(export_tensors()["net.scale"], task.net.scale.detach())


def test_averaged_module_is_exported():
    task = fit()
    net = Net()
    net.load_state_dict(export_tensors("--module", "averaged.module"), strict=True)
    assert torch.equal(net.scale, task.averaged.module.scale)
    assert not torch.equal(net.scale, task.net.scale)


def test_missing_or_ambiguous_average_is_named(catch_error):
    fit(Trailing())
    words = ["runs/run", "--output", "x.safetensors", "--average"]
    said = catch_error(*words, "Lookahead", code=2)
    assert "has no average of that name. Available: callbacks.Trailing.slow, callbacks.Trailing.fast." in said
    assert "has several averages of that name. Available: callbacks.Trailing.sl" in catch_error(
        *words, "Trailing", code=2
    )
    assert export_tensors("--average", "callbacks.Trailing.slow")
    export("runs/run", "--output", "plain.safetensors")
    said = catch_error("plain.safetensors", "--output", "x.safetensors", "--average", "Lookahead", code=2)
    assert "plain.safetensors is not a checkpoint of Lumen" in said


# ---------------------------------------------------------------------- the layout of model hubs


def read_as_hubs_do(folder):
    """Read a model like readers of a hub's layout: the index, and the files that it names."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as tensors:
            found[name] = tensors.get_tensor(name)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in found.values())}
    files = sorted(set(index["weight_map"].values()))
    assert sorted(path.name for path in folder.iterdir()) == [*files, "model.safetensors.index.json"]
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    return found, [sum(tensor.nbytes for tensor in load_file(folder / file).values()) for file in files]


def test_sharded_export_follows_the_hub_format():
    state = fit().state_dict()
    export("runs/run", "--output", "hub", "--max_shard_size", "200B")
    found, sizes = read_as_hubs_do(Path("hub"))
    assert sorted(found) == sorted(state)
    assert all(is_same_tensor(found[name], state[name]) for name in state)
    assert len(sizes) > 2
    assert max(sizes) <= 200


def test_tensor_larger_than_a_shard_has_one_file():
    save(Path("step-1"), model={"a": torch.ones(10), "b": torch.ones(500), "c": torch.ones(10), "d": torch.ones(15)})
    export("step-1", "--output", "hub", "--max_shard_size=0.1KB")
    assert read_as_hubs_do(Path("hub"))[1] == [40, 2000, 100]


def test_single_shard_is_one_file_without_index():
    state = fit().state_dict()
    for folder, words in ("hub", []), ("large", ["--max_shard_size", "5GB"]):
        export("runs/run", "--output", folder, *words)
        assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]
        assert sorted(load_file(f"{folder}/model.safetensors")) == sorted(state)


@pytest.mark.parametrize("size", ["80B", "1GiB"])
def test_lumen_reads_its_own_export(size):
    quiet_trainer(Path(), max_steps=3).fit(trained := Regression(), loader())
    export("runs/run", "--output", "hub", "--max_shard_size", size)
    task = Regression(lr=0.0, optimizer="SGD")
    quiet_trainer(Path(), max_steps=1, init_from="hub").fit(task, loader())
    for name, tensor in trained.state_dict().items():
        assert torch.equal(task.state_dict()[name], tensor), name
    export("hub", "--output", "again.safetensors")
    assert all(
        is_same_tensor(load_file("again.safetensors")[name], tensor) for name, tensor in trained.state_dict().items()
    )


# ---------------------------------------------------------------------- checkpoints of many processes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regions", REGIONS.values(), ids=REGIONS)
def test_tensors_in_several_chunks_are_consolidated(dtype, regions):
    tensor = write_chunked(Path("step-1"), dtype, (5, 3), regions)
    export("step-1", "--output", "whole.safetensors")
    found = load_file("whole.safetensors")
    assert is_same_tensor(found["w"], tensor)
    assert is_same_tensor(found["other"], torch.ones(2))


# ---------------------------------------------------------------------- other destinations


def test_checkpoints_in_an_object_store_are_exported(catch_error):
    for step in (1, 2):
        save_small(as_path_or_url(f"memory://exported/run/step-{step}"), value=float(step))
    for source in ("memory://exported/run", "memory://exported/run/step-2"):
        export(source, "--output", "x.safetensors")
        assert torch.equal(load_file("x.safetensors")["a"], torch.full((4, 4), 2.0))
        Path("x.safetensors").unlink()
    export("memory://exported/run", "--average", "last:2", "--output", "mean.safetensors")
    assert torch.equal(load_file("mean.safetensors")["a"], torch.full((4, 4), 1.5))
    memory = fsspec.filesystem("memory")
    memory.rm_file(memory.glob("/exported/run/step-2/model/00000-00000-*")[0])
    said = catch_error("memory://exported/run/step-2", "--output", "x.safetensors", code=1)
    assert "memory://exported/run/step-1 is valid." in said


def test_extra_state_is_reported_and_left_out(capsys):
    class Noting(Regression):
        def get_extra_state(self):
            return {"seen": 3}

        def set_extra_state(self, state):
            pass

    quiet_trainer(Path(), max_steps=1).fit(task := Noting(), loader())
    capsys.readouterr()
    export("runs/run/checkpoints/step-00000001", "--output", "all.safetensors")
    assert "the task: the value of get_extra_state is not a tensor and is left out" in capsys.readouterr().err
    export("runs/run", "--output", "net.safetensors", "--module", "net")
    assert capsys.readouterr().err == ""
    task.net.load_state_dict(load_file("net.safetensors"), strict=True)


# ---------------------------------------------------------------------- refused exports


def flip(path):
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("file", ["model/00000-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_damage_is_named_with_an_intact_checkpoint(catch_error, file, how):
    fit()
    path = Path("runs/run/checkpoints", STEPS[2])
    if how == "flipped":
        flip(path / file)
    elif how == "cut":
        os.truncate(path / file, (path / file).stat().st_size - 1)
    else:
        (path / file).unlink()
    said = catch_error(path, "--output", "x.safetensors", code=1)
    assert f"{path} is damaged, and nothing was written: " in said
    assert file in said
    assert f"runs/run/checkpoints/{STEPS[1]} is valid." in said


def test_newest_valid_checkpoint_is_exported_and_damage_named(capsys):
    fit()
    export(f"runs/run/checkpoints/{STEPS[1]}", "--output", "second.safetensors")
    flip(f"runs/run/checkpoints/{STEPS[2]}/model/00000-00000.safetensors")
    capsys.readouterr()
    export("runs/run", "--output", "run.safetensors")
    out, said = capsys.readouterr()
    assert f"{STEPS[2]} is damaged and is not used: " in said
    assert f"from runs/run/checkpoints/{STEPS[1]}" in out
    assert Path("run.safetensors").read_bytes() == Path("second.safetensors").read_bytes()


def test_where_nothing_is_whole_that_is_said(catch_error):
    fit()
    for step in STEPS:
        flip(f"runs/run/checkpoints/{step}/model/00000-00000.safetensors")
    assert "every checkpoint in runs/run/checkpoints is damaged" in catch_error("runs/run", "--output", "x", code=1)
    said = catch_error(f"runs/run/checkpoints/{STEPS[0]}", "--output", "x", code=1)
    assert "The directory has no other valid checkpoint." in said


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["nowhere"], "nowhere does not exist. Give a checkpoint, a run, or safetensors files.", 1),
        (["empty"], "no valid checkpoint found in empty.", 1),
        (["notes.txt"], "notes.txt is not a safetensors file", 1),
        (["model.ckpt"], "model.ckpt is a pickle", 2),
        (["step-1", "--which", "best"], "--which best: step-1 is not a run. Give the directory of a run.", 2),
        (["step-1", "--module", "c"], "--module c: step-1 has no such module.", 2),
        (["step-1", "--output", "x.pt"], "--output x.pt: export writes no pickles.", 2),
        (["step-1", "--output", "no/x"], "--output no/x: there is no directory no. Create the directory.", 2),
        (["step-1", "--output", "notes.txt/x"], "there is no directory notes.txt.", 2),
        (["step-1", "--output", "/proc/x"], "--output /proc/x: /proc is not writable: ", 2),
        (["step-1", "--output", "empty"], "--output empty: the output exists, and Lumen overwrites nothing.", 2),
        (["step-1", "--output", "dangling"], "--output dangling: the output exists, and Lumen overwrites nothing.", 2),
        (["step-1", "--max_shard_size", "1GB"], "--max_shard_size may make several files. Name a directory.", 2),
        (["step-1", "--max_shard_size", "large"], "expected a size such as 5GB or 500MB, found 'large'.", 2),
        (["step-1", "--max_shard_size", "0GB"], "expected a size such as 5GB or 500MB, found '0GB'.", 2),
        (["step-1", "--dtype", "int8"], "invalid choice: 'int8' (choose from ", 2),
        (["step-1", "--outptu", "x"], "lumen export has no option --outptu. Did you mean --output?", 2),
        (["step-1", "--whhich=x"], "lumen export has no option --whhich. Did you mean --which?", 2),
        (["step-1", "step-2"], "step-2 does not exist. Give a checkpoint, a run, or safetensors files.", 1),
        (["step-1", "step-1", "--average", "EMA"], "--average EMA: expected one source, found 2.", 2),
        (["step-1", "step-1", "--which", "best"], "--which best: expected one source.", 2),
        ([], "the following arguments are required: CHECKPOINT_OR_RUN. Usage: lumen export", 2),
    ],
)
def test_failed_export_is_one_error_and_leaves_nothing(catch_error, words, message, code):
    save_small(Path("step-1"))
    Path("empty").mkdir()
    Path("notes.txt").write_text("some notes")
    Path("model.ckpt").write_bytes(b"\x80")
    Path("dangling").symlink_to("nothing")
    words = words if "--output" in words else ["--output", "x.safetensors", *words]
    assert message in catch_error(*words, code=code)


def test_what_exists_is_never_overwritten(catch_error):
    save_small(Path("step-1"))
    for name in ("there.safetensors", "there"):
        export("step-1", "--output", name)
        before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
        assert f"--output {name}: the output exists" in catch_error("step-1", "--output", name, code=2)
        assert before == {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_best_without_monitor_explains_itself(catch_error):
    quiet_trainer(Path(), max_steps=2).fit(Regression(), loader())
    said = catch_error("runs/run", "--output", "x", "--which", "best", code=1)
    assert "no checkpoint is recorded as best, because no ModelCheckpoint that saves there has a monitor" in said


def test_only_what_is_exported_needs_to_be_whole(catch_error):
    save_small(Path("step-1"))
    flip(f"step-1/{FILES[4]}")
    export("step-1", "--output", "x.safetensors")
    assert FILES[4] in catch_error("step-1", "--output", "y.safetensors", "--average", "Lookahead", code=1)


# ---------------------------------------------------------------------- disks and memory


def test_failed_start_leaves_no_empty_directory(capsys):
    save_small(Path("step-1"))
    export("step-1", "--output", "hub")  # memory of the imports
    capsys.readouterr()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))  # no additional file
    try:
        code = main(["export", "step-1", "--output", "again"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert code == 2
    assert "--output again: . is not writable: Too many open files" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["hub", "step-1"]


def test_only_matching_leftovers_are_removed():
    save_small(Path("step-1"))
    Path("elsewhere").mkdir()
    Path("elsewhere/x.safetensors").write_text("theirs")
    Path("x.safetensors.tmp-00000001").write_text("a file")
    Path("x.safetensors.tmp-00000002").symlink_to("elsewhere")
    kept = [  # a directory with another name; with a file, directory or link that no export makes
        *("y.safetensors.tmp-0123abcd/y.safetensors", "x.safetensors.tmp-0123abcdef/x.safetensors"),
        *("ax.safetensors.tmp-0123abcd/x.safetensors", "x.safetensors.tmp-0123ABCD/x.safetensors"),
        *("x.safetensors.tmp-00000003/notes.txt", "x.safetensors.tmp-00000004/model.safetensors/notes.txt"),
    ]
    for name in kept:
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("theirs")
    Path("x.safetensors.tmp-00000005").mkdir()
    Path("x.safetensors.tmp-00000005/x.safetensors").symlink_to(Path("elsewhere/x.safetensors").absolute())
    Path("x.safetensors.tmp-00000007").mkdir()  # the lock of an export that has just begun
    before = sorted(Path().rglob("*"))
    Path("x.safetensors.tmp-00000006").mkdir()
    Path("x.safetensors.tmp-00000006/x.safetensors").write_text("half of one")
    export("step-1", "--output", "x.safetensors")
    assert sorted(Path().rglob("*")) == sorted([*before, Path("x.safetensors")])
