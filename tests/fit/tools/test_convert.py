"""`lumen convert`: turns pickles into safetensors with a reader that executes none of their code."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import lumen
from lumen.cli import main
from lumen.tools.convert import unpickle
from tests.helpers.tasks import Regression, loader, quiet_trainer

pytestmark = pytest.mark.usefixtures("empty_directory")


@pytest.fixture
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def convert(*words, code=0):
    assert main(["convert", *map(str, words)]) == code
    return load_file("out.safetensors") if code == 0 else None


def catch_error(capsys, *words, code=2):
    capsys.readouterr()
    convert(*words, code=code)
    assert [path for path in Path().iterdir() if ".tmp-" in path.name] == []
    return capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


def write_lightning_checkpoint(task, **more):
    """Write a checkpoint like Lightning 2."""
    optimizer = torch.optim.AdamW(task.parameters())
    task(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.6.0", "state_dict": task.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": None}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [],
        "hparams_name": "kwargs", "hyper_parameters": {"width": 4, "lr": 0.1, "layers": (1, 2)}, **more,
    }  # fmt: skip


TWO = {"ema": nn.Linear(2, 2).state_dict(), "model": nn.Linear(2, 2).state_dict()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.model.eval()(x)


@pytest.mark.slow
def test_lightning_checkpoint_yields_tensors_and_hyperparameters(capsys):
    net = Net()
    torch.save(write_lightning_checkpoint(net), "last.ckpt")
    tensors = convert("last.ckpt", "out.safetensors")
    assert tensors.keys() == net.state_dict().keys()
    assert all(torch.equal(tensors[name], value) for name, value in net.state_dict().items())
    out, said = capsys.readouterr()
    assert yaml.safe_load(out) == {"width": 4, "lr": 0.1, "layers": [1, 2]}
    size = sum(value.nbytes for value in net.state_dict().values())
    assert said == f"out.safetensors: 9 tensors (8 float32, 1 int64), {size} B, from last.ckpt, state_dict\n"


@pytest.mark.slow
def test_module_and_rename_select_and_rename_tensors():
    net = Net()
    torch.save(write_lightning_checkpoint(net), "last.ckpt")
    tensors = convert("last.ckpt", "out.safetensors", "--module", "model", "--rename", r"^0\.=first.")
    assert set(tensors) == {name.replace("0.", "first.", 1) for name in net.model.state_dict()}
    assert torch.equal(tensors["first.weight"], net.model[0].weight)


@pytest.mark.slow
def test_a_run_starts_from_a_ddp_checkpoint(tmp_path, capsys):
    old = Regression()
    torch.save({f"module.{name}": value for name, value in old.state_dict().items()}, "ddp.pt")
    convert("ddp.pt", "out.safetensors")
    assert "such as module.net.0.weight -> net.0.weight\n" in capsys.readouterr().err
    task = Regression()
    trainer = quiet_trainer(tmp_path, max_steps=1, init_from="out.safetensors")
    began = {}
    task.on_fit_start = lambda: began.update({name: value.clone() for name, value in task.state_dict().items()})
    trainer.fit(task, loader())
    assert all(torch.equal(began[name], value) for name, value in old.state_dict().items())


def test_plain_dictionaries_and_those_inside_others():
    net = nn.Linear(2, 2)
    plain = net.state_dict()
    for content, key in [
        (plain, None),
        (plain | {"_extra_state": {"scale": torch.ones(1)}}, None),
        ({"step": 3, "model": plain}, None),
        ({"model_state_dict": plain, "optimizer_state_dict": {"state": {}}, "loss": torch.ones(1)}, None),
        ({"a": plain, "b": dict(TWO["ema"])}, "a"),
    ]:
        torch.save(content, "plain.pt")
        unpickle.main("plain.pt", "out.safetensors", json.dumps({"key": key}), "temporary")
        assert torch.equal(load_file("out.safetensors")["weight"], net.weight)
        Path("out.safetensors").unlink()


@pytest.mark.slow
def test_parameters_are_converted_as_tensors():
    net = nn.Linear(2, 2)
    torch.save(dict(net.named_parameters()), "in.pt")
    torch.testing.assert_close(convert("in.pt", "out.safetensors"), net.state_dict(), rtol=0, atol=0)


@pytest.mark.slow
def test_an_old_format_compiled_names_and_tied_tensors():
    weight = torch.randn(3, 3)
    tied = {"_orig_mod.a.weight": weight, "_orig_mod.b.weight": weight, "c": weight.t()}
    torch.save(tied, "old.pth", _use_new_zipfile_serialization=False)
    tensors = convert("old.pth", "out.safetensors")
    assert tensors.keys() == {"a.weight", "b.weight", "c"}
    assert torch.equal(tensors["b.weight"], weight)
    assert torch.equal(tensors["c"], weight.t())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_names_lose_the_prefix_of_wrappers(capsys, prefix):
    net = nn.Linear(2, 2)
    torch.save({"model_state": {f"{prefix}{name}": value for name, value in net.state_dict().items()}}, "ddp.pt")
    unpickle.main("ddp.pt", "out.safetensors", "{}", "temporary")
    assert json.loads(capsys.readouterr().out)["unwrapped"] == [f"{prefix}weight", "weight"]
    tensors = load_file("out.safetensors")
    assert tensors.keys() == {"weight", "bias"}
    assert torch.equal(tensors["weight"], net.weight)


def test_module_and_rename_use_names_of_the_file(capsys):
    torch.save({"module.a.w": torch.ones(1), "module.b.w": torch.zeros(1)}, "ddp.pt")
    for request, names in [
        ({"module": "module.a"}, {"w"}),
        ({"rename": {r"^module\.": "net."}}, {"net.a.w", "net.b.w"}),
        ({}, {"a.w", "b.w"}),
    ]:
        unpickle.main("ddp.pt", "out.safetensors", json.dumps(request), "temporary")
        assert load_file("out.safetensors").keys() == names
        Path("out.safetensors").unlink()


def test_a_name_module_that_not_all_share_stays(capsys):
    torch.save({"module.w": torch.ones(1), "n_averaged": torch.ones(())}, "average.pt")
    unpickle.main("average.pt", "out.safetensors", "{}", "temporary")
    assert load_file("out.safetensors").keys() == {"module.w", "n_averaged"}
    assert json.loads(capsys.readouterr().out)["unwrapped"] == []


@pytest.mark.slow
def test_hyperparameters_that_are_no_plain_data_are_named(capsys):
    torch.save(write_lightning_checkpoint(Net(), hyper_parameters={"lr": 0.1, "prior": torch.ones(2)}), "last.ckpt")
    convert("last.ckpt", "out.safetensors")
    out, said = capsys.readouterr()
    assert yaml.safe_load(out) == {"lr": 0.1}
    assert "hyperparameters not shown, since they are too large or no plain data: prior" in said


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("went-off"),))


@pytest.mark.slow
@pytest.mark.parametrize("what", [Bomb(), Namespace(lr=1)], ids=["code", "object"])
def test_what_only_code_could_make_is_not_made(capsys, what):
    torch.save(write_lightning_checkpoint(Net(), hyper_parameters={"args": what}), "last.ckpt")
    said = catch_error(capsys, "last.ckpt", "out.safetensors", code=1)
    name = "argparse.Namespace" if isinstance(what, Namespace) else "getattr"
    assert said.startswith(f"last.ckpt contains an object of {name}, but Lumen runs no code")
    assert "torch.save(model.state_dict(), FILE)" in said
    assert not Path("went-off").exists()
    assert not Path("out.safetensors").exists()
    assert "torch.serialization" not in said


@pytest.mark.filterwarnings("ignore:.*sparse:UserWarning", "ignore:Sparse:UserWarning")  # of torch 2.11 and 2.15
@pytest.mark.parametrize(
    ("content", "request_", "said"),
    [
        (TWO, {}, "the choice of tensors is ambiguous. Set --key to one of ema, model."),
        (TWO, {"key": "emma"}, "--key emma: no tensors found. Set --key to one of ema, model."),
        (TWO, {"key": "ema", "module": "net"}, "Modules in the file: bias, weight."),
        (TWO, {"key": "ema", "rename": {".+": "w"}}, "--rename: several tensors would be called w."),
        ([torch.ones(1)], {}, "holds a list, expected a dictionary of tensors."),
        ({"lr": 0.1}, {}, "The file has no dictionary of tensors."),
        ({"w": torch.ones(2, 2).to_sparse()}, {}, "w is a Tensor of torch.float32, torch.sparse_coo, which"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {}, "which safetensors files cannot store."),
    ],
)
def test_what_cannot_be_converted_says_why(capsys, content, request_, said):
    """The test calls the function of the other process here, since a new process takes seconds to start."""
    torch.save(content, "content.pt")
    unpickle.main("content.pt", "out.safetensors", json.dumps(request_), "temporary")
    assert said in json.loads(capsys.readouterr().out)["wrong"]
    assert not Path("out.safetensors").exists()


def test_invalid_arguments_are_found_before_the_work(capsys):
    Path("text.ckpt").write_text("not a pickle")
    for words, said in [
        (["out.safetensors", "--rename", "(=w"], "not a valid regular expression"),
        (["out.safetensors", "--rename", "w"], "write PATTERN=TEXT"),
        (["out.pt"], "Name a .safetensors file"),
        (["nowhere/out.safetensors"], "there is no directory nowhere"),
    ]:
        assert said in catch_error(capsys, "text.ckpt", *words)
    assert "there is no file gone.pt" in catch_error(capsys, "gone.pt", "out.safetensors", code=1)
    Path("out.safetensors").write_text("mine")
    assert "Lumen overwrites nothing" in catch_error(capsys, "text.ckpt", "out.safetensors")
    assert Path("out.safetensors").read_text() == "mine"


@pytest.mark.parametrize("content", ["not a pickle", ""])
def test_other_file_is_reported_as_no_pickle(capsys, content):
    """The test calls the function that `lumen convert` runs in another process."""
    Path("text.ckpt").write_text(content)
    unpickle.main("text.ckpt", "out.safetensors", "{}", "temporary")
    said = json.loads(capsys.readouterr().out)["refused"]
    assert said.startswith("text.ckpt is not a readable file of torch.save: ")
    assert not said.endswith(": ")


def test_weights_error_shows_the_convert_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lumen.LumenError, match=r"^last\.ckpt does not exist"):
        lumen.Weights("last.ckpt")
    Path("last.ckpt").touch()
    with pytest.raises(lumen.LumenError, match=r"lumen convert last\.ckpt last\.safetensors"):
        lumen.Weights("last.ckpt")


@pytest.mark.slow
def test_the_pickle_is_read_by_another_process(monkeypatch):
    torch.save(nn.Linear(1, 1).state_dict(), "plain.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read here"))
    assert convert("plain.pt", "out.safetensors").keys() == {"weight", "bias"}
    assert "lumen.tools.convert.unpickle" in sys.modules
