"""Arguments of fit and the other calls, under Lightning's names too; the error for an unknown constructor argument."""

import re
from pathlib import Path

import numpy
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

import lumen
from lumen.errors import CheckpointError, ConfigError, DataError
from lumen.errors.lightning_names import ATTRIBUTES, INSTEAD
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Data(lumen.DataModule):
    def train_dataloader(self):
        return loader(16, 8)

    def val_dataloader(self):
        return loader(16, 8, shuffle=False)

    test_dataloader = predict_dataloader = val_dataloader


class Task(Regression):
    def test_step(self, batch):
        return self.validation_step(batch)

    def predict_step(self, batch):
        return self(batch[0])


def weights(task):
    return torch.cat([parameter.detach().ravel() for parameter in task.parameters()])


CALLS = {
    "positions": lambda trainer, task: trainer.fit(task, loader(16, 8), loader(16, 8, shuffle=False)),
    "names of loaders": lambda trainer, task: trainer.fit(
        model=task, train_dataloaders=loader(16, 8), val_dataloaders=[loader(16, 8, shuffle=False)]
    ),
    "a data module": lambda trainer, task: trainer.fit(task, Data()),
    "its name": lambda trainer, task: trainer.fit(task, datamodule=Data()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_fit_takes_what_lightnings_takes(tmp_path, call):
    whole, task = Task(), Task()
    quiet_trainer(tmp_path / "whole", max_epochs=2).fit(whole, Data())
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    call(trainer, task)
    assert torch.equal(weights(task), weights(whole))
    assert "val_loss" in trainer.callback_metrics


class FailsOnce(lumen.Callback):
    """Callback that ends the first run in its second epoch, and records the parameters with which a run begins."""

    def __init__(self):
        self.first = []

    def on_train_start(self, trainer, task):
        self.first.append(weights(task))

    def on_train_epoch_start(self, trainer, task):
        if len(self.first) == 1 and trainer.current_epoch == 1:
            raise RuntimeError("once")


@pytest.mark.parametrize(("where", "folder"), [("last", "run-2"), ("best", "run-3")])
def test_second_fit_resumes_the_trainers_own_run(tmp_path, where, folder):
    quiet_trainer(tmp_path, max_epochs=4).fit(Task(), Data())
    fails, task = FailsOnce(), Task()
    trainer = quiet_trainer(tmp_path, max_epochs=2, callbacks=[fails, lumen.ModelCheckpoint(monitor="val_loss")])
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(task, Data())
    assert trainer.run_directory.name == "run-2"
    trained = weights(task)
    trainer.fit(Task(), Data(), ckpt_path=where)
    assert torch.equal(fails.first[1], trained)
    assert trainer.current_epoch == 2
    assert trainer.run_directory.name == folder


def test_failed_fit_keeps_previous_run_directory(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    with pytest.raises(CheckpointError):
        trainer.fit(Task(), Data(), ckpt_path=tmp_path / "nothing")
    assert trainer.run_directory is None
    trainer.fit(Task(), Data())
    first = trainer.run_directory
    with pytest.raises(CheckpointError):
        trainer.fit(Task(), Data(), ckpt_path=tmp_path / "nothing")
    assert trainer.run_directory == first
    assert first.is_dir()


def test_fit_resumes_from_ckpt_path(tmp_path):
    whole, task = Task(), Task()
    quiet_trainer(tmp_path / "whole", max_epochs=4).fit(whole, Data())
    quiet_trainer(tmp_path, max_epochs=2).fit(Task(), Data())
    trainer = quiet_trainer(tmp_path, max_epochs=4)
    trainer.fit(task, Data(), ckpt_path="last")
    assert torch.equal(weights(task), weights(whole))
    assert trainer.run_directory.name == "run"
    task = Task()
    path = tmp_path / "runs/run/checkpoints/step-00000006"
    again = quiet_trainer(tmp_path / "again", max_epochs=4)
    again.fit(task, Data(), ckpt_path=path)
    assert torch.equal(weights(task), weights(whole))
    with pytest.raises(ConfigError, match=r"ckpt_path=last, but the trainer has resume=auto\. Remove"):
        quiet_trainer(tmp_path, max_epochs=4, resume="auto").fit(Task(), Data(), ckpt_path="last")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_takes_what_lightnings_takes(tmp_path, stage):
    task = Task()
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, Data())
    call = getattr(trainer, stage)
    results = [
        call(task, Data()), call(task, datamodule=Data()), call(model=task, dataloaders=loader(16, 8, shuffle=False)),
        call(task, None, datamodule=Data()), call(task, Data(), ckpt_path="last"), call(datamodule=Data()), call(),
    ]  # fmt: skip
    if stage == "predict":
        results = [torch.cat(result) for result in results]
        assert all(torch.equal(result, results[0]) for result in results)
    else:
        assert results[0][0]
        assert all(result == results[0] for result in results)


def test_evaluation_without_model_uses_best_checkpoint(tmp_path):
    class Worse(Task):
        def on_validation_epoch_end(self):
            self.log("rising", float(self.current_epoch))

    task = Worse()
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=[lumen.ModelCheckpoint(monitor="rising", keep_last=1)])
    trainer.fit(task, Data())
    trained = weights(task).clone()
    trainer.validate()
    assert not torch.equal(weights(task), trained)
    best = Worse.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert torch.equal(weights(task), weights(best))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trainer: trainer.fit(Task(), loader(), datamodule=Data()), "loaders and a datamodule were passed"),
        (lambda trainer: trainer.fit(Task(), Data(), loader()), "val_dataloaders and a DataModule were passed"),
        (lambda trainer: trainer.validate(), "no model was passed, and this trainer has had no run"),
    ],
)
def test_what_contradicts_itself_is_one_error(tmp_path, call, message):
    with pytest.raises(ConfigError, match=message):
        call(quiet_trainer(tmp_path, max_epochs=1))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", INSTEAD)
