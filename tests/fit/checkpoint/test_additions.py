"""Additions of callbacks and the task to a checkpoint: `on_load_checkpoint` gets what `on_save_checkpoint` added."""

import re

import pytest
import torch
from torch import nn

import lumen
from lumen.checkpoint.user_state import INSTEAD
from lumen.errors import CheckpointError, ConfigError
from tests.helpers.checkpoint_additions import Average
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


class Remembering(Regression):
    memory = None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = "the task's own"

    def on_load_checkpoint(self, checkpoint):
        self.memory = dict(checkpoint)


def fit(tmp_path, *callbacks, task=None, **options):
    trainer = quiet_trainer(tmp_path, **{"max_steps": 3, "callbacks": list(callbacks)} | options)
    trainer.fit(Remembering() if task is None else task, loader())
    return trainer


def test_average_of_a_callback_resumes_exactly(tmp_path):
    straight, again, task = Average(), Average(), Remembering()
    fit(tmp_path / "straight", straight, max_steps=6)
    fit(tmp_path, Average())
    fit(tmp_path, again, task=task, max_steps=6, resume="auto")
    assert again.loaded_steps == (3,)
    assert task.memory == {"average": "the task's own"}
    assert all(torch.equal(again.average[name], each) for name, each in straight.average.items())


class Keeping(lumen.Callback):
    def __init__(self, value, name="one"):
        self.value, self.name = value, name

    def on_save_checkpoint(self, trainer, task, checkpoint):
        assert dict(checkpoint) == {}
        checkpoint["value"] = self.value

    def on_load_checkpoint(self, trainer, task, checkpoint):
        self.value = checkpoint["value"]


class Named(Keeping):
    @property
    def state_key(self):
        return f"Named {self.name}"


def test_callbacks_may_save_the_same_key(tmp_path):
    fit(tmp_path, Keeping(1), Named(torch.tensor(2), "a"), Named([3], "b"))
    callbacks = [Named(0, "b"), Keeping(0), Named(0, "a")]
    fit(tmp_path, *callbacks, max_steps=4, resume="auto")
    assert [each.value for each in callbacks] == [[3], 1, torch.tensor(2)]


def test_duplicate_state_key_raises_on_save_and_load(tmp_path):
    with pytest.raises(ConfigError, match="the same state_key: Keeping"):
        fit(tmp_path / "saved", Keeping(1), Keeping(2))
    fit(tmp_path, Keeping(1))
    with pytest.raises(ConfigError, match="the same state_key: Keeping"):
        fit(tmp_path, Keeping(1), Keeping(2), max_steps=4, resume="auto")


def test_additions_come_at_the_moments_of_lightning(tmp_path):
    events = []

    class Noting(lumen.Callback):
        def setup(self, trainer, task, stage):
            events.append("setup")

        def state_dict(self):
            events.append("state_dict")
            return {"state": 1}

        def load_state_dict(self, state):
            events.append("load_state_dict")

        def on_save_checkpoint(self, trainer, task, checkpoint):
            events.append("callback saves")
            checkpoint["weight"] = task.net[0].weight

        def on_load_checkpoint(self, trainer, task, checkpoint):
            assert torch.equal(checkpoint["weight"], task.net[0].weight)
            events.append("callback loads")

    class Task(Regression):
        def on_save_checkpoint(self, checkpoint):
            events.append("task saves")

        def on_load_checkpoint(self, checkpoint):
            events.append("task loads")

        def configure_optimizers(self):
            events.append("configure_optimizers")
            return super().configure_optimizers()

    saver = lumen.ModelCheckpoint(every_n_train_steps=3)
    fit(tmp_path, Noting(), saver, task=Task())
    assert events[-3:] == ["state_dict", "callback saves", "task saves"]
    events.clear()
    fit(tmp_path, Noting(), task=Task(), max_steps=4, resume="auto")
    assert events[:5] == ["setup", "task loads", "callback loads", "configure_optimizers", "load_state_dict"]


