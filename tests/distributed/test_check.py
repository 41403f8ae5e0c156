"""`lumen check` in one process: the placement that several processes have, and their errors."""

import pytest

import lumen
from lumen.cli import main
from lumen.distributed.dtensor import get_local_tensor
from lumen.errors import LumenError
from tests.helpers.cli import write_config
from tests.helpers.faulty_trainings import check
from tests.helpers.planned import Planned, Tokens
from tests.helpers.tasks import bare_trainer

HERE = "tests.helpers.planned"


def write_settings(folder, strategy, devices, **model):
    name, options = strategy
    settings = {
        "seed_everything": 1,
        "model": {"class_path": f"{HERE}.Planned", "init_args": model},
        "data": {"class_path": f"{HERE}.Tokens"},
        "trainer": {
            "accelerator": "cpu", "max_epochs": 1, "devices": devices, "global_batch_size": 8,
            "default_root_dir": str(folder), "strategy": {"class_path": f"lumen.{name}", "init_args": options},
        },
    }  # fmt: skip
    return write_config(folder / "mine.yaml", settings)


def fit(folder, strategy, model):
    """Return shapes of all parameters and of the parts of this process, or the error, of a real run."""
    name, options = strategy
    task = Planned(**model)
    try:
        trainer = bare_trainer(folder, max_epochs=1, strategy=getattr(lumen, name)(**options), global_batch_size=8)
        trainer.fit(task, Tokens())
    except LumenError as error:
        return str(error)
    return {name: (tuple(each.shape), tuple(get_local_tensor(each).shape)) for name, each in task.named_parameters()}, (
        trainer.global_step
    )


def as_shape(text):
    return tuple(int(size) for size in text.split("x"))


STRATEGIES = {
    "tensor": (2, ("Mesh", {"tensor": 2}), {"tensor": 2}),
    "2x2": (4, ("Mesh", {"shard": 2, "tensor": 2}), {"tensor": 2, "shard": 2}),
    "fsdp": (2, ("FSDP", {"cpu_offload": True}), {"shard": 2}),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_check_shows_the_real_placement(group, tmp_path, capsys, case):
    devices, strategy, sizes = STRATEGIES[case]
    found = check(write_settings(tmp_path, strategy, devices), capsys)
    placed, steps = group(devices).run(fit, tmp_path, strategy, {})[0]
    assert found.facts["steps"] == steps
    shown = {each["name"]: each for each in found.facts["placement"]}
    assert list(shown) == list(dict.fromkeys(name.replace(".0.", ".*.").replace(".1.", ".*.") for name in placed))
    for name, (shape, part) in placed.items():
        row = shown[name.replace(".0.", ".*.").replace(".1.", ".*.")]
        assert (as_shape(row["shape"]), as_shape(row["part"]), row["dtype"]) == (shape, part, "float32")
        assert {*row["divided"]} <= {f"{name} {size}" for name, size in sizes.items()}
    qkv = shown["blocks.*.mix.qkv.weight"]["divided"]
    assert qkv == {f"{name} {size}": "dim 0" + " of each of 3" * (name == "tensor") for name, size in sizes.items()}


WRONG = {
    "plan": (("Mesh", {"tensor": 2}), {"typo": True}, "Did you mean blocks.*.mix.qkv or"),
    "sizes": (("Mesh", {"tensor": 2, "shard": 2}), {}, "but 2 processes run"),
    "argument": (("Mesh", {"tensor": 0}), {}, "tensor must be at least 1"),
    "class": (("FSDP", {"wrap": "Blok"}), {}, "no module of Planned is a Blok"),
    "optimizer": (("FSDP", {}), {"muon": True}, "lumen.optim.WholeMatrices(torch.optim.Muon(...))"),
}


@pytest.mark.parametrize("case", WRONG)
def test_check_reports_errors_of_several_processes(group, tmp_path, capsys, case):
    strategy, model, text = WRONG[case]
    found = check(write_settings(tmp_path, strategy, 2, **model), capsys)
    error = group(2).run(fit, tmp_path, strategy, model)[0]
    assert text in error
    # The check starts no processes, so it advises to set devices where these processes advise to start others.
    assert (found.code, found.err.splitlines()[-1]) == (
        2,
        f"error: {error}".replace("start 4 processes", "set devices: 4"),
    )


def test_check_merges_layers_in_80_columns(tmp_path, capsys):
    path = write_settings(tmp_path, ("Mesh", {"shard": 2, "tensor": 2}), 4, depth=30, heads=-1)
    assert main(["check", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if " dim " in line]
    assert len(rows) == 12
    assert " ".join(rows[1].split()) == "blocks.*.mix.qkv.weight float32 48x16 dim 0 of each of 3 dim 0 12x16"
