"""`init_from`: the sources of the parameters of a new run, their names, and refused files."""

import json
import logging
import os
import pickle
import re
import shlex
import tempfile
from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import lumen
from lumen.cli import main
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.file_server import serve_folder
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer


class Tied(Regression):
    """Task with two layers that share a weight, and a buffer of integers."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Untrained(Regression):
    """Task that records the initial parameters of training."""

    def on_train_start(self):
        self.begun_with = {name: tensor.clone() for name, tensor in self.state_dict().items()}


def begin(tmp_path, init_from, task=None, **options):
    """Return the initial parameters of a run."""
    task = task or Untrained()
    begun = {}

    class Look(lumen.Callback):
        def on_fit_start(self, trainer, task):
            begun.update({name: tensor.clone() for name, tensor in task.state_dict().items()})

    options = {"max_steps": 1, "callbacks": [Look()]} | options
    quiet_trainer(tmp_path, init_from=init_from, **options).fit(task, loader())
    return begun


def make_other_weights(task=None):
    """Return weights that differ from the initial weights of every test's model."""
    torch.manual_seed(77)
    state = (task or Regression()).state_dict()
    return {name: torch.rand_like(t) if t.is_floating_point() else t + 5 for name, t in state.items()}


def is_equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def train_task(tmp_path, **options):
    trainer = quiet_trainer(tmp_path / "source", max_epochs=2, **options)
    trainer.fit(Regression(), loader(), val_dataloaders=loader(20))
    return trainer


def write_shards(directory, tensors, files=3):
    """Write files and index in the layout of model hubs."""
    directory.mkdir(parents=True, exist_ok=True)
    placed = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in tensors if placed[name] == file}, directory / file)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def edit_index(directory, name, file):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


# ---------------------------------------------------------------------- sources


def test_init_from_loads_parameters_only(tmp_path):
    source = train_task(tmp_path)
    checkpoint = Path(source.checkpoint_callback.last_model_path)
    expected = {name: tensor.clone() for name, tensor in source.run.task.state_dict().items()}
    for where in (checkpoint, checkpoint.parents[1], checkpoint.parent):  # a checkpoint, a run, its checkpoints
        task = Regression(lr=0.5)
        trainer = quiet_trainer(tmp_path, init_from=where, max_steps=3, seed=9)
        assert is_equal(begin(tmp_path, where), expected)
        trainer.fit(task, loader())
        assert (trainer.global_step, trainer.run.seed, task.hparams.lr) == (3, 9, 0.5)


def test_weights_are_as_built_without_init_from(tmp_path):
    train_task(tmp_path)
    built, where = Untrained().state_dict(), tmp_path / "source"
    assert not is_equal(begin(where, None, resume="auto", max_steps=99), built)
    assert is_equal(begin(where, None), built)


def test_init_from_accepts_best_model_path(tmp_path):
    source = train_task(tmp_path, callbacks=[lumen.ModelCheckpoint(monitor="val_loss", mode="max", keep_last=1)])
    best = Path(source.checkpoint_callback.best_model_path)
    assert best != Path(source.checkpoint_callback.last_model_path)
    assert is_equal(begin(tmp_path, best), load_file(best / "model/00000-00000.safetensors"))


def test_where_the_parameters_come_from_is_said(tmp_path, caplog):
    checkpoint = Path(train_task(tmp_path).checkpoint_callback.last_model_path)
    save_file(make_other_weights(), tmp_path / "model.safetensors")
    with serve_folder(tmp_path) as (url, _):
        for where, said in [
            (checkpoint, checkpoint), (checkpoint.parents[1], checkpoint), (tmp_path / "model.safetensors",) * 2,
            (tmp_path, tmp_path), (f"{url}/model.safetensors",) * 2,
        ]:  # fmt: skip
            caplog.clear()
            begin(tmp_path, where, log_level="INFO")
            assert [text for text in caplog.messages if "from" in text] == [f"parameters from {said}"]


