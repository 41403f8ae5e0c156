"""Finetuning: layers that are frozen at first and trained from some epoch on, with a separate parameter group."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, SequentialLR, StepLR

import lumen
from lumen.errors import ConfigError
from tests.helpers.finetuning import EPOCHS, Backbone, finetune, finetune_by_hand
from tests.helpers.group import assert_equal
from tests.helpers.tasks import bare_trainer, loader


@pytest.mark.parametrize("train_bn", [True, False])
def test_backbone_finetuning_equals_manual_unfreezing(tmp_path, train_bn):
    ours, rates = finetune(tmp_path, lumen.BackboneFinetuning(2, train_bn=train_bn))
    theirs, expected = finetune_by_hand(2, train_bn)
    assert_equal(ours, theirs)
    assert [len(each) for each in rates] == [1, 1, 2, 2, 2, 2]
    assert rates == expected


def test_rates_are_those_that_were_asked_for(tmp_path):
    callback = lumen.BackboneFinetuning(1, lambda epoch: epoch, backbone_initial_lr=0.004, should_align=False)
    _, rates = finetune(tmp_path, callback)
    assert [len(each) for each in rates] == [1, 2, 2, 2, 2, 2]
    np.testing.assert_allclose([each[1] for each in rates[1:]], [0.004 * factor for factor in (1, 3, 12, 60, 360)])


class FreezesLate(lumen.BaseFinetuning):
    """Callback that freezes a BatchNorm layer in the second epoch."""

    def freeze_before_training(self, task):
        pass

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 1:
            self.freeze(task.backbone[1], train_bn=False)


class ThawsLate(lumen.BaseFinetuning):
    """Callback that unfreezes the statistics of a BatchNorm layer in the second epoch."""

    def freeze_before_training(self, task):
        self.freeze(task.backbone[1], train_bn=False)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(task.backbone[1])


@pytest.mark.parametrize("kind", [FreezesLate, ThawsLate])
def test_resumed_norms_track_statistics_as_before(tmp_path, kind):
    def run(folder, steps):
        task = Backbone()
        task.backbone[1] = nn.BatchNorm1d(8, affine=False).double()  # none of its parameters is trained
        return finetune(tmp_path / folder, kind(), task, steps)[0]

    whole = run("whole", 20)
    run("parts", 10)
    assert_equal(whole, run("parts", 20), 0.0)


class ByLayers(lumen.BaseFinetuning):
    """Callback that unfreezes the last layer of the backbone in the second epoch, and the first one in the third."""

    def freeze_before_training(self, task):
        self.freeze([task.backbone[:3], [task.backbone[3]]], train_bn=False)

    def finetune_function(self, task, epoch, optimizer):
        if epoch in (1, 2):
            layer = task.backbone[3 if epoch == 1 else 0]
            self.unfreeze_and_add_param_group(layer, optimizer, name=f"epoch {epoch}")


class Moved(lumen.Callback):
    """Callback that records the names of the tensors that changed in an epoch."""

    def __init__(self):
        self.by_epoch, self.before = [], None

    def on_train_epoch_start(self, trainer, task):
        self.before = {name: each.clone() for name, each in task.state_dict().items()}

    def on_train_epoch_end(self, trainer, task):
        now = task.state_dict()
        self.by_epoch.append({name for name in now if not torch.equal(now[name], self.before[name])})


def test_layers_are_unfrozen_one_after_another(tmp_path):
    task, moved = Backbone(), Moved()
    trainer = bare_trainer(tmp_path, max_epochs=3, callbacks=[ByLayers(), moved])
    trainer.fit(task, loader(dtype=torch.float64))
    head = {"head.weight", "head.bias"}
    first = head | {"backbone.3.weight", "backbone.3.bias"}
    assert moved.by_epoch == [head, first, first | {"backbone.0.weight", "backbone.0.bias"}]
    groups = trainer.optimizers[0].param_groups
    assert [group.get("name") for group in groups] == [None, "epoch 1", "epoch 2"]
    assert [group["lr"] for group in groups] == [0.02, 0.002, 0.002]


def test_parameters_of_modules_are_told_apart():
    task = Backbone()
    lumen.BaseFinetuning.freeze(task.backbone, train_bn=True)
    kept = [*lumen.BaseFinetuning.filter_params([task.backbone, task.backbone])]
    assert {id(each) for each in kept} == {id(each) for each in task.backbone[1].parameters()}
    assert len(kept) == 2
    assert len([*lumen.BaseFinetuning.filter_params(task.backbone, requires_grad=False)]) == 4
    assert [*lumen.BaseFinetuning.filter_params(task.backbone, train_bn=False)] == []
    lumen.BaseFinetuning.make_trainable(task.backbone)
    assert len([*lumen.BaseFinetuning.filter_params(task.backbone)]) == 6


class Everything(Backbone):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Several(Backbone):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.backbone[1].parameters(), lr=0.1)


class Joined(Backbone):
    def configure_optimizers(self):
        held = [each for each in self.parameters() if each.requires_grad]
        return lumen.optim.MultiOptimizer([torch.optim.SGD(held, lr=0.1)])


class Without(Backbone):
    def __init__(self):
        super().__init__()
        self.body = self._modules.pop("backbone")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Everything, "already has all parameters of the modules to unfreeze. In configure_optimizers"),
        (Several, "returned several optimizers, but the backbone needs a single"),
        (Joined, "returned several optimizers, but the backbone needs a single"),
        (Without, "Without has no module named backbone"),
    ],
)
def test_what_cannot_be_finetuned_says_why(tmp_path, task, said):
    with pytest.raises(ConfigError, match=said):
        finetune(tmp_path, lumen.BackboneFinetuning(100), task())


class Scheduled(Backbone):
    """Task with a schedule that has one rate for each group."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_optimizers(self):
        (optimizer,), _ = super().configure_optimizers()
        return [optimizer], [{"scheduler": SCHEDULES[self.kind](optimizer), "interval": "step"}]


SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.98**step),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=30),
    "cosine": lambda optimizer: lumen.optim.cosine(optimizer, 30, warmup=12),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: step / 12), StepLR(optimizer, 5)], [12]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_per_group_schedule_leaves_backbone_group_alone(tmp_path, kind):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=0.02)
    schedule, expected = SCHEDULES[kind](optimizer), []
    parameter.grad = torch.zeros(1)
    for _ in range(30):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    callback = lumen.BackboneFinetuning(2, backbone_initial_lr=0.001, should_align=False)
    _, rates = finetune(tmp_path / "whole", callback, Scheduled(kind))
    before_the_end = expected[5::5]  # of the rates after the last step of each epoch
    assert [each[0] for each in rates] == pytest.approx([*before_the_end, rates[-1][0]])
    assert [each[1] for each in rates[2:]] == [0.001, 0.002, 0.004, 0.008]
    ends = []
    for name, cuts in (("once", (30,)), ("parts", (8, 17, 30))):
        for steps in cuts:
            callback = lumen.BackboneFinetuning(2, backbone_initial_lr=0.001, should_align=False)
            end, _ = finetune(tmp_path / name, callback, Scheduled(kind), steps)
        ends.append(end)
    assert_equal(*ends, 0.0)


def test_a_callback_serves_one_fit_after_the_other(tmp_path):
    callback = lumen.BackboneFinetuning(2)
    first, _ = finetune(tmp_path / "first", callback)
    second, _ = finetune(tmp_path / "second", callback)
    assert_equal(first, second, 0.0)


def test_the_rates_are_logged_if_asked_for(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lumen"):
        finetune(tmp_path, lumen.BackboneFinetuning(EPOCHS - 1, verbose=True, rounding=4), log_level="INFO")
    assert f"epoch {EPOCHS - 1}: learning rate 0.01, learning rate of the backbone 0.001" in caplog.text


def test_evaluation_freezes_nothing(tmp_path):
    class Validated(Backbone):
        def validation_step(self, batch):
            self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    task = Validated()
    bare_trainer(tmp_path, callbacks=lumen.BackboneFinetuning(2)).validate(task, loader(dtype=torch.float64))
    assert all(each.requires_grad for each in task.parameters())
