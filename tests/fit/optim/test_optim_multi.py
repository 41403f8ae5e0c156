"""Several optimizers as one: training equals a loop that steps each of them, and users of the optimizer see one."""

import re
import signal
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lumen.checkpoint import find_checkpoints
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.optim import Lookahead, MultiOptimizer, WholeMatrices
from tests.helpers import ROOT
from tests.helpers.checkpoints import is_same_tensor
from tests.helpers.optim_multi import PAIRS, Both, make_inner_optimizers, make_task
from tests.helpers.tasks import Regression, backpropagate, bare_trainer, loader, network, quiet_trainer, weights

WRAPS = {
    "alone": MultiOptimizer,
    "Lookahead around": lambda each: Lookahead(MultiOptimizer(each), k=3),
    "Lookahead inside": lambda each: MultiOptimizer([Lookahead(each[0], k=3), each[1]]),
    "nested": lambda each: MultiOptimizer([MultiOptimizer(each[:1]), each[1]]),
}


def read_state(optimizer, module):
    """Return state and options of every parameter, by name."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    state = {names[parameter]: dict(entries) for parameter, entries in optimizer.state.items()}
    return state, [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]


# ---------------------------------------------------------------------- in a run


class Scheduled(Both):
    """Task with a schedule that a loop by hand can give to each optimizer."""

    scheduled = "both"

    def configure_optimizers(self):
        optimizer = MultiOptimizer(make_inner_optimizers(self, self.kinds))
        moved = [optimizer] if self.scheduled == "both" else [optimizer.optimizers[1]]
        return [optimizer], [{"scheduler": StepLR(each, 2, 0.5), "interval": "step"} for each in moved]


@pytest.mark.parametrize("scheduled", ["both", "the second"])
@pytest.mark.parametrize("kinds", PAIRS)
def test_multi_optimizer_equals_stepping_each(tmp_path, kinds, scheduled):
    task = make_task(Scheduled, kinds=kinds, scheduled=scheduled)
    trainer = bare_trainer(tmp_path, max_epochs=2, gradient_clip_val=0.3)
    trainer.fit(task, loader(40, shuffle=False))
    assert trainer.global_step == 10

    by_hand = make_task(Scheduled, kinds=kinds, scheduled=scheduled)
    optimizers = make_inner_optimizers(by_hand, kinds)
    held = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    schedules = [StepLR(each, 2, 0.5) for each in (optimizers if scheduled == "both" else optimizers[1:])]
    for inputs, targets in [*loader(40, shuffle=False)] * 2:
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        assert nn.utils.clip_grad_norm_(held, 0.3) > 0.3
        for each in (*optimizers, *schedules):
            each.step()
        by_hand.zero_grad()
    assert torch.equal(weights(task), weights(by_hand))
    state, groups = read_state(trainer.optimizers[0], task)
    expected = [read_state(each, by_hand) for each in optimizers]
    assert is_same_tensor(state, expected[0][0] | expected[1][0])
    assert groups == expected[0][1] + expected[1][1]


def fit(tmp_path, *, task=None, **options):
    trained = make_task(dropout=0.1, **(task or {}))
    trainer = quiet_trainer(tmp_path, **{"max_steps": 20, "gradient_clip_val": 0.3} | options)
    trainer.fit(trained, loader())
    return trainer, trained


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ({}, "fp32"),
        ({"kinds": "Muon, fused AdamW"}, "bf16"),
        ({"kinds": "foreach AdamW, SGD"}, "fp32"),
        ({"overflow": 3e3}, "fp16"),
        ({"kinds": "Muon, fused AdamW", "wrap": lambda each: Lookahead(MultiOptimizer(each), k=4)}, "fp32"),
        ({"wrap": lambda each: MultiOptimizer([Lookahead(each[0], k=4), each[1]])}, "fp32"),
        ({"wrap": lambda each: MultiOptimizer([MultiOptimizer(each[:1]), each[1]])}, "fp32"),
    ],
    ids=["fp32", "Muon", "without state", "fp16", "Lookahead around", "Lookahead inside", "nested"],
)
def test_resumed_run_equals_uninterrupted_run(tmp_path, task, precision):
    options = {"task": task, "precision": precision}
    whole_trainer, whole = fit(tmp_path / "whole", **options)
    for cut in (3, 13, 20):
        trainer, last = fit(tmp_path, max_steps=cut, resume="auto", **options)
    assert torch.equal(weights(last), weights(whole))
    (state, groups), (whole_state, whole_groups) = (
        read_state(each.optimizers[0], module) for each, module in ((trainer, last), (whole_trainer, whole))
    )
    assert (
        state.keys()
        == whole_state.keys()
        == {name for name, _ in last.named_parameters()}
        - ({"net.0.bias", "net.3.bias"} if task.get("kinds") == "foreach AdamW, SGD" else set())
    )
    assert all(is_same_tensor(state[name], whole_state[name]) for name in state)
    assert groups == whole_groups
    assert groups[0].keys() != groups[1].keys()


class ByEpochs(Both):
    """Task with a schedule by epochs for the second optimizer, which may interrupt itself in a validation."""

    interrupted = False

    def validation_step(self, batch):
        super().validation_step(batch)
        if self.interrupted:
            signal.raise_signal(signal.SIGINT)

    def configure_optimizers(self):
        optimizer = self.wrap(make_inner_optimizers(self, self.kinds))
        return [optimizer], [StepLR(optimizer.optimizers[1], 1, 0.5)]


def test_schedule_due_on_resume_causes_no_warning(tmp_path):
    """The run stops after an epoch's last step, before the first move of the schedule: torch must not warn."""

    def train(folder, **options):
        task = make_task(ByEpochs, **options)
        trainer = quiet_trainer(folder, max_epochs=2, num_sanity_val_steps=0, resume="auto")
        trainer.fit(task, loader(40), val_dataloaders=loader(8))
        return trainer, task

    _, whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, interrupted=True)
    assert find_checkpoints(tmp_path / "runs/run/checkpoints")[-1].name == "step-00000005-validating"
    trainer, resumed = train(tmp_path)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.05, 0.01 / 4]
    assert torch.equal(weights(resumed), weights(whole))


