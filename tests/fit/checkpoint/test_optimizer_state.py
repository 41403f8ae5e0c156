"""State of any optimizer: a resumed run restores it, and parameters that a hook adds are trained and saved."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import lumen
from lumen.errors import CheckpointError, CheckpointMismatch, ConfigError
from lumen.optim import Lookahead
from tests.helpers.group import assert_equal
from tests.helpers.optimizer_state import (
    WRAPS,
    Around,
    Attributes,
    ByAddress,
    ById,
    Finetuning,
    Global,
    OwnStateDict,
    Sgd,
    StateOfIds,
    finetune,
    make_task,
    train_and_resume,
    train_by_hand,
)
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights

# ---------------------------------------------------------------------- parameters added in training


@pytest.mark.parametrize("way", ["group", "longer group"])
@pytest.mark.parametrize(("clip", "weighted"), [("norm", False), ("value", False), (None, True), ("norm", True)])
def test_added_parameters_are_clipped_and_reduced_correctly(tmp_path, clip, weighted, way):
    reference = Finetuning()
    reference.weighted, reference.way = weighted, way
    assert_equal(finetune(tmp_path, clip, weighted, way), train_by_hand(reference, clip))


@pytest.mark.parametrize("way", ["group", "longer group"])
@pytest.mark.parametrize("wrap", ["none", "Lookahead"])
def test_run_with_added_parameters_resumes_exactly(tmp_path, way, wrap):
    def make():
        task = Finetuning()
        task.way = way
        task.wrap = (lambda optimizer: Lookahead(optimizer, 3)) if wrap == "Lookahead" else task.wrap
        return task

    (ours, mine), (theirs, other) = train_and_resume(tmp_path, make, (3, 9, 12, 20), gradient_clip_val=0.5)
    assert torch.equal(weights(ours), weights(theirs))
    assert [{**group, "params": 0} for group in mine.param_groups] == [
        {**group, "params": 0} for group in other.param_groups
    ]
    assert len(mine.param_groups) == (2 if way == "group" else 1)


class Readding(lumen.Callback):
    """Callback that adds the parameter group itself when the optimizer loads its state."""

    def state_dict(self):
        return {"added": len(self.trainer.optimizers[0].param_groups) > 1}

    def setup(self, trainer, task, stage):
        self.trainer = trainer

    def load_state_dict(self, state):
        if state["added"]:
            task = self.trainer._run.task
            task.add(self.trainer.optimizers[0])


def test_callback_may_add_its_group_itself_on_resume(tmp_path):
    ends = []
    for name, cuts in (("whole", (20,)), ("parts", (9, 20))):
        for max_steps in cuts:
            task, callbacks = Finetuning(), [Readding(), lumen.ModelCheckpoint()]
            quiet_trainer(tmp_path / name, max_steps=max_steps, resume="auto", callbacks=callbacks).fit(
                task, loader(dtype=torch.float64)
            )
        ends.append(weights(task))
    assert torch.equal(*ends)


def test_different_initial_groups_are_rejected_on_resume(tmp_path):
    class Other(Finetuning):
        def configure_optimizers(self):
            return AdamW([self.net[3].weight], lr=0.01)

    quiet_trainer(tmp_path, max_steps=9).fit(Finetuning(), loader(dtype=torch.float64))
    with pytest.raises(CheckpointMismatch, match=r"over \[2, 2\] parameters per group; this run has AdamW over \[1\]"):
        quiet_trainer(tmp_path, max_steps=12, resume="auto").fit(Other(), loader(dtype=torch.float64))


def test_foreign_parameter_is_rejected_before_training_it(tmp_path):
    class Stranger(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    trainer = bare_trainer(tmp_path, max_steps=5)
    with pytest.raises(ConfigError, match=r"holds 1 parameters that are not the task's.* attribute of the task"):
        trainer.fit(Stranger(), loader())
    assert trainer.global_step == 2


class AddsGroup(Regression):
    """Task that trains two layers with one optimizer each, and adds the rest to the second one later."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD([self.net[0].weight], lr=0.1), torch.optim.SGD([self.net[3].weight], lr=0.1)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        first, second = self.optimizers()
        if batch_idx == 2:
            second.add_param_group({"params": [self.net[0].bias], "lr": 0.2})
        self.manual_backward(loss)
        for each in (first, second):
            each.step()
            each.zero_grad()


def test_group_added_to_several_optimizers_is_refused(tmp_path):
    quiet_trainer(tmp_path, max_steps=5, enable_checkpointing=False).fit(AddsGroup(), loader())
    trainer = quiet_trainer(tmp_path, max_steps=5)
    with pytest.raises(ConfigError, match=r"parameter groups were added .* save all groups"):
        trainer.fit(AddsGroup(), loader())


