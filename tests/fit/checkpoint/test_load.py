"""Checkpoints outside of the run that wrote them, and the hyperparameters in them."""

import argparse
import json
import re
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import lumen
from lumen.checkpoint import Checkpoint
from lumen.errors import CheckpointError, CheckpointMismatch, ConfigError
from tests.helpers.tasks import FEATURES, Regression, Saving, bare_trainer, loader, quiet_trainer


class Rich(lumen.TaskModule):
    """Task with tied weights, saved and unsaved buffers, a frozen layer, an extra state, and several dtypes."""

    def __init__(self, width: int = 8, folder: Path = Path("here"), rates: tuple = (0.1, 0.2), **rest):
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 1)
        self.again = nn.Linear(FEATURES, width)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("kept", torch.tensor(7))
        self.register_buffer("not_kept", torch.zeros(2), persistent=False)
        self.counter = Counter()

    def forward(self, inputs):
        return self.second(self.norm(self.first(inputs) + self.again(inputs))) + self.small.float().sum()

    def training_step(self, batch):
        self.counter.value += 1
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Counter(nn.Module):
    value = 0

    def get_extra_state(self):
        return {"value": self.value}

    def set_extra_state(self, state):
        self.value = state["value"]


def train_task(tmp_path, task):
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(task, loader())
    return Path(trainer.checkpoint_callback.last_model_path)


def test_loaded_task_restores_tensors_ties_and_hyperparameters(tmp_path):
    task = Rich(width=5, extra=3)
    path = train_task(tmp_path, task)
    for where in (path, path.parents[1]):  # the checkpoint and its run
        loaded = Rich.load_from_checkpoint(where)
        assert loaded.again.weight is loaded.first.weight
        assert loaded.counter.value == task.counter.value == 7
        assert loaded.hparams == {"width": 5, "folder": Path("here"), "rates": (0.1, 0.2), "extra": 3}
        for name, tensor in task.state_dict().items():
            if torch.is_tensor(tensor):
                assert torch.equal(loaded.state_dict()[name], tensor), name


def test_files_are_plain_safetensors_with_model_names(tmp_path):
    task = Rich()
    (file,) = (train_task(tmp_path, task) / "model").iterdir()
    tensors = safetensors.torch.load_file(file)
    assert "again.weight" not in tensors
    assert "not_kept" not in tensors
    assert torch.equal(tensors["first.weight"], task.first.weight)
    assert tensors["small"].dtype == torch.bfloat16


def test_absent_optimizer_state_stays_absent(tmp_path):
    class HalfUsed(Regression):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    task = HalfUsed()
    checkpoint = Checkpoint.open(train_task(tmp_path, task))
    assert not [name for name in checkpoint.list_tensor_names("optimizer") if name.startswith("unused")]
    trainer = quiet_trainer(tmp_path, max_epochs=2, resume="auto")
    resumed = HalfUsed()
    trainer.fit(resumed, loader())
    assert resumed.unused not in trainer.optimizers[0].state


class More(Regression):
    """Task with a layer that `Regression` lacks."""

    def __init__(self, lr=1e-2, dropout=0.0, dtype=torch.float32, optimizer="AdamW"):
        super().__init__(lr, dropout, dtype, optimizer)
        self.extra = nn.Linear(2, 2)


class Fewer(Regression):
    """Task with only the first layer of `Regression`."""

    def __init__(self, lr=1e-2, dropout=0.0, dtype=torch.float32, optimizer="AdamW"):
        super().__init__(lr, dropout, dtype, optimizer)
        self.net = self.net[:1]