def test_an_overflow_skips_both(tmp_path):
    seen = []

    class Watched(Both):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            state = {name: entries.copy() for name, entries in read_state(self.optimizers(), self)[0].items()}
            each = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
            seen.append((self.global_step, each, deepcopy(state)))

    trainer = quiet_trainer(tmp_path, max_steps=9, precision="fp16", gradient_clip_val=0.3)
    trainer.fit(make_task(Watched, overflow=3e3), loader())
    assert trainer.global_step == 9
    skipped = 0
    for (step, before, state), (next_step, after, next_state) in pairwise(seen):
        if step == next_step:
            skipped += 1
            assert is_same_tensor(before, after)
            assert is_same_tensor(state, next_state)
        else:
            assert not any(torch.equal(before[name], after[name]) for name in before)
            assert next_state["net.0.bias"]["step"] == next_step
    assert skipped >= 2


# ---------------------------------------------------------------------- on several processes


# ---------------------------------------------------------------------- groups and state


@pytest.mark.parametrize("around", ["both", "each"])
def test_lookahead_around_both_is_lookahead_around_each(around):
    net, reference = network(dtype=torch.float64), network(dtype=torch.float64)
    first, second = make_inner_optimizers(net)
    if around == "both":
        optimizer = Lookahead(MultiOptimizer([first, second]), k=3)
    else:
        optimizer = MultiOptimizer([Lookahead(first, k=3), Lookahead(second, k=3)])
    expected = [Lookahead(each, k=3) for each in make_inner_optimizers(reference)]
    for _ in range(7):
        backpropagate(net)
        optimizer.step()
        backpropagate(reference)
        for each in expected:
            each.step()
    assert torch.equal(weights(net), weights(reference))
    assert all("slow" in optimizer.state[parameter] for parameter in net.parameters())


def test_groups_and_state_are_those_inside():
    net = network(dtype=torch.float64)
    first, second = make_inner_optimizers(net)
    optimizer = MultiOptimizer([first, second])
    assert all(ours is theirs for ours, theirs in zip(
        optimizer.param_groups, first.param_groups + second.param_groups, strict=True
    ))  # fmt: skip
    assert len(optimizer.state) == 0
    assert optimizer.state.get(net[0].weight) is None
    assert net[0].weight not in optimizer.state
    backpropagate(net)
    optimizer.step()
    assert [*optimizer.state] == [net[0].weight, net[3].weight, net[0].bias, net[3].bias]
    assert optimizer.state[net[0].weight] is first.state[net[0].weight]
    optimizer.state[net[3].bias] = {"step": torch.tensor(7.0)}
    assert second.state[net[3].bias] == {"step": torch.tensor(7.0)}
    assert net[3].bias not in first.state
    del optimizer.state[net[0].weight]
    assert [*first.state] == [net[3].weight]
    optimizer.state.clear()
    assert not first.state
    assert not second.state


def test_a_closure_is_evaluated_once_for_all():
    net, reference = network(dtype=torch.float64), network(dtype=torch.float64)
    optimizer, expected, losses = MultiOptimizer(make_inner_optimizers(net)), make_inner_optimizers(reference), []
    with torch.no_grad():
        for _ in range(3):
            losses.append(optimizer.step(lambda: backpropagate(net)).item())
    for loss in losses:
        assert backpropagate(reference).item() == loss
        for each in expected:
            each.step()
    assert torch.equal(weights(net), weights(reference))


@pytest.mark.parametrize("wrap", [MultiOptimizer, lambda each: Lookahead(MultiOptimizer(each), 3)], ids=["it", "ahead"])
def test_torchs_own_state_dict_restores_every_bit(wrap):
    net, copy = network(dtype=torch.float64), network(dtype=torch.float64)
    optimizer, other = wrap(make_inner_optimizers(net)), wrap(make_inner_optimizers(copy))
    for step in range(10):
        if step == 4:
            copy.load_state_dict(net.state_dict())
            other.load_state_dict(deepcopy(optimizer.state_dict()))
        backpropagate(net)
        optimizer.step()
    for _ in range(4, 10):
        backpropagate(copy)
        other.step()
    assert torch.equal(weights(net), weights(copy))
    assert is_same_tensor(*(read_state(each, module)[0] for each, module in ((optimizer, net), (other, copy))))