def test_lightning_only_arguments_name_their_replacement(name):
    with pytest.raises(ConfigError, match=re.escape(f"Trainer has no argument {name}. {INSTEAD[name]}")):
        lumen.Trainer(**{name: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epoch": 3}, r"Trainer has no argument max_epoch. Did you mean max_epochs"),
        ({"qwertz": 3}, r"Trainer has no argument qwertz. See help\(lumen.Trainer\)"),
        ({"max_steps": "10"}, r"Trainer: max_steps: expected an int or None, found '10'"),
        ({"max_epochs": 1.5}, r"max_epochs: expected an int or None, found 1.5"),
        ({"max_epochs": True}, r"max_epochs: expected an int or None, found True"),
        ({"check_val_every_n_epoch": 1.2}, r"check_val_every_n_epoch: expected an int or None, found 1.2"),
        ({"max_time": {"hour": 1}}, r"max_time: \{'hour': 1\} is no duration: 'hour' is an invalid .*hours: 1"),
        ({"max_time": {"hours": -1}}, r"max_time: expected a duration of at least 0 seconds, found -3600"),
        ({"gradient_clip_val": "1.0"}, r"gradient_clip_val: expected a number or None, found '1.0'"),
        ({"accumulate_grad_batches": [1]}, r"_grad_batches: expected an int or a dict of an int, found \[1\]"),
        ({"seed": "abc"}, r"seed: expected an int or None, found 'abc'"),
        ({"resume": True}, r"resume: expected a string, a path or None, found True"),
        ({"logger": 3}, r"logger: expected True or False, 'csv', .*, a Logger or a list of .* a Logger, found 3"),
        ({"callbacks": lumen.ModelSummary}, r"found the class ModelSummary. Create an object: ModelSummary\(...\)"),
        ({"strategy": lumen.DDP}, r"found the class DDP. Create an object: DDP\(...\)"),
        ({"fast_dev_run": -1}, r"fast_dev_run: must be at least 0, found -1"),
        ({"num_sanity_val_steps": -5}, r"num_sanity_val_steps: must be at least -1, found -5"),
        ({"min_epochs": -1}, r"min_epochs: must be at least 0, found -1"),
    ],
)
def test_invalid_argument_raises_at_construction(arguments, message):
    with pytest.raises(ConfigError, match=message):
        lumen.Trainer(**arguments)


