"""Data that depends on training, like the experience of a policy: read after the step before is done."""

import re

import pytest
import torch
from torch.utils.data import DataLoader

from lumen.errors import DataError
from tests.helpers.following_training import Answers, Asking, Long
from tests.helpers.tasks import bare_trainer, loader, quiet_trainer


def test_each_batch_sees_the_previous_update(tmp_path):
    task = Asking()
    bare_trainer(tmp_path, max_epochs=3).fit(task)
    assert task.met == task.held
    assert len(set(task.met)) == len(task.met) == 12
    assert task.data.given == 12


def test_other_loaders_are_prefetched_one_step(tmp_path):
    class Ahead(Long):
        follows_training = False

    task = Asking(Ahead)
    bare_trainer(tmp_path, max_epochs=1).fit(task)
    assert task.met == [1.0, *task.held[:3]]


def test_micro_batches_of_a_step_see_same_weights(tmp_path):
    task = Asking(length=6)
    bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(task)
    assert task.met == task.held
    assert len(set(task.met)) == 3


@pytest.mark.parametrize("step", [1, 3, 4, 6, 8])
def test_resumed_run_equals_uninterrupted_run(tmp_path, step):
    whole, first, rest = Asking(), Asking(), Asking()
    bare_trainer(tmp_path, max_steps=11).fit(whole)
    quiet_trainer(tmp_path, max_steps=step).fit(first)
    quiet_trainer(tmp_path, max_steps=11, resume="auto").fit(rest)
    assert first.met + rest.met == whole.met
    assert first.held + rest.held == whole.held
    assert torch.equal(rest.weight, whole.weight)
    assert rest.data.given == 11


def test_endless_loader_ends_with_run_or_limit(tmp_path):
    task = Asking(Answers, length=10**9)
    bare_trainer(tmp_path, max_steps=7).fit(task)
    assert task.data.given == 7
    task = Asking(Answers, length=10**9)
    trainer = bare_trainer(tmp_path, max_epochs=2, limit_train_batches=3)
    trainer.fit(task)
    assert (trainer.current_epoch, trainer.global_step, task.data.given) == (2, 6, 6)


def test_unknown_end_raises_with_a_fix(tmp_path):
    found = re.escape("ended after 4 batches of the epoch, but the loader has no length")
    with pytest.raises(DataError, match=rf"{found}.*__len__.*limit_train_batches"):
        bare_trainer(tmp_path, max_epochs=1).fit(Asking(Answers))

    class TooLong(Answers):
        def __len__(self):
            return 5

    with pytest.raises(
        DataError, match="ended after 4 batches of the epoch, but the length of the loader, or a limit, is 5"
    ):
        bare_trainer(tmp_path, max_epochs=1).fit(Asking(TooLong))


def test_workers_cannot_follow(tmp_path):
    with pytest.raises(DataError, match=r"num_workers=1: a worker has a copy of the model that is never trained"):
        bare_trainer(tmp_path, max_epochs=1).fit(Asking(num_workers=1))


def test_one_of_several_loaders_cannot_follow(tmp_path):
    class Both(Asking):
        def train_dataloader(self):
            return [super().train_dataloader(), loader()]

    with pytest.raises(DataError, match="is one of several training loaders, which Lumen reads a step ahead"):
        bare_trainer(tmp_path, max_epochs=1).fit(Both())


def test_evaluation_needs_no_length(tmp_path):
    class Evaluating(Asking):
        def validation_step(self, batch):
            self.log("value", batch[0])

    (values,) = bare_trainer(tmp_path).validate(Evaluating(), DataLoader(Answers(Asking()), batch_size=None))
    assert values["value"] == 1.0