@pytest.mark.parametrize("scheduled", [False, True], ids=["", "scheduled"])
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_deepcopied_optimizer_steps_only_its_parameters(wrap, scheduled):
    def step(net, optimizer, times):
        for _ in range(times):
            backpropagate(net)
            optimizer.step()
        return weights(net)

    net = network(dtype=torch.float64)
    optimizer = wrap(make_inner_optimizers(net))
    if scheduled:
        StepLR(optimizer, 2, 0.5)
    before = step(net, optimizer, 2)
    copy, other = deepcopy((net, optimizer))
    after = step(copy, other, 3)
    assert not (after == before).any()
    assert torch.equal(weights(net), before)
    assert torch.equal(step(net, optimizer, 3), after)
    assert is_same_tensor(*(read_state(each, module) for each, module in ((optimizer, net), (other, copy))))


def test_a_state_of_other_groups_is_refused_whole():
    net = network(dtype=torch.float64)
    optimizer = MultiOptimizer(make_inner_optimizers(net))
    backpropagate(net)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][1]["params"].pop()
    other = MultiOptimizer(make_inner_optimizers(network(dtype=torch.float64)))
    with pytest.raises(ConfigError, match=r"the state has \[2, 1\] parameters per group, the optimizers have \[2, 2\]"):
        other.load_state_dict(saved)
    assert not other.state


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda net: [], "the list is empty"),
        (lambda net: [AdamW(net.parameters()), net], "expected optimizers, found Sequential"),
        (lambda net: [torch.optim.LBFGS(net.parameters())], "LBFGS evaluates a closure several times"),
        (
            lambda net: [SGD(net[3].parameters()), SGD(net[0].parameters()), AdamW([net[3].bias, net[0].weight])],
            "SGD and AdamW hold the same parameters, 1 of them",
        ),
        (lambda net: [AdamW(net.parameters())] * 2, "AdamW and AdamW hold the same parameters, 4 of them"),
    ],
)
def test_optimizers_that_cannot_step_together_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        MultiOptimizer(build(network()))


@pytest.mark.parametrize("to", ["it", "one inside", "Lookahead around it"])
def test_a_group_that_comes_late_is_refused(to):
    net = network(dtype=torch.float64)
    first = SGD(net[0].parameters())
    optimizer = MultiOptimizer([first])
    late = {"it": optimizer, "one inside": first, "Lookahead around it": Lookahead(optimizer)}[to]

    def add_and_step():
        late.add_param_group({"params": list(net[3].parameters())})
        backpropagate(net)
        optimizer.step()

    with pytest.raises(ConfigError, match=r"ptimizers?: .*parameter groups?.* "):
        add_and_step()


def test_two_returned_optimizers_suggest_multi_optimizer(tmp_path):
    class Two(Both):
        def configure_optimizers(self):
            return make_inner_optimizers(self)

    with pytest.raises(ConfigError, match=r"returned 2 optimizers.* return lumen\.optim\.MultiOptimizer\(\[\.\.\.\]\)"):
        bare_trainer(tmp_path, max_steps=1).fit(Two(), loader())


def test_momentum_schedule_over_mixed_names_is_rejected():
    net = network()
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        OneCycleLR(MultiOptimizer(make_inner_optimizers(net)), 0.1, total_steps=4)
    first, second = (SGD(net[number].parameters(), momentum=0.9) for number in (0, 3))
    optimizer = MultiOptimizer([first, second])
    OneCycleLR(optimizer, 0.1, total_steps=4)
    assert [group["momentum"] for group in optimizer.param_groups] == [0.95, 0.95]


# ---------------------------------------------------------------------- examples of the documentation


def test_the_documented_task_trains(tmp_path):
    document = (ROOT / "docs/migration/lightning-optimizers.md").read_text()
    (shown,) = re.findall(r"```python\n(.*?)```", document, re.S)
    names = {"torch": torch, "Regression": Regression}
    exec(shown, names)
    trainer = bare_trainer(tmp_path, max_steps=3)
    task = names["TwoKinds"]()
    start = weights(task).clone()
    trainer.fit(task, loader())
    assert [type(each) for each in trainer.optimizers[0].optimizers] == [WholeMatrices, AdamW]
    assert type(trainer.optimizers[0].optimizers[0].optimizer) is Muon
    assert not (weights(task) == start).any()


def test_other_optimizers_inside_are_refused_on_resume(tmp_path):
    fit(tmp_path, max_steps=3)
    other = r"saved with MultiOptimizer\(SGD, AdamW\) .* has MultiOptimizer\(Muon, AdamW\)"
    with pytest.raises(CheckpointMismatch, match=other):
        fit(tmp_path, max_steps=5, resume="auto", task={"kinds": "Muon, fused AdamW"})