@pytest.mark.parametrize("option", ["wrap", "activation_checkpointing"])
def test_fsdp_asks_for_names_of_classes(option):
    expected = rf"FSDP: {option}: expected a string, a list .*, found the class Linear.*\. Write its name: 'Linear'\."
    for given in (torch.nn.Linear, [torch.nn.Linear]):
        with pytest.raises(ConfigError, match=expected):
            lumen.FSDP(**{option: given})


class Home:
    def __fspath__(self):
        return "somewhere"


def test_containers_and_paths_of_other_kinds_are_accepted():
    """Hydra's `instantiate` passes such objects."""
    given = {"callbacks": [lumen.Timer()], "accumulate_grad_batches": {1: 2}, "logger": [lumen.CSVLogger()]}
    given = OmegaConf.create(given, flags={"allow_objects": True})
    trainer = lumen.Trainer(max_epochs=1, default_root_dir=Home(), **{name: given[name] for name in given})
    assert trainer.default_root_dir == Path("somewhere")
    assert [type(each) for each in trainer.loggers] == [lumen.CSVLogger]
    assert [type(each) for each in trainer.callbacks if isinstance(each, lumen.Timer)] == [lumen.Timer]
    assert trainer.plan.accumulate == {0: 1, 1: 2}
    with pytest.raises(ConfigError, match=r"callbacks: expected a list of a Callback, .*, found \[1\]\."):
        lumen.Trainer(max_epochs=1, callbacks=OmegaConf.create([1]))


class Configured(Regression):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_of_omegaconf_load_resolved(tmp_path):
    config = OmegaConf.create({"net": {"widths": [4, 2]}, "depth": "${net.widths[1]}"})
    trainer, task = quiet_trainer(tmp_path, max_steps=1), Configured(config)
    trainer.fit(task, loader(16, 8))
    assert task.hparams.config.net.widths[0] == 4
    loaded = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    assert OmegaConf.to_container(loaded.hparams.config, resolve=False) == {"net": {"widths": [4, 2]}, "depth": 2}


def test_an_argument_without_its_name_is_one_error():
    with pytest.raises(ConfigError, match=r"Trainer: takes 1 positional argument|Trainer: too many positional"):
        lumen.Trainer(10)


def test_numbers_of_other_libraries_are_numbers():
    trainer = lumen.Trainer(max_epochs=numpy.int64(3), gradient_clip_val=numpy.float32(0.5), limit_val_batches=1)
    assert (trainer.max_epochs, trainer.plan.clip_norm) == (3, 0.5)


# ---------------------------------------------------------------------- attributes


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_lightning_only_attributes_name_their_replacement(name):
    trainer = lumen.Trainer(max_epochs=1)
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError, match=re.escape(f"Trainer has no attribute {name}. {ATTRIBUTES[name]}")):
        getattr(trainer, name)