def test_additions_are_loaded_with_their_part(tmp_path):
    path = fit(tmp_path, Average()).checkpoint_callback.last_model_path
    for parts, loaded in ((["model"], False), (["model", "progress"], True)):
        average = Average()
        fit(tmp_path, average, resume=path, resume_parts=parts, max_steps=4)
        assert hasattr(average, "loaded_steps") == loaded
    average = Average()
    bare_trainer(tmp_path, callbacks=[average]).validate(Remembering(), loader(), ckpt_path=path)
    assert not hasattr(average, "loaded_steps")


def test_return_value_of_on_save_checkpoint_is_saved(tmp_path):
    class Returning(lumen.Callback):
        def on_save_checkpoint(self, trainer, task, checkpoint):
            return {"best": 3.5}

        def on_load_checkpoint(self, trainer, task, callback_state):
            self.best = callback_state["best"]

    returning = Returning()
    fit(tmp_path, Returning())
    fit(tmp_path, returning, max_steps=4, resume="auto")
    assert returning.best == 3.5


def test_removed_callback_warns_and_new_gets_empty_dictionary(tmp_path, caplog):
    class New(lumen.Callback):
        def on_load_checkpoint(self, trainer, task, checkpoint):
            self.found = dict(checkpoint), checkpoint.get("x", 7), "x" in checkpoint
            checkpoint["x"]

    fit(tmp_path, Average())
    with pytest.raises(KeyError, match=re.escape("New added no 'x' to this checkpoint; it added []")):
        fit(tmp_path, new := New(), max_steps=4, resume="auto", log_level="WARNING")
    assert new.found == ({}, 7, False)
    fit(tmp_path, max_steps=4, resume="auto", log_level="WARNING")
    assert "holds additions of Average, which this run does not have" in caplog.text


# ---------------------------------------------------------------------- refused additions


class Trained(Regression):
    steps = 0

    def training_step(self, batch):
        self.steps += 1
        return super().training_step(batch)


class Adding(lumen.Callback):
    def __init__(self, adding):
        self.adding = adding

    def on_save_checkpoint(self, trainer, task, checkpoint):
        self.adding(checkpoint)


class AddingTask(Trained):
    def on_save_checkpoint(self, checkpoint):
        self.adding(checkpoint)


def catch_error(tmp_path, adding, *, by):
    """Return the error of a run in which a callback or the task adds something; no step has been trained."""
    task = AddingTask() if by == "task" else Trained()
    task.adding = adding
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, *([Adding(adding)] if by == "callback" else []), task=task)
    assert task.steps == 0
    return str(caught.value)


@pytest.mark.parametrize(("by", "where"), [("callback", "on_save_checkpoint.Adding.it.deep"), ("task", "task.it.deep")])
def test_unsavable_addition_names_owner_and_key_before_training(tmp_path, by, where):
    message = catch_error(tmp_path, lambda checkpoint: checkpoint.update(it={"deep": nn.Linear(1, 1)}), by=by)
    assert f"{where}: an object of type Linear cannot be saved" in message


ASKING = {
    "[]": lambda checkpoint, key: checkpoint[key],
    "get": lambda checkpoint, key: checkpoint.get(key, {}),
    "pop": lambda checkpoint, key: checkpoint.pop(key, None),
    "del": lambda checkpoint, key: checkpoint.__delitem__(key),
    "=": lambda checkpoint, key: checkpoint.update({key: {}}),
}


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize(("by", "owner"), [("callback", "Adding"), ("task", "AddingTask")])
def test_keys_of_lightning_checkpoints_raise_with_their_replacement(tmp_path, ask, by, owner):
    message = catch_error(tmp_path, lambda checkpoint: ASKING[ask](checkpoint, "state_dict"), by=by)
    assert message == f"{owner}: checkpoint['state_dict'] does not exist. {INSTEAD['state_dict']}"


