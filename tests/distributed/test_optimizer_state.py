"""State of any optimizer: a resumed run restores it, and parameters that a hook adds are trained and saved."""

import pytest
import torch
from torch import nn

import lumen
from lumen.errors import CheckpointMismatch, TrainingError
from tests.helpers.checkpoints import is_same_tensor
from tests.helpers.group import assert_equal, catch_message, run_on_ranks
from tests.helpers.optimizer_state import (
    Around,
    Attributes,
    Finetuning,
    Global,
    OwnStateDict,
    StateOfIds,
    finetune,
    make_task,
    read_state,
    read_unsharded_state,
    train_and_resume,
    train_by_hand,
)
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_so_they_are_on_two_processes(group, tmp_path, strategy):
    ours = run_on_ranks(group, 2, finetune, tmp_path, "norm", True, "group", strategy, 1)
    assert_equal(ours, train_by_hand(Finetuning(), "norm"))


class Growing(Regression):
    """Task that adds a branch in the second epoch."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.branch = None

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss if self.branch is None else loss + self.branch(batch[0]).square().mean()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(5)
            self.branch = nn.Linear(6, 1).double()
            self.optimizers().add_param_group({"params": [*self.branch.parameters()], "lr": 0.1})


def grow(folder, strategy="auto", accumulate=2):
    task = Growing()
    bare_trainer(
        folder, max_epochs=3, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.1
    ).fit(task, loader(dtype=torch.float64))
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}


def test_ddp_sums_gradients_of_modules_added_in_training(group, tmp_path):
    alone = grow(tmp_path)
    assert alone.keys() > Growing().state_dict().keys()
    assert_equal(run_on_ranks(group, 2, grow, tmp_path, "ddp", 1), alone)


def test_fsdp_refuses_modules_added_in_training(group, tmp_path):
    assert group(2).run(refuse_growth, tmp_path) == [7 // 2 + 1] * 2


def refuse_growth(folder):
    trainer = bare_trainer(folder, max_epochs=3, strategy="fsdp")
    with pytest.raises(TrainingError, match=r"branch.weight, branch.bias were added after the parameters were sharded"):
        trainer.fit(Growing(), loader(dtype=torch.float64))
    return trainer.global_step


class InTheStep(Finetuning):
    """Task that unfreezes parameters in the middle of a step."""

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch):
        if self.global_step == 2:
            self.net[0].requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unfreezing_within_a_step_raises_before_update(group, tmp_path, strategy):
    for message, step in group(2).run(unfreeze_in_a_step, tmp_path, strategy):
        assert "net.0.weight, net.0.bias" in message
        assert "on_train_epoch_start" in message
        assert step == 2


def unfreeze_in_a_step(folder, strategy):
    gathered_at_once = lumen.FSDP(wrap_if=lambda name, module: False)
    trainer = bare_trainer(folder, max_epochs=3, strategy=gathered_at_once if strategy == "fsdp" else strategy)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(InTheStep(), loader(dtype=torch.float64))
    return str(caught.value), trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [OwnStateDict, Attributes, Global, StateOfIds, Around])
def test_so_it_does_on_two_processes(group, tmp_path, kind, strategy):
    group(2).run(resume_own, tmp_path, kind, strategy)


def resume_own(folder, kind, strategy):
    (ours, _), (theirs, _) = train_and_resume(folder, lambda: make_task(kind), strategy=strategy, global_batch_size=8)
    assert is_same_tensor(read_unsharded_state(ours), read_unsharded_state(theirs))


@pytest.mark.parametrize("kind", [OwnStateDict, Attributes])
def test_sharded_custom_optimizer_state_resumes_unsharded(group, tmp_path, kind):
    """Tensors that belong to no parameter are refused in the other direction."""
    group(2).run(write_own, tmp_path, kind)
    train_own(tmp_path, kind, "auto", 9)
    ours = read_state(train_own(tmp_path / "whole", kind, "auto", 9))
    assert_equal(read_state(train_own(tmp_path, kind, "auto", 9)), ours)
    if kind is Attributes:
        for said in group(2).run(catch_message, CheckpointMismatch, train_own, tmp_path, kind, "fsdp", 14):
            assert "is unknown, because Attributes" in said


def train_own(folder, kind, strategy, max_steps):
    task = make_task(kind)
    quiet_trainer(folder, max_steps=max_steps, resume="auto", strategy=strategy, global_batch_size=8).fit(
        task, loader(dtype=torch.float64)
    )
    return task


def write_own(folder, kind):
    train_own(folder, kind, "fsdp", 4)