# ---------------------------------------------------------------------- optimizers of the user


class Packed(OwnStateDict):
    """Optimizer with a `state_dict` in a format that is not torch's."""

    def state_dict(self):
        return {"packed": (self._rest["k"], self._rest["mean"])}

    def load_state_dict(self, state_dict):
        self._rest = dict(zip(("k", "mean"), state_dict["packed"], strict=True))


OWN = (OwnStateDict, Attributes, Global, ById, Around, Packed)


@pytest.mark.parametrize(("kind", "wrap"), [*product(OWN, WRAPS), (StateOfIds, "alone")])
def test_extra_state_of_user_optimizers_resumes_exactly(tmp_path, kind, wrap):
    (ours, _), (theirs, _) = train_and_resume(tmp_path, lambda: make_task(kind, wrap))
    assert torch.equal(weights(ours), weights(theirs))


def test_state_keyed_by_address_raises_after_one_step(tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=8)
    with pytest.raises(CheckpointError, match=r"has the key \d+, which looks like a memory address .*id\(parameter\)"):
        trainer.fit(make_task(ByAddress), loader(dtype=torch.float64))
    assert trainer.global_step == 1


class Unsavable(OwnStateDict):
    def state_dict(self):
        return super().state_dict() | {"lock": object()}


class ByParameter(Sgd):
    """Optimizer with tensors in an attribute, by parameter."""

    def begin(self):
        self.means = {each: torch.zeros_like(each) for group in self.param_groups for each in group["params"]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unsavable, r"own.*lock: an object of type object cannot be saved"),
        (
            ByParameter,
            r"ByParameter keeps tensors in its attribute 'means' .* Keep the tensors in self.state\[parameter\]",
        ),
    ],
)
def test_unsavable_optimizer_state_raises_before_training(tmp_path, kind, message):
    trainer = quiet_trainer(tmp_path, max_steps=3)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(make_task(kind), loader(dtype=torch.float64))
    assert trainer.global_step == 0


class Counting(AdamW):
    """Optimizer with one number from its configuration, and one that it counts."""

    def __init__(self, parameters, every=5):
        super().__init__(parameters, lr=0.01)
        self.every, self.k = every, 0

    def step(self, closure=None):
        self.k += 1
        return super().step(closure)


def test_changed_optimizer_argument_warns_on_resume(tmp_path, caplog):
    class Counted(Regression):
        every = 5

        def configure_optimizers(self):
            return Counting(self.parameters(), self.every)

    for max_steps, every in ((3, 5), (5, 5), (7, 6)):
        task = Counted()
        task.every = every
        trainer = quiet_trainer(tmp_path, max_steps=max_steps, resume="auto", log_level="WARNING")
        caplog.clear()
        trainer.fit(task, loader())
        assert ("optimizer.every was 5, is 6" in caplog.text) == (every == 6)
        assert "optimizer.k" not in caplog.text
        assert (trainer.optimizers[0].every, trainer.optimizers[0].k) == (5, max_steps)


class Learned(Sgd):
    """Optimizer with parameters and tensors that require gradients in its state."""

    def factor(self, parameter):
        state = self.state[parameter]
        if not state:
            state |= {"scale": nn.Parameter(torch.ones(())), "fixed": nn.Parameter(torch.ones(2), requires_grad=False)}
            state |= {"leaf": torch.ones((), requires_grad=True), "plain": torch.ones(())}
        return 1.0


def test_optimizer_state_restores_parameters_and_leaves(tmp_path):
    _, (_, optimizer) = train_and_resume(tmp_path, lambda: make_task(Learned), cuts=(2, 4))
    for entries in optimizer.state.values():
        kinds = {name: (type(each), each.requires_grad) for name, each in entries.items()}
        assert kinds == {
            "scale": (nn.Parameter, True),
            "fixed": (nn.Parameter, False),
            "leaf": (torch.Tensor, True),
            "plain": (torch.Tensor, False),
        }


class Outer(torch.optim.Optimizer):
    """Optimizer without a call of `Optimizer.__init__`, like some wrappers of pytorch_optimizer."""

    def __init__(self, parameters):
        self.optimizer, self.calls = AdamW(parameters, lr=0.01), 0
        self.defaults = self.optimizer.defaults

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.calls += 1
        return self.optimizer.step(closure)

    def state_dict(self):
        return {"inside": self.optimizer.state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["inside"])
        self.calls = state["calls"]


def test_a_wrapper_without_torchs_constructor_resumes(tmp_path):
    (whole, _), (parts, optimizer) = train_and_resume(tmp_path, lambda: make_task(Outer), cuts=(2, 5))
    assert torch.equal(weights(whole), weights(parts))
    assert optimizer.calls == 5