class Unlike(lumen.TaskModule):
    """Task without a name in common with `Regression`."""

    def __init__(self, **settings):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 16)


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (Regression, More, "not in the checkpoint: extra.weight, extra.bias"),
        (Regression, Fewer, "only in the checkpoint: net.3.bias, net.3.weight"),
        (More, Fewer, "only in the checkpoint: extra.bias, extra.weight, net.3.bias, net.3.weight"),
    ],
)
def test_strict_mismatch_raises_and_non_strict_warns(tmp_path, caplog, saved, own, message):
    task = saved()
    path = train_task(tmp_path, task)
    with pytest.raises(CheckpointMismatch, match=re.escape(message)):
        own.load_from_checkpoint(path)
    assert not caplog.records
    found = own.load_from_checkpoint(path, strict=False)
    assert torch.equal(found.net[0].weight, task.net[0].weight)
    assert [message in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("strict", [True, False])
def test_checkpoint_without_common_names_always_raises(tmp_path, strict):
    path = train_task(tmp_path, Regression())
    with pytest.raises(CheckpointMismatch, match="the checkpoint have no name in common"):
        Unlike.load_from_checkpoint(path, strict=strict)


def test_newly_tied_weights_must_be_equal(tmp_path):
    class Apart(Rich):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.again.weight = nn.Parameter(self.first.weight.detach() + 1)

    with pytest.raises(
        CheckpointMismatch, match=r"another model: .*ties first\.weight and again\.weight, which differ"
    ):
        Rich.load_from_checkpoint(train_task(tmp_path, Apart()))


def test_weights_that_were_tied_may_part(tmp_path):
    class Apart(Rich):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.again.weight = nn.Parameter(torch.zeros_like(self.first.weight))

    task = Rich()
    loaded = Apart.load_from_checkpoint(train_task(tmp_path, task))
    assert torch.equal(loaded.again.weight, task.first.weight)
    assert loaded.again.weight is not loaded.first.weight


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_an_error_and_changes_nothing(tmp_path, strict):
    path = train_task(tmp_path, Rich(width=8))
    with pytest.raises(CheckpointMismatch, match=r"first\.weight: \(8, 6\).* saved, \(9, 6\).* in the model"):
        Rich.load_from_checkpoint(path, strict=strict, width=9)


def test_overrides_replace_hyperparameters(tmp_path):
    path = train_task(tmp_path, Rich())
    assert Rich.load_from_checkpoint(path, rates=(3.0,)).hparams.rates == (3.0,)


def test_best_last_and_run_load_by_path(tmp_path):
    trainer = quiet_trainer(
        tmp_path, max_epochs=3, callbacks=[lumen.ModelCheckpoint(monitor="val_loss", mode="max", keep_last=1)]
    )
    trainer.fit(Regression(), loader(), val_dataloaders=loader(20))
    saver, weights = trainer.checkpoint_callback, {}
    for name, path in {
        "best": saver.best_model_path, "last": saver.last_model_path, "run": trainer.run_directory
    }.items():  # fmt: skip
        loaded = Regression.load_from_checkpoint(path, dropout=0.25)
        assert (loaded.hparams.dropout, loaded.net[2].p, loaded.hparams.lr) == (0.25, 0.25, 1e-2)
        weights[name] = loaded.net[0].weight
    for name, path in (("best", saver.best_model_path), ("last", saver.last_model_path)):
        assert torch.equal(weights[name], Checkpoint.open(Path(path)).read_tensor("model", "net.0.weight"))
    assert torch.equal(weights["run"], weights["last"])
    assert not torch.equal(weights["best"], weights["last"])


def test_missing_hyperparameters_are_named(tmp_path):
    class Forgetful(Regression):
        def __init__(self, needed):
            lumen.TaskModule.__init__(self)
            self.net = Regression().net

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    path = train_task(tmp_path, Forgetful(1))
    with pytest.raises(CheckpointMismatch, match=r"needed.*save_hyperparameters"):
        Forgetful.load_from_checkpoint(path)


def test_missing_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        Rich.load_from_checkpoint(tmp_path)


@dataclass
class Settings:
    depth: int = 2
    name: str = "x"


def test_hyperparameters_are_collected_through_inheritance():
    class Base(lumen.TaskModule):
        def __init__(self, lr, *, momentum=0.9):
            super().__init__()
            self.save_hyperparameters(ignore="secret")

    class Child(Base):
        def __init__(self, width, lr=0.1, secret=None, **rest):
            super().__init__(lr * 2)

    assert Child(3, secret=4, deep=5).hparams == {"width": 3, "lr": 0.1, "momentum": 0.9, "deep": 5}


@pytest.mark.parametrize("kind", [dict, argparse.Namespace, types.SimpleNamespace])
def test_hyperparameters_may_be_one_namespace(kind):
    class Kept(lumen.TaskModule):
        def __init__(self, config):
            super().__init__()
            self.save_hyperparameters(config, ignore="left_out")

    assert Kept(kind(width=3, left_out=4)).hparams == {"width": 3}


@pytest.mark.parametrize("given", [5, 0.5, None, [1]])
def test_unnamed_values_are_no_hyperparameters(given):
    class Kept(lumen.TaskModule):
        def __init__(self, given):
            super().__init__()
            self.save_hyperparameters(given)

    with pytest.raises(
        ConfigError, match="expected names of arguments, or a dictionary, namespace or dataclass, found"
    ):
        Kept(given)


@pytest.mark.parametrize("base_first", [True, False])
def test_hyperparameter_ignored_by_subclass_is_ignored_by_base(base_first):
    class Base(lumen.TaskModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, width, module):
            if base_first:
                super().__init__(width)
            else:
                nn.Module.__init__(self)
            self.save_hyperparameters(ignore=["module"])
            if not base_first:
                super().__init__(width)

    assert Derived(3, nn.ReLU()).hparams == {"width": 3}


def test_hyperparameters_can_be_kept_from_loggers(tmp_path):
    class Kept(Regression):
        def __init__(self, token, lr=0.1):
            super().__init__()
            self.save_hyperparameters("token", logger=False)

    class Noting(lumen.Logger):
        def open(self, directory, *, resumed):
            pass

        def log_hyperparams(self, params):
            self.params = params["model"]

        def log_metrics(self, metrics, step, epoch):
            pass

    noting = Noting()
    quiet_trainer(tmp_path, max_steps=1, logger=noting).fit(Kept("secret"), loader())
    assert "token" not in noting.params
    assert "lr" in noting.params
    kept = Kept.load_from_checkpoint(tmp_path / "runs/run", token="another")
    assert kept.hparams["token"] == "another"


def test_hyperparameters_by_name_dictionary_and_dataclass():
    class Named(lumen.TaskModule):
        def __init__(self, a, b):
            super().__init__()
            self.save_hyperparameters("b")

    class Given(lumen.DataModule):
        def __init__(self, settings):
            self.save_hyperparameters(settings)

    assert Named(1, 2).hparams == {"b": 2}
    assert Given({"x": 1}).hparams.x == 1
    assert Given(Settings()).hparams == {"depth": 2, "name": "x"}
    with pytest.raises(AttributeError, match="no hyperparameter is named 'y'; the hyperparameters are: x"):
        _ = Given({"x": 1}).hparams.y


@pytest.mark.parametrize("name", ["auto", "last", "best"])
def test_path_named_like_a_setting_is_a_path(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"no valid checkpoint found in {name}"):
        Regression.load_from_checkpoint(name)
    bare_trainer(tmp_path, max_steps=1, callbacks=Saving(1, tmp_path / name / "step-00000001")).fit(
        Regression(), loader()
    )
    Regression.load_from_checkpoint(name)


# ---------------------------------------------------------------------- hooks of modules


class Growing(nn.Module):
    """Module with a memory bank that has a row for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("bank", torch.empty(0, FEATURES))

    def forward(self, inputs):
        if self.training:
            self.bank = torch.cat([self.bank, inputs.detach()])
        return self.layer(inputs)


class Resizing(Growing):
    def _load_from_state_dict(self, state, prefix, *rest):
        self.bank = torch.empty_like(state[prefix + "bank"])
        super()._load_from_state_dict(state, prefix, *rest)


class Hooked(Growing):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(self.resize)

    @staticmethod
    def resize(module, state, prefix, *_):
        module.bank = torch.empty_like(state[prefix + "bank"])


class Banked(lumen.TaskModule):
    def __init__(self, kind=Growing):
        super().__init__()
        torch.manual_seed(0)
        self.net = kind()

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch):
        self.log("rows", float(len(self.net.bank)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [Resizing, Hooked])
def test_module_load_hooks_resize_tensors_before_loading(tmp_path, kind):
    def fit(folder, steps):
        task = Banked(kind)
        trainer = quiet_trainer(tmp_path / folder, max_steps=steps, resume="auto")
        trainer.fit(task, loader())
        return task, trainer

    whole, _ = fit("whole", 9)
    fit("parts", 4)
    resumed, trainer = fit("parts", 9)
    assert whole.state_dict().keys() == resumed.state_dict().keys()
    assert all(torch.equal(each, resumed.state_dict()[name]) for name, each in whole.state_dict().items())
    loaded = Banked.load_from_checkpoint(trainer.run_directory, kind=kind)
    assert torch.equal(loaded.net.bank, whole.net.bank)
    found = bare_trainer(tmp_path).validate(Banked(kind), loader(), trainer.run_directory)
    assert found[0]["rows"] == len(whole.net.bank)
    with pytest.raises(CheckpointMismatch, match=r"net\.bank: .* saved, \(0, .* in the model"):
        Banked.load_from_checkpoint(trainer.run_directory)


def test_an_overridden_state_dict_is_named(tmp_path, caplog):
    class Part(Regression):
        def state_dict(self, *args, **kwargs):
            return {"only": torch.zeros(1)}

    quiet_trainer(tmp_path, max_steps=1, log_level="WARNING").fit(Part(), loader())
    assert (
        caplog.text.count("Lumen does not call Part.state_dict: checkpoints contain all parameters and buffers.") == 1
    )


class HoldingObjects(Regression):
    def __init__(self, net, make_optimizer, nested, width=3):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        return self.hparams.make_optimizer(self.parameters())


def test_objects_in_hyperparameters_are_asked_for(tmp_path, caplog):
    """Templates for Hydra save the network and the optimizer as hyperparameters."""

    def make(**changed):
        arguments = {
            "net": nn.Linear(2, 2),
            "make_optimizer": partial(torch.optim.SGD, lr=0.1),
            "nested": {"act": nn.ReLU},
        }
        return HoldingObjects(**arguments | changed)

    trainer, task = quiet_trainer(tmp_path, max_steps=2, log_level="INFO"), make()
    trainer.fit(task, loader(16, 8))
    assert "checkpoints omit objects in hparams: net, make_optimizer, nested." in caplog.text
    path = trainer.checkpoint_callback.last_model_path
    state = json.loads(Path(path, "state.json").read_text())["hyperparameters"]
    assert state["net"] == {"$object": "Linear"}
    assert state["nested"] == {"act": {"$object": "the class ReLU"}}
    with pytest.raises(CheckpointMismatch) as raised:
        HoldingObjects.load_from_checkpoint(path)
    assert "HoldingObjects.load_from_checkpoint(PATH, net=..., make_optimizer=..., nested=...)" in str(raised.value)
    loaded = HoldingObjects.load_from_checkpoint(path, net=None, make_optimizer=None, nested=None)
    assert loaded.hparams.width == 3
    assert all(map(torch.equal, loaded.parameters(), task.parameters()))
    caplog.clear()
    quiet_trainer(tmp_path, max_steps=3, log_level="INFO", resume="auto").fit(make(), loader(16, 8))
    assert "model.net" not in caplog.text
    quiet_trainer(tmp_path, max_steps=4, log_level="INFO", resume="auto").fit(make(net=2), loader(16, 8))
    assert "model.net was 'Linear', is 2" in caplog.text