def test_what_to_read_instead_is_there(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(Task(), Data())
    words = set(re.findall(r"\btrainer((?:\.[a-z_]+)+)", " ".join(ATTRIBUTES.values())))
    for word in words:
        eval(f"trainer{word}")


def test_misspelled_attribute_is_suggested_and_errors_pass_through():
    trainer = lumen.Trainer(max_epochs=1)
    with pytest.raises(AttributeError, match=r"Trainer has no attribute curent_epoch. Did you mean current_epoch"):
        trainer.curent_epoch  # noqa: B018
    with pytest.raises(AttributeError, match=r"^Trainer has no attribute qwertz\.$"):
        trainer.qwertz = trainer.qwertz
    trainer.strategy = object()
    with pytest.raises(AttributeError, match="'object' object has no attribute 'processes'"):
        trainer.world_size  # noqa: B018


def test_a_task_knows_its_process_and_its_loggers(tmp_path):
    class Asking(Regression):
        def training_step(self, batch):
            self.found = self.global_rank, self.local_rank, self.loggers, self.optimizers(use_pl_optimizer=False)
            return super().training_step(batch)

    trainer, task = quiet_trainer(tmp_path, max_steps=1), Asking()
    assert (task.global_rank, task.local_rank, task.loggers) == (0, 0, [])
    trainer.fit(task, loader())
    assert task.found == (0, 0, trainer.loggers, trainer.optimizers[0])
    assert (trainer.local_rank, trainer.node_rank, trainer.num_nodes) == (0, 0, 1)


# ---------------------------------------------------------------------- loaders refused by torch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(range(3), 0), "got batch_size=0. Set batch_size to at least 1"),
        (lambda: DataLoader([], 4, shuffle=True), "got num_samples=0. Shuffling needs a data set with samples"),
    ],
)
def test_loader_rejected_by_torch_names_its_owner(tmp_path, make, message):
    class Empty(lumen.DataModule):
        def train_dataloader(self):
            return make()

    class Bringing(Regression):
        train_dataloader = Empty.train_dataloader

    for arguments in ((Regression(), Empty()), (Bringing(),)):
        owner = type(arguments[-1]).__name__
        with pytest.raises(DataError, match=f"train_dataloader of {owner} cannot make its loader: .*{message}"):
            quiet_trainer(tmp_path, max_steps=1).fit(*arguments)


# ---------------------------------------------------------------------- the environment


def test_environment_variables_fill_missing_arguments(monkeypatch, caplog):
    caplog.set_level("INFO", logger="lumen")
    values = {"MAX_EPOCHS": "3", "LIMIT_VAL_BATCHES": "0.5", "PRECISION": "bf16", "LOGGER": "false", "MAX_TIME": "null"}
    for name, value in values.items():
        monkeypatch.setenv(f"LUMEN_TRAINER__{name}", value)
    trainer = lumen.Trainer(max_epochs=2)
    assert (trainer.max_epochs, trainer.limit_val_batches, trainer.precision, trainer.loggers) == (2, 0.5, "bf16", [])
    assert "Trainer: precision=bf16 comes from the environment variable LUMEN_TRAINER__PRECISION" in caplog.text
    assert "max_epochs" not in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "PL_TRAINER_MAX_EPOCHS",
            "3",
            "PL_TRAINER_MAX_EPOCHS is not read. Write LUMEN_TRAINER__MAX_EPOCHS, or unset it",
        ),
        ("LUMEN_TRAINER__EPOCHS", "3", "LUMEN_TRAINER__EPOCHS: Trainer has no argument epochs. Unset it"),
        ("LUMEN_TRAINER__MAX_EPOCHS", "many", "max_epochs: expected an int or None, found 'many'"),
        ("LUMEN_TRAINER__DEVICES", "[1", r"LUMEN_TRAINER__DEVICES: '[1' is not a YAML value"),
    ],
)
def test_invalid_environment_variable_is_one_error(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        lumen.Trainer()


def test_accumulate_grad_batches_is_the_current_value(tmp_path):
    found = []

    class Reading(Regression):
        def training_step(self, batch):
            found.append(self.trainer.accumulate_grad_batches)
            return super().training_step(batch)

    trainer = quiet_trainer(tmp_path, max_epochs=3, accumulate_grad_batches={0: 1, 2: 4})
    assert trainer.accumulate_grad_batches == 1
    trainer.fit(Reading(), loader(32, 8))
    assert found == [1] * 8 + [4] * 4
    trainer = quiet_trainer(tmp_path, max_epochs=1, global_batch_size=16)
    with pytest.raises(ConfigError, match="depends on global_batch_size and the training loader"):
        trainer.accumulate_grad_batches  # noqa: B018
    trainer.fit(Reading(), loader(32, 8))
    assert found[12:] == [2] * 4