@pytest.mark.parametrize("where", ["nowhere", "nowhere/model.safetensors", "pickles"])
def test_missing_weights_raise_before_run_directory_exists(tmp_path, caplog, where):
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles/model.pt").write_bytes(b"")
    with pytest.raises((CheckpointError, ConfigError), match=rf"{where}.* does not exist|model.pt is a pickle"):
        begin(tmp_path, tmp_path / where, log_level="INFO")
    assert not (tmp_path / "runs").exists()
    assert caplog.messages == []


@pytest.mark.parametrize("form", ["file", "directory", "shards", "cache of links"])
def test_safetensors_files_of_others_are_read(tmp_path, form):
    expected = make_other_weights()
    where = tmp_path / "hub"
    where.mkdir()
    if form == "shards":
        write_shards(where, expected)
    else:
        save_file(expected, where / "model.safetensors", metadata={"format": "pt"})
    if form == "cache of links":  # a hub's cache links its snapshots to files in another folder
        (tmp_path / "blob").write_bytes((where / "model.safetensors").read_bytes())
        (where / "model.safetensors").unlink()
        (where / "model.safetensors").symlink_to(tmp_path / "blob")
    assert is_equal(begin(tmp_path, where / "model.safetensors" if form == "file" else where), expected)


@pytest.fixture
def temporary_directory(tmp_path, monkeypatch):
    """Set a directory for temporary files, to list its files later."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.mark.parametrize("form", ["file", "shards", "checkpoint"])
def test_url_is_copied_only_while_loading(tmp_path, temporary_directory, form):
    local = tmp_path / "local"
    if form == "checkpoint":
        source = train_task(tmp_path)
        local = Path(source.checkpoint_callback.last_model_path)
        expected = {name: tensor.clone() for name, tensor in source.run.task.state_dict().items()}
    else:
        expected = make_other_weights()
        write_shards(local, expected, 2)
        save_file(expected, local / "single.safetensors")
    memory = fsspec.filesystem("memory")
    memory.put(f"{local}/", f"/{tmp_path.name}/", recursive=True)
    url = f"memory://{tmp_path.name}" + ("/single.safetensors" if form == "file" else "")
    assert is_equal(begin(tmp_path, url), expected)
    assert list(temporary_directory.glob("lumen-*")) == []


def test_http_server_can_serve_a_sharded_model(tmp_path, temporary_directory):
    expected = make_other_weights()
    write_shards(tmp_path / "served/model", expected)
    with serve_folder(tmp_path / "served") as (url, asked):
        assert is_equal(begin(tmp_path, f"{url}/model"), expected)
        assert sum("GET" in line and ".safetensors " in line for line in asked) == 3
    assert list(temporary_directory.glob("lumen-*")) == []


def test_http_server_can_serve_averages(tmp_path, temporary_directory):
    source = Path(train_task(tmp_path, callbacks=[lumen.EMA(0.5)]).checkpoint_callback.last_model_path)
    with serve_folder(source.parent) as (url, asked):
        for average in ("EMA", "parameters", None):
            found = begin(tmp_path, lumen.Weights(f"{url}/{source.name}", average=average))
            assert is_equal(found, begin(tmp_path, lumen.Weights(source, average=average)))
            assert any("state.json" in line for line in asked) == (average is not None)
            asked.clear()
    assert list(temporary_directory.glob("lumen-*")) == []


def test_failed_download_is_named_and_leaves_nothing(tmp_path, temporary_directory):
    directory = write_shards(tmp_path / "served/model", make_other_weights())
    edit_index(directory, "net.0.weight", "model-00009-of-00003.safetensors")
    with serve_folder(tmp_path / "served") as (url, _):
        for wrong, named in (
            (f"{url}/nothing", r"cannot fetch http://.*/nothing: FileNotFoundError"),
            (f"{url}/model", r"cannot fetch .*model-00009"),
            ("nosuch://place/model.safetensors", r"cannot fetch nosuch://.*nosuch"),
        ):
            with pytest.raises(CheckpointError, match=named):
                begin(tmp_path, wrong)
    assert list(temporary_directory.glob("lumen-*")) == []
    assert not (tmp_path / "runs/run").exists()


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/model.safetensors", "a/b.safetensors", "..", 7, "x.bin"]
)
def test_an_index_that_leaves_its_directory_is_refused(tmp_path, file):
    directory = write_shards(tmp_path / "hub", make_other_weights())
    save_file(make_other_weights(), tmp_path / "outside.safetensors")
    edit_index(directory, "net.0.weight", file)
    with pytest.raises(CheckpointDamaged, match="which is not a file name in its directory"):
        begin(tmp_path, directory)


def test_damaged_files_of_others_are_named(tmp_path):
    save_file(make_other_weights(), whole := tmp_path / "whole.safetensors")
    data = whole.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    negative = data[8:size].replace(b'"shape":[16]', b'"shape":[-16]')
    cases = {
        "cut": data[:-4],
        "longer": data + b"0000",
        "header": data[:20],
        "empty": b"",
        "shape": len(negative).to_bytes(8, "little") + negative + data[size:],
        "dtype": data.replace(b'"F32"', b'"F33"'),
    }
    for name, content in cases.items():
        (path := tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=f"{name}.safetensors"):
            begin(tmp_path, path)
    directory = write_shards(tmp_path / "hub", make_other_weights())
    edit_index(directory, "net.9.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"index\.json lists 'net\.9\.weight', but no listed file"):
        begin(tmp_path, directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"model-00002-of-00003\.safetensors is missing"):
        begin(tmp_path, directory)


@pytest.mark.slow
def test_pickle_is_never_read_and_error_converts_it(tmp_path, monkeypatch):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    for where in (hub, hub / "pytorch_model.bin", "https://host.example/model.ckpt?x=1"):
        with pytest.raises(ConfigError, match="is a pickle"):
            begin(tmp_path, where)
    with pytest.raises(ConfigError, match="is a pickle"):
        Regression.load_from_checkpoint(hub / "pytorch_model.bin")
    assert not (tmp_path / "exploded").exists()

    tensors = make_other_weights(Tied())  # its tied weights share memory
    tensors["again.weight"] = tensors["first.weight"]
    torch.save(tensors, tmp_path / "old.pt")
    with pytest.raises(ConfigError) as caught:
        lumen.Weights(tmp_path / "old.pt")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(str(caught.value).partition("Convert the file: lumen ")[2])) == 0
    assert is_equal(begin(tmp_path, tmp_path / "old.safetensors", Tied()), tensors)


def test_a_place_without_weights_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    for where, message in (("empty", "no valid checkpoint found"), ("nowhere", "does not exist")):
        with pytest.raises(CheckpointError, match=message):
            begin(tmp_path, tmp_path / where)


# ---------------------------------------------------------------------- names, shapes, dtypes


def test_renames_apply_in_order_and_ignore_skips_parameters(tmp_path):
    own = make_other_weights()
    foreign = {
        "model.encoder.layer_0.weight": own["net.0.weight"],
        "model.encoder.layer_0.bias": own["net.0.bias"],
        "classifier.weight": torch.zeros(7, 16),
    }
    save_file(foreign, tmp_path / "foreign.safetensors")
    weights = lumen.Weights(
        tmp_path / "foreign.safetensors",
        rename={r"^model\.": "", r"^encoder\.layer_(\d+)": r"net.\1", "^classifier": "net.3"},
        ignore=[r"net\.3\..*"],
    )
    begun, fresh = begin(tmp_path, weights), Regression().state_dict()
    assert torch.equal(begun["net.0.weight"], own["net.0.weight"])
    assert torch.equal(begun["net.3.weight"], fresh["net.3.weight"])
    assert torch.equal(begun["net.3.bias"], fresh["net.3.bias"])


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod.", "_orig_mod.module."])
def test_names_lose_the_prefix_of_wrappers(tmp_path, caplog, prefix):
    own = make_other_weights()
    save_file({f"{prefix}{name}": tensor for name, tensor in own.items()}, path := tmp_path / "ddp.safetensors")
    assert is_equal(begin(tmp_path, path, log_level="INFO"), own)
    (said,) = [record.message for record in caplog.records if "wrappers" in record.message]
    assert said.startswith(f"{path}: names of wrappers (DDP, torch.compile) differ, such as {prefix}net.")
    assert is_equal(begin(tmp_path, lumen.Weights(path, rename={f"^{re.escape(prefix)}": ""})), own)


class Compiled(Untrained):
    """Task with a compiled network."""

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


def test_plain_names_fit_a_compiled_module(tmp_path):
    own = make_other_weights()
    save_file(own, path := tmp_path / "plain.safetensors")
    begun = begin(tmp_path, path, Compiled())
    assert is_equal({name.replace("_orig_mod.", ""): tensor for name, tensor in begun.items()}, own)


class Wrapping(Untrained):
    """Task whose only part is called like a module inside of DDP."""

    def __init__(self):
        super().__init__()
        self.module = self.net
        del self.net

    def forward(self, x):
        return self.module(x)


def test_a_layer_called_module_keeps_its_name(tmp_path, caplog):
    own = make_other_weights(Wrapping())
    assert all(name.startswith("module.") for name in own)
    save_file(own, path := tmp_path / "wrapping.safetensors")
    assert is_equal(begin(tmp_path, path, Wrapping(), log_level="INFO"), own)
    assert "wrappers" not in caplog.text


def test_mismatched_names_are_listed_with_a_fitting_rename(tmp_path):
    tensors = {name.removeprefix("net."): tensor for name, tensor in make_other_weights().items()}
    save_file({f"encoder.{name}": tensor for name, tensor in tensors.items()}, path := tmp_path / "other.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        begin(tmp_path, path)
    message = str(caught.value)
    assert "not in the checkpoint: net.0.weight, net.0.bias, net.3.weight, net.3.bias" in message
    assert "only in the checkpoint: encoder.0.bias" in message
    suggested = json.loads(re.search(r"rename=(\{.*?\}) would match 4", message)[1])
    begun = begin(tmp_path, lumen.Weights(path, rename=suggested))
    assert torch.equal(begun["net.0.weight"], tensors["0.weight"])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"net.3.bias": None}, {}, r"not in the checkpoint: net\.3\.bias"),
        ({"extra": torch.ones(1)}, {}, "only in the checkpoint: extra"),
        ({}, {"ignore": ["head.*"]}, r"patterns that match nothing: head\.\*"),
        ({}, {"rename": {"^bert": "net"}}, r"patterns that match nothing: \^bert"),
        ({}, {"rename": {"weight": "bias"}}, r"rename makes 'net\.0\.bias' of '.*' and of '.*'"),
        ({"net.0.bias": torch.ones(17)}, {"strict": False}, r"net\.0\.bias: \(17,\) .* saved, \(16,\)"),
        ({"net.0.bias": torch.ones(16, dtype=torch.int32)}, {"strict": False}, r"net\.0\.bias: .*int32 saved"),
        ({}, {"rename": {"^": "x."}, "strict": False}, "the checkpoint have no name in common"),
        ({}, {"ignore": [".*"]}, "the checkpoint have no name in common"),
    ],
)
def test_mismatch_raises_before_any_change(tmp_path, change, options, message):
    tensors = {name: tensor for name, tensor in (make_other_weights() | change).items() if tensor is not None}
    save_file(tensors, path := tmp_path / "other.safetensors")
    task = Regression()
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=message):
        begin(tmp_path, lumen.Weights(path, **options), task)
    assert is_equal(task.state_dict(), before)
    assert not (tmp_path / "runs/run").exists()


def test_lenient_loading_reports_what_it_leaves_alone(tmp_path, caplog):
    tensors = make_other_weights() | {"extra": torch.ones(1)}
    del tensors["net.3.bias"]
    save_file(tensors, path := tmp_path / "other.safetensors")
    begun = begin(tmp_path, lumen.Weights(path, ignore=["head.*"], strict=False), log_level="WARNING")
    assert torch.equal(begun["net.0.weight"], tensors["net.0.weight"])
    assert torch.equal(begun["net.3.bias"], Regression().net[3].bias)
    for said in ("not in the checkpoint: net.3.bias", "only in the checkpoint: extra", "match nothing: head.*"):
        assert sum(said in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("saved", "own"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_floating_point_weights_are_cast_with_one_message(tmp_path, caplog, saved, own):
    tensors = {name: tensor.to(saved) for name, tensor in make_other_weights().items()}
    save_file(tensors, path := tmp_path / "half.safetensors")
    task = Regression(dtype=own)
    with caplog.at_level(logging.INFO, logger="lumen"):
        trainer = quiet_trainer(tmp_path, init_from=path, max_steps=1, log_level="INFO")
        trainer.fit(task, loader(dtype=own))
    said = [record.message for record in caplog.records if "cast" in record.message]
    assert len(said) == 1
    assert f"cast 4 tensors from {saved} to {own}" in said[0]
    begun = begin(tmp_path, path, Regression())
    assert torch.equal(begun["net.0.weight"], tensors["net.0.weight"].float())


@pytest.mark.parametrize("absent", ["first.weight", "again.weight", None])
def test_tied_weights_need_one_of_their_names(tmp_path, absent):
    tensors = make_other_weights(Tied())
    tensors["again.weight"] = tensors["first.weight"].clone()
    tensors.pop(absent, None)
    save_file(tensors, path := tmp_path / "tied.safetensors")
    task = Tied()
    begun = begin(tmp_path, path, task)
    shared = tensors.get("first.weight", tensors.get("again.weight"))
    assert torch.equal(begun["first.weight"], shared)
    assert torch.equal(begun["again.weight"], shared)
    assert task.first.weight is task.again.weight
    assert begun["seen"] == 5


def test_different_tensors_for_tied_weights_raise(tmp_path):
    tensors = make_other_weights(Tied())
    tensors["again.weight"] = tensors["first.weight"] + 1
    save_file(tensors, path := tmp_path / "tied.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"ties first\.weight and again\.weight, which differ"):
        begin(tmp_path, path, Tied())


@pytest.mark.parametrize("options", [{"rename": {"(": ""}}, {"rename": {"a": r"\2"}}, {"ignore": ["*"]}])
def test_invalid_pattern_raises_immediately(options):
    with pytest.raises(ConfigError, match="cannot be used as a regular expression"):
        lumen.Weights("x.safetensors", **options)


# ---------------------------------------------------------------------- with a resumed run


def test_resumed_run_skips_init_from_and_logs_it(tmp_path):
    save_file(make_other_weights(), path := tmp_path / "other.safetensors")
    options = {"init_from": path, "resume": "auto", "log_level": "INFO"}
    quiet_trainer(tmp_path, max_steps=5, **options).fit(Regression(), loader())
    path.unlink()
    resumed = Regression()
    trainer = quiet_trainer(tmp_path, max_steps=9, **options)
    trainer.fit(resumed, loader())
    log = (trainer.run_directory / "run.log").read_text()
    assert log.count("ignoring init_from") == 1
    save_file(make_other_weights(), path)
    quiet_trainer(tmp_path / "whole", max_steps=9, init_from=path).fit(whole := Regression(), loader())
    assert is_equal(resumed.state_dict(), whole.state_dict())


def test_init_from_contradicts_resume_path(tmp_path):
    for resume in ("best", tmp_path / "runs/run"):
        with pytest.raises(ConfigError, match=r"init_from and resume=.* both set"):
            quiet_trainer(tmp_path, resume=resume, init_from="model.safetensors", max_steps=1)


def test_weights_are_no_run_to_resume(tmp_path):
    save_file(make_other_weights(), path := tmp_path / "model.safetensors")
    for where in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"holds weights, but no run.*init_from"):
            quiet_trainer(tmp_path, resume=where, max_steps=1).fit(Regression(), loader())
        with pytest.raises(CheckpointError, match="no hyperparameters"):
            Regression.load_from_checkpoint(where)


def test_exported_file_in_run_directory_is_ignored(tmp_path):
    source = train_task(tmp_path)
    save_file(make_other_weights(), source.run_directory / "model.safetensors")
    resumed = Regression()
    quiet_trainer(tmp_path, resume=source.run_directory, max_epochs=2).fit(resumed, loader())
    assert is_equal(resumed.state_dict(), source.run.task.state_dict())


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("kind", ["path", "Weights", "URL"])
def test_evaluations_and_predictions_take_the_same_places(tmp_path, kind):
    tensors = make_other_weights()
    expected = Regression()
    expected.load_state_dict(tensors)
    names = {f"old.{name}": tensor for name, tensor in tensors.items()} if kind == "Weights" else tensors
    save_file(names, path := tmp_path / "model.safetensors")
    where = {"path": path, "Weights": lumen.Weights(path, rename={r"^old\.": ""}), "URL": path.as_uri()}[kind]
    trainer, data = quiet_trainer(tmp_path), loader(shuffle=False)
    (values,) = trainer.validate(expected, data)
    assert trainer.validate(Regression(), data, ckpt_path=where) == [values]
    assert trainer.test(Regression(), data, ckpt_path=where)[0]["test_loss"] == values["val_loss"]
    assert torch.equal(trainer.predict(Regression(), data, ckpt_path=where)[0], trainer.predict(expected, data)[0])


def test_an_evaluation_does_not_begin_anew(tmp_path):
    """`init_from` does not overwrite the weights that `fit` trained."""
    save_file(make_other_weights(), path := tmp_path / "model.safetensors")
    trainer = quiet_trainer(tmp_path, init_from=path, max_steps=5)
    trainer.fit(task := Regression(), loader())
    after = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    trainer.validate(task, loader())
    assert is_equal(task.state_dict(), after)


# ---------------------------------------------------------------------- from a config


def test_config_renames_weights_and_its_record_reproduces_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    save_file({"old.weight": torch.full((1, 3), 2.5), "x": torch.ones(1)}, "model.safetensors")
    config = {
        "model": "tests.helpers.cli_tasks.Line",
        "data": "tests.helpers.cli_tasks.Points",
        "trainer": {
            "max_steps": 1,
            "callbacks": {"spy": "tests.helpers.cli_tasks.Spy"},
            "init_from": {"path": "model.safetensors", "rename": {r"^old\.": "layer."}, "ignore": [r".*\.bias", "x"]},
        },
    }
    Path("line.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "line.yaml"]) == 0
    first = Spy.task.layer.weight.clone()
    assert 2 < first.min() < 3
    record = yaml.safe_load(Path("runs/line/config.yaml").read_text())
    assert record["trainer"]["init_from"] == config["trainer"]["init_from"] | {"strict": True, "average": None}
    assert main(["fit", "--config", "runs/line/config.yaml", "--trainer.name", "again"]) == 0
    assert torch.equal(Spy.task.layer.weight, first)
    save_file({"layer.weight": torch.ones(1, 3), "layer.bias": torch.ones(1)}, "plain.safetensors")
    assert main(["fit", "--config", "line.yaml", "--trainer.init_from", "plain.safetensors"]) == 0
    assert main(["validate", "--config", "line.yaml", "--ckpt_path", "plain.safetensors"]) == 0
    assert torch.equal(Spy.task.layer.weight, torch.ones(1, 3))
    words = ["--ckpt_path.path", "model.safetensors", "--ckpt_path.strict", "false"]
    rename = ["--ckpt_path.rename", r'{"^old\\.": "layer."}']
    assert main(["validate", "--config", "line.yaml", *words, *rename]) == 0
    assert torch.equal(Spy.task.layer.weight, torch.full((1, 3), 2.5))


def test_mistakes_in_a_config_are_one_paragraph(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    Path("line.yaml").write_text(
        "{model: tests.helpers.cli_tasks.Line, data: tests.helpers.cli_tasks.Points, trainer: {max_steps: 1}}"
    )
    for words, code, message in (
        (["--trainer.init_from", "model.bin"], 2, "model.bin does not exist"),
        (["--trainer.init_from", "nowhere.safetensors"], 1, "nowhere.safetensors does not exist"),
        (["--trainer.init_from.path", "x", "--trainer.init_from.renames", "{a: b}"], 2, "renames"),
    ):
        assert main(["fit", "--config", "line.yaml", *words]) == code
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- memory