def test_every_key_of_lightnings_checkpoints_has_its_answer(tmp_path):
    of_lightning = {"state_dict", "optimizer_states", "lr_schedulers", "callbacks", "epoch", "global_step", "loops"}
    of_lightning |= {"hyper_parameters", "hparams_name", "pytorch-lightning_version", "datamodule_hyper_parameters"}
    assert of_lightning < INSTEAD.keys()

    class Asking(lumen.Callback):
        def on_load_checkpoint(self, trainer, task, checkpoint):
            for key, answer in INSTEAD.items():
                with pytest.raises(CheckpointError, match=re.escape(answer)):
                    checkpoint[key]
            self.asked = True

    asking = Asking()
    fit(tmp_path)
    fit(tmp_path, asking, max_steps=4, resume="auto")
    assert asking.asked


# ---------------------------------------------------------------------- states that appear late


class Late(lumen.Callback):
    """Callback that creates its state in one of its hooks."""

    def __init__(self, hook, ask="state_dict"):
        setattr(self, hook, self.make)
        self.hook = hook
        if ask == "state_dict":
            self.state_dict = lambda: {"weight": self.weight, "mean": self.total / self.steps}
            self.load_state_dict = self.take
        else:
            self.on_save_checkpoint = lambda trainer, task, checkpoint: checkpoint.update(
                weight=self.weight, mean=self.total / self.steps
            )
            self.on_load_checkpoint = lambda trainer, task, checkpoint: self.take(checkpoint)
        self.total = self.steps = 0
        self.taken = None

    def make(self, trainer, task, *_):
        self.weight = task.net[0].weight.detach().clone()

    def on_train_batch_end(self, *_):
        self.steps += 1
        self.total += 2

    def take(self, state):
        self.taken = state["mean"]


LATE = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start")


@pytest.mark.parametrize("ask", ["state_dict", "on_save_checkpoint"])
@pytest.mark.parametrize("hook", LATE)
def test_state_may_be_created_in_any_earlier_hook(tmp_path, hook, ask):
    fit(tmp_path, late := Late(hook, ask))
    assert late.taken is None
    fit(tmp_path, late := Late(hook, ask), max_steps=4, resume="auto")
    assert late.taken == 2


@pytest.mark.parametrize("hook", LATE)
def test_late_state_may_be_missing_on_resume(tmp_path, hook, caplog):
    fit(tmp_path)
    fit(tmp_path, late := Late(hook), max_steps=4, resume="auto", log_level="INFO")
    assert late.taken is None
    assert "does not hold all states: Late starts with a new state" in caplog.text


def test_a_data_modules_state_may_come_with_training(tmp_path):
    class Data(lumen.DataModule):
        def train_dataloader(self):
            return loader()

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.batches = getattr(self, "batches", 0) + 1
            return batch

        def state_dict(self):
            return {"batches": self.batches}

        def load_state_dict(self, state):
            self.batches = state["batches"]

    for steps in (3, 5):
        trainer = quiet_trainer(tmp_path, max_steps=steps, resume="auto")
        trainer.fit(Regression(), data := Data())
    assert data.batches == 5


def test_failing_state_dict_warns_then_raises_on_save(tmp_path, caplog):
    class Broken(lumen.Callback):
        def state_dict(self):
            return {"x": self.never_made}

    task = Trained()
    with pytest.raises(AttributeError, match="never_made"):
        fit(tmp_path, Broken(), task=task, log_level="WARNING")
    assert task.steps == 3
    assert "cannot check before training that all states can be saved" in caplog.text
    assert "test_additions.py line" in caplog.text


def test_unsavable_state_raises_before_training(tmp_path):
    class Module(lumen.Callback):
        def state_dict(self):
            return {"x": nn.Linear(1, 1)}

    task = Trained()
    with pytest.raises(CheckpointError, match=r"^callbacks\..*Module\.x: an object of type Linear"):
        fit(tmp_path, Module(), task=task)
    assert task.steps == 0
