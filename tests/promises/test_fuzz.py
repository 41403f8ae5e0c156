"""Hostile input: one sentence refuses it, or it works; checkpoints, configs, command lines, names, directories."""

import contextlib
import copy
import hashlib
import io
import json
import operator
import os
import shutil
import tempfile
import time
from functools import reduce
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import lumen
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.format.manifest import encode_manifest
from lumen.cli import main
from lumen.errors import CheckpointDamaged, LumenError
from tests.helpers.tasks import Regression, loader, quiet_trainer
from tests.helpers.working_directory import CONFIG, clear_environment

MINUTES = float(os.environ.get("LUMEN_FUZZ_MINUTES", "1"))
NAMES = st.text(st.characters(exclude_categories=()), max_size=12)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), NAMES,
    st.sampled_from(["../../up", "/etc/passwd", "a/b", "__class__", "${oc.env:HOME}", "os.system", "1e999", "", "~"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=8
)


@st.composite
def change_values(draw, value, changes=3):
    """Return plain data with changed values in a few places, entries removed, or entries added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, changes))):
        places = list(_places(value))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["set", "set", "swap", "delete", "add"]))
        if action == "set":
            container[key] = draw(VALUES)
        elif action == "swap":
            other, its_key = draw(st.sampled_from(places))
            container[key] = copy.deepcopy(other[its_key])
        elif action == "delete":
            del container[key]
        elif isinstance(container, dict):
            container[draw(NAMES)] = draw(VALUES)
        else:
            container.insert(key, draw(VALUES))
    return value


def _places(value):
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


class Scheduled(Regression):
    """Task with schedules of two kinds."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        step = torch.optim.lr_scheduler.LinearLR(optimizer)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss"}]


class Inputs:
    """Inputs of the targets: a run with a checkpoint, made once."""

    def __init__(self, folder):
        self.folder = folder
        self.run = self.fit(folder / "whole").run_directory
        self.checkpoint = self.run / "checkpoints/step-00000004"

    def fit(self, root, **options):
        callbacks = [
            lumen.ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=2),
            lumen.EarlyStopping("val_loss", patience=50),
            lumen.EMA(0.9),
            lumen.SpikeDetection(window=4, warmup=2, rtol=0.5),
        ]
        options = {"max_steps": 4, "log_level": "CRITICAL", "val_check_interval": 2, "callbacks": callbacks} | options
        trainer = quiet_trainer(root, **options)
        trainer.fit(Scheduled(), loader(), val_dataloaders=loader(8))
        return trainer

    def copy(self):
        """Copy the run for a forgery; the caller removes the copy."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "runs"
        shutil.copytree(self.run.parent, folder)
        return folder / self.run.name


def forge_checkpoints(inputs, data):
    """Forge a manifest or a state file with right digests, or bytes of a tensor file."""
    run = inputs.copy()
    checkpoint = run / "checkpoints" / inputs.checkpoint.name
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"], manifest["digest"]
    what = data.draw(st.sampled_from(["manifest", "state", "tensors"]))
    if what == "manifest":
        manifest = data.draw(change_values(manifest))
    elif what == "state":
        state = json.loads((checkpoint / "state.json").read_text())
        _replace(manifest, checkpoint, "state.json", _json(data.draw(change_values(state))))
    else:
        name = data.draw(st.sampled_from(sorted(name for name in manifest["files"] if name.endswith(".safetensors"))))
        text = bytearray((checkpoint / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            text[data.draw(st.integers(0, min(len(text), 400) - 1))] = data.draw(st.integers(0, 255))
        _replace(manifest, checkpoint, name, bytes(text))
    try:
        (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    except (KeyError, TypeError, ValueError):  # no JSON, or no entries that the first lines have
        return
    with contextlib.suppress(LumenError):
        opened = Checkpoint.open(checkpoint, verify="full")
        for section in ("model", "optimizer", "extra"):
            with contextlib.suppress(LumenError):
                list(opened.as_mapping(section).values())
    with contextlib.suppress(LumenError):  # the finished run is loaded, ended and saved; the other one also trains
        inputs.fit(run.parent.parent, resume=checkpoint, max_steps=data.draw(st.sampled_from([4, 9])))
    shutil.rmtree(run.parent.parent)


#: Values of other types that a search has found to end in other errors: keys of the state, and the value.
FORGED = [
    ("data/training", -1), ("settings/batch_size", 0), ("optimizer/state/net.0.weight", {"x": 1}),
    ("optimizer/state/net.0.weight/exp_avg_sq", []), ("optimizer/state/net.0.weight/step", []),
    ("optimizer/groups/0/betas/$tuple", ["a/b", 0.999]), ("schedulers/1/best", {}),
    ("callbacks/SpikeDetection{'monitor': 'loss'}/values", [[1]]), ("callbacks/EMA/average/net.0.bias", {}),
    ("callbacks/ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min'}/scores/step-00000004", {}),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "value"), FORGED, ids=[keys for keys, _ in FORGED])
def test_values_of_other_kinds_are_damage(inputs, keys, value):
    """The digests are right; the run uses the last values only when it trains."""
    manifest = json.loads((inputs.checkpoint / "manifest.json").read_text())
    del manifest["sha256"], manifest["digest"]
    state = json.loads((inputs.checkpoint / "state.json").read_text())
    *way, last = (int(key) if key.isdecimal() else key for key in keys.split("/"))
    holder = reduce(operator.getitem, way, state)
    holder[last] = value
    _replace(manifest, inputs.checkpoint, "state.json", _json(state))
    (inputs.checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(CheckpointDamaged, match="Resume from a different checkpoint"):
        inputs.fit(inputs.folder / "whole", resume=inputs.checkpoint, max_steps=9)


class Failing(Scheduled):
    """Task that looks up a missing key, like tasks of users."""

    def training_step(self, batch):
        return {}["mine"]


def fail_in_collate(samples):
    """Fail in a data worker; the error has no frame of this function in the run's process."""
    raise KeyError("not there")


