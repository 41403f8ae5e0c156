"""Mode hooks: a task may choose which modules are in eval mode during an evaluation, and restore their modes."""

import logging

import pytest
import torch

from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

STAGES = {"validate": "validation", "test": "test", "predict": "predict"}


class Seen(Regression):
    """Task that records the modes of its dropout and of the task in each step."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.seen = []

    def note(self):
        self.seen.append((self.training, self.net[2].training))

    def training_step(self, batch):
        self.note()
        return super().training_step(batch)

    def validation_step(self, batch):
        self.note()

    def test_step(self, batch):
        self.note()

    def predict_step(self, batch):
        self.note()


def with_hooks(**hooks):
    return type("WithHooks", (Seen,), hooks)()


@pytest.mark.parametrize("stage", STAGES)
def test_eval_hook_decides_modes_and_all_are_restored(tmp_path, stage):
    def keep_dropout(self):
        self.eval()
        self.net[2].train()

    task = with_hooks(**{f"on_{STAGES[stage]}_model_eval": keep_dropout})
    task.net[0].eval()
    before = [module.training for module in task.modules()]
    getattr(bare_trainer(tmp_path), stage)(task, loader(8, 8))
    assert task.seen == [(False, True)]
    assert [module.training for module in task.modules()] == before


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_train_hook_leaves_stays(tmp_path, stage):
    def leave(self):
        self.train()
        self.net[2].eval()

    task = with_hooks(**{f"on_{STAGES[stage]}_model_train": leave})
    getattr(bare_trainer(tmp_path), stage)(task, loader(8, 8))
    assert task.seen == [(False, False)]
    assert [module.training for module in task.modules()] == [True, True, True, True, False, True]


def test_empty_train_hook_leaves_eval_mode_with_warning(tmp_path, caplog):
    task = with_hooks(on_validation_model_train=lambda self: None)
    with caplog.at_level(logging.WARNING, "lumen"):
        trainer = bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0, log_level="WARNING")
        trainer.fit(task, loader(8, 8), loader(8, 8))
    assert task.seen == [(True, True), (False, False)]
    assert not task.training
    assert "in training too: the task" in caplog.text


def test_both_hooks_with_super_change_nothing(tmp_path):
    def run(**hooks):
        task = with_hooks(**hooks)
        bare_trainer(tmp_path, max_epochs=2, seed=1).fit(task, loader(16, 8), loader(8, 8))
        return task.seen, [each.detach() for each in task.parameters()]

    hooks = ("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad")
    seen, ours = run(**{name: lambda self, name=name: getattr(Regression, name)(self) for name in hooks})
    expected, theirs = run()
    assert seen == expected
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("is_defined", [False, True])
def test_zero_grad_hook_drops_gradients_before_validation(tmp_path, is_defined):
    calls, gradients = [], []

    def zero_grad(self):
        calls.append(self.trainer.global_step)
        Regression.on_validation_model_zero_grad(self)

    def look(self):
        if not self.trainer.sanity_checking:
            gradients.append([each.grad is not None for each in self.parameters()])

    hooks = {"on_validation_model_zero_grad": zero_grad} if is_defined else {}
    task = with_hooks(on_validation_start=look, **hooks)
    trainer = bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(16, 8), loader(8, 8))
    assert gradients == [[not is_defined] * 4] * 2
    assert calls == ([2, 4] if is_defined else [])
    gradients.clear()
    trainer.validate(task, loader(8, 8))
    assert len(calls) == 2 * is_defined


def leave_one(task):
    task.net[0].eval()


def leave_all(task):
    task.eval()


def leave_a_frozen_one(task):
    task.net[0].eval().requires_grad_(False)


def keep_first_in_eval(self, mode=True):
    torch.nn.Module.train(self, mode)
    self.net[0].eval()
    return self


EVAL_THERE = {"on_train_start": lambda self: self.net[0].eval()}


@pytest.mark.parametrize(
    ("hooks", "leave", "named"),
    [
        ({}, leave_one, "net.0. fit"),
        ({}, leave_all, "the task. fit"),
        ({"train": keep_first_in_eval}, leave_all, "the task. fit"),
        ({}, leave_a_frozen_one, None),
        ({"train": keep_first_in_eval}, lambda task: task.train(), None),
        (EVAL_THERE, leave_one, None),
        (EVAL_THERE, lambda task: None, None),
        ({"on_fit_start": lambda self: self.net[0].eval()}, lambda task: None, None),
        ({"on_train_start": lambda self: self.train()}, leave_all, None),
    ],
)
def test_a_warning_names_what_was_left_in_eval(tmp_path, caplog, hooks, leave, named):
    task = with_hooks(**hooks)
    leave(task)
    with caplog.at_level(logging.WARNING, "lumen"):
        bare_trainer(tmp_path, max_steps=1, log_level="WARNING").fit(task, loader(8, 8))
    warned = [record.getMessage() for record in caplog.records if "trained in eval mode" in record.message]
    assert len(warned) == (named is not None)
    assert named != "net.0. fit" or "Write self.net[0].train() in on_train_start" in warned[0]
    assert named is None or f"running statistics: {named} keeps" in warned[0]


@pytest.mark.parametrize(("hooks", "leave", "warnings"), [({}, leave_one, 1), (EVAL_THERE, lambda task: None, 0)])
def test_a_resumed_run_warns_as_its_start_did(tmp_path, caplog, hooks, leave, warnings):
    for steps in (1, 2):
        caplog.clear()
        task = with_hooks(**hooks)
        leave(task)
        with caplog.at_level(logging.WARNING, "lumen"):
            quiet_trainer(tmp_path, max_steps=steps, resume="auto", log_level="WARNING").fit(task, loader(8, 8))
        assert caplog.text.count("trained in eval mode") == warnings
        assert not task.net[0].training
