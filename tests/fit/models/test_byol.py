"""Example that learns features without labels."""

import pytest
import torch

import lumen
from datamodules.views import TwoViews, seen
from models.byol import BYOL
from tests.helpers.cli import run_model
from tests.helpers.tables import read_rows
from tests.helpers.tasks import bare_trainer, quiet_trainer


def make_byol(**options):
    torch.manual_seed(0)
    return BYOL(**options)


def test_augmented_views_differ_and_hide_a_square():
    torch.manual_seed(0)
    image = torch.ones(1, 28, 28)
    one, other = seen(image, 20.0), seen(image, 20.0)
    assert not torch.equal(one, other)
    assert one.shape == image.shape
    hidden = one[0].unfold(0, 8, 1).unfold(1, 8, 1).flatten(2).amax(-1)
    assert (hidden == 0).any()
    assert ((one > 0) & (one < 1)).any()  # rotated and stretched: its edges are grey


class Followed(lumen.Callback):
    """Callback that records the parameters of the student after each step."""

    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, task, *_):
        self.states.append([each.detach().clone() for each in task.student.parameters()])


def train(folder, steps, callback=None, **options):
    task, data = make_byol(features=8, width=8), TwoViews(batch_size=16)
    options = {"max_steps": steps, "limit_train_batches": 4, "limit_val_batches": 0} | options
    trainer = quiet_trainer(folder, callbacks=callback, **options)
    trainer.fit(task, data)
    return task, trainer


def test_teacher_averages_student_without_optimizer(tmp_path):
    expected = [each.detach().clone() for each in make_byol(features=8, width=8).student.parameters()]
    followed = Followed()
    task, trainer = train(tmp_path, 6, followed)
    for state in followed.states:
        for theirs, ours in zip(expected, state, strict=True):
            theirs.lerp_(ours, 1 - 0.98)
    found = list(task.teacher.parameters())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    moved = {id(each) for each in trainer.optimizers[0].state}
    assert moved == {id(each) for each in task.parameters() if each.requires_grad}
    assert not moved & {id(each) for each in found}


@pytest.mark.parametrize("step", [3, 4])
def test_resumed_run_equals_uninterrupted_run(tmp_path, step):
    whole, _ = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", step)
    again, _ = train(tmp_path / "parts", 6, resume="auto")
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.slow
def test_one_epoch_improves_the_probe(tmp_path):
    task, data = make_byol(), TwoViews(batch_size=128)
    (before,) = bare_trainer(tmp_path).validate(task, data)
    trainer = bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(task, data)
    assert before["val_probe"] < 0.6
    assert float(trainer.callback_metrics["val_probe"]) > before["val_probe"] + 0.05


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_probe_reaches_80_percent_from_100_labels(tmp_path):
    run_model("fit", "byol", tmp_path)
    found = [float(row["val_probe"]) for row in read_rows(tmp_path / "byol/metrics.csv") if row["val_probe"]]
    assert max(found) >= 0.8