def test_errors_of_the_task_stay_in_resumed_runs(inputs):
    in_worker = loader(num_workers=1, collate_fn=fail_in_collate)
    for task, data, message in ((Failing(), loader(), "mine"), (Scheduled(), in_worker, "not there")):
        trainer = quiet_trainer(inputs.folder / "whole", max_steps=9, resume=inputs.checkpoint)
        with pytest.raises(KeyError, match=message):
            trainer.fit(task, data, val_dataloaders=loader(8))


def _json(value):
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _replace(manifest, checkpoint, name, text):
    (checkpoint / name).write_bytes(text)
    manifest["files"][name] = type(manifest["files"][name])(
        {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        if isinstance(manifest["files"][name], dict)
        else [len(text), hashlib.sha256(text).hexdigest()]
    )


def forge_configs(inputs, data):
    """Read a config with values of another kind in a few places, or text that is nearly YAML."""
    if data.draw(st.booleans()):
        text = yaml.safe_dump(data.draw(change_values(CONFIG)), allow_unicode=True)
    else:
        text = yaml.safe_dump(CONFIG)
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=8)) + text[at + data.draw(st.integers(0, 8)) :]
    config = inputs.folder / "forged.yaml"
    config.write_bytes(text.encode("utf-8", "surrogatepass"))
    command(["fit", "--config", str(config), "--print_config"])


WORDS = [
    "fit", "validate", "runs", "report", "export", "diff", "check", "--config", "line.yaml", "--trainer.max_epochs",
    "--trainer", "--model", "--model.lr", "--model.init_args.width", "--data.samples", "--trainer.callbacks+",
    "EarlyStopping", "--trainer.logger", "--trainer.strategy", "ddp", "--ckpt_path", "best", "--print_config",
    "--help", "--optimizer", "SGD", "--optimizer.lr", "--lr_scheduler", "{", "[", "}", "=", "null", "-1", "1e400",
]  # fmt: skip


def forge_command_lines(inputs, data):
    """Put words of the command line in any order, with others between them; nothing is trained."""
    words = data.draw(st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=7))
    command([*words, "--print_config"] if words[:1] == ["fit"] else words)


def forge_names(inputs, data):
    """Log under any names, and read the logged values."""
    names = data.draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))

    class Logging(Regression):
        def training_step(self, batch):
            for name in names:
                self.log(name, 1.0)
            return super().training_step(batch)

    root = Path(tempfile.mkdtemp(dir=inputs.folder))
    trainer = quiet_trainer(root, max_steps=1, log_every_n_steps=1, log_level="CRITICAL", enable_checkpointing=False)
    try:
        trainer.fit(Logging(), loader())
    except LumenError:
        return
    assert {name: trainer.logged_metrics[name].item() for name in names} == dict.fromkeys(names, 1.0)
    command(["runs", str(root / "runs")])
    command(["report", str(trainer.run_directory), "--output", str(root / "report.html")])
    shutil.rmtree(root)


def forge_directories(inputs, data):
    """Cut, empty, replace or remove files of a run, then list, report and resume it."""
    run = inputs.copy()
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
        action = data.draw(st.sampled_from(["cut", "bytes", "remove", "folder", "link"]))
        if action == "cut":
            text = path.read_bytes()
            path.write_bytes(text[: data.draw(st.integers(0, len(text)))])
        elif action == "bytes":
            path.write_bytes(data.draw(st.binary(max_size=40)))
        else:
            path.unlink()
            if action == "folder":
                path.mkdir()
            elif action == "link":
                path.symlink_to("/etc/passwd")
    command(["runs", str(run.parent)])
    command(["report", str(run), "--output", str(run.parent.parent / "report.html")])
    with contextlib.suppress(LumenError):
        inputs.fit(run.parent.parent, max_steps=5, resume="auto")
    shutil.rmtree(run.parent.parent)


def command(words):
    """Run a command, which must end with an exit code, never with a traceback."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int | None), words
    assert "Traceback" not in said.getvalue(), said.getvalue()


TARGETS = [forge_checkpoints, forge_configs, forge_command_lines, forge_names, forge_directories]


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clear_environment(monkeypatch)
    (tmp_path / "line.yaml").write_text(yaml.safe_dump(CONFIG))
    return Inputs(tmp_path)


def attack(target, inputs, **options):
    options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)} | options
    options["phases"] = [Phase.explicit, Phase.generate]  # shrinking an input takes minutes
    settings(**options)(given(st.data())(lambda data: target(inputs, data)))()


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input_is_refused_or_works(inputs, target):
    attack(target, inputs, max_examples=20, derandomize=True)


@pytest.mark.torture
@pytest.mark.time_limit(60 * (MINUTES + 10))
@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input_for_minutes(inputs, target):
    ends_s = time.monotonic() + 60 * MINUTES
    while time.monotonic() < ends_s:
        attack(target, inputs, max_examples=100)
