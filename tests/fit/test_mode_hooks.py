"""A task may say itself which modules are in eval mode during an evaluation, and how they are left."""

import logging

import pytest
import torch

from tests.helpers.tasks import Regression, bare_trainer, loader

STAGES = {"validate": "validation", "test": "test", "predict": "predict"}


class Seen(Regression):
    """Notes the modes of its dropout and of the whole in each step."""

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
def test_what_the_eval_hook_leaves_in_train_mode_is_evaluated_so_and_all_is_put_back(tmp_path, stage):
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


def test_a_train_hook_that_does_nothing_leaves_eval_mode_and_that_is_said(tmp_path, caplog):
    task = with_hooks(on_validation_model_train=lambda self: None)
    with caplog.at_level(logging.WARNING, "lumen"):
        trainer = bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0, log_level="WARNING")
        trainer.fit(task, loader(8, 8), loader(8, 8))
    assert task.seen == [(True, True), (False, False)]
    assert not task.training
    assert "or on_*_model_train left them so: the task" in caplog.text


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
def test_gradients_are_dropped_before_a_validation_by_who_asks_for_it(tmp_path, is_defined):
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
