"""Lookahead: the paper's algorithm around any optimizer, invisible to users of the optimizer."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lumen.errors import ConfigError
from lumen.optim import Lookahead
from tests.helpers.tasks import Regression, backpropagate, loader, network, quiet_trainer, weights

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters),
}


# ---------------------------------------------------------------------- the algorithm


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("k", "alpha"), [(1, 0.3), (3, 0.5), (5, 0.8)])
def test_the_steps_are_those_of_the_paper(optimizer, k, alpha):
    ours, theirs = network(dtype=torch.float64), network(dtype=torch.float64)
    lookahead = Lookahead(OPTIMIZERS[optimizer](ours.parameters()), k, alpha)
    inner = OPTIMIZERS[optimizer](theirs.parameters())
    slow = [parameter.detach().clone() for parameter in theirs.parameters()]  # phi
    for step in range(1, 14):
        backpropagate(ours)
        lookahead.step()
        backpropagate(theirs)
        inner.step()
        if step % k == 0:
            for phi, theta in zip(slow, theirs.parameters(), strict=True):
                phi += alpha * (theta.detach() - phi)
                theta.data.copy_(phi)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-12, atol=1e-13)
        if step % k == 0:
            for phi, parameter in zip(slow, ours.parameters(), strict=True):
                torch.testing.assert_close(lookahead.state[parameter]["slow"], phi, rtol=1e-12, atol=1e-13)


def test_alpha_one_equals_inner_optimizer():
    ours, theirs = network(), network()
    lookahead, inner = (build(net.parameters()) for build, net in (
        (lambda parameters: Lookahead(OPTIMIZERS["AdamW"](parameters), 2, 1.0), ours),
        (OPTIMIZERS["AdamW"], theirs),
    ))  # fmt: skip
    for _ in range(6):
        for net, optimizer in ((ours.double(), lookahead), (theirs.double(), inner)):
            backpropagate(net)
            optimizer.step()
    assert torch.equal(weights(ours), weights(theirs))


def test_a_parameter_joins_with_its_first_gradient():
    net = network(dtype=torch.float64)
    net[0].requires_grad_(False)
    first = net[0].weight.detach().clone()
    lookahead = Lookahead(OPTIMIZERS["AdamW"](net.parameters()), 2)
    for _ in range(3):
        backpropagate(net)
        lookahead.step()
    assert net[0].weight not in lookahead.state
    assert torch.equal(net[0].weight, first)
    net[0].requires_grad_(True)
    backpropagate(net)
    lookahead.step()  # the fourth step: an exchange
    fast = first - lookahead.param_groups[0]["lr"] * net[0].weight.grad.sign()
    torch.testing.assert_close(net[0].weight.detach(), (first + fast) / 2, rtol=1e-3, atol=1e-6)
    assert lookahead.state[net[0].weight].keys() == lookahead.state[net[3].weight].keys()


def test_a_closure_gives_gradients_and_loss():
    ours, theirs = network(dtype=torch.float64), network(dtype=torch.float64)
    with_closure, without = (Lookahead(OPTIMIZERS["SGD"](net.parameters()), 2) for net in (ours, theirs))
    for _ in range(4):
        found = with_closure.step(lambda: backpropagate(ours))
        expected = backpropagate(theirs)
        without.step()
        assert torch.equal(found, expected)
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize(("k", "alpha"), [(0, 0.5), (5, 0.0), (5, 1.5)])
def test_a_value_out_of_range_is_named(k, alpha):
    with pytest.raises(ConfigError, match=rf"Lookahead: k = {k}, alpha = {alpha}; k must be at least 1"):
        Lookahead(OPTIMIZERS["SGD"](network().parameters()), k, alpha)


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ConfigError, match="LBFGS evaluates a closure several times"):
        Lookahead(torch.optim.LBFGS(network().parameters()))


# ---------------------------------------------------------------------- groups, schedules, state


def test_groups_and_state_are_shared_with_inner_optimizer():
    net = network(dtype=torch.float64)
    inner = OPTIMIZERS["AdamW"](net[0].parameters())
    lookahead = Lookahead(inner, 2)
    lookahead.add_param_group({"params": list(net[3].parameters()), "lr": 0.5})
    for _ in range(3):
        backpropagate(net)
        lookahead.step()
    assert len(inner.param_groups) == 2
    assert [group["lookahead_step"] for group in inner.param_groups] == [1, 1]
    lookahead.load_state_dict(lookahead.state_dict())
    assert lookahead.param_groups is inner.param_groups
    assert lookahead.state is inner.state
    assert all("slow" in inner.state[parameter] for parameter in net.parameters())


def test_torchs_own_state_dict_restores_every_bit():
    net = network(dtype=torch.float64)
    lookahead = Lookahead(OPTIMIZERS["AdamW"](net.parameters()), 3)
    for step in range(10):
        if step == 4:
            at_four, state = weights(net), deepcopy(lookahead.state_dict())
            copy = network(dtype=torch.float64)
            nn.utils.vector_to_parameters(at_four, copy.parameters())
            other = Lookahead(OPTIMIZERS["AdamW"](copy.parameters()), 3)
            other.load_state_dict(state)
        backpropagate(net)
        lookahead.step()
    for _ in range(4, 10):
        backpropagate(copy)
        other.step()
    assert torch.equal(weights(net), weights(copy))


@pytest.mark.parametrize("scheduled", ["the outer one", "the inner one"])
@pytest.mark.parametrize(
    "schedule",
    [lambda optimizer: StepLR(optimizer, 2, 0.5), lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=12)],
    ids=["StepLR", "OneCycleLR"],
)
def test_a_schedule_moves_the_real_learning_rate(scheduled, schedule):
    parameter, alone = nn.Parameter(torch.zeros(1, dtype=torch.float64)), nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([parameter], lr=0.1, momentum=0.0)
    lookahead = Lookahead(inner, k=100)
    scheduler = schedule(lookahead if scheduled == "the outer one" else inner)
    reference = torch.optim.SGD([alone], lr=0.1)
    expected = schedule(reference)
    rates = []
    for _ in range(10):
        momentum = inner.param_groups[0]["momentum"]
        buffer = inner.state[parameter].get("momentum_buffer", torch.zeros(1)).clone()
        before, parameter.grad = parameter.item(), torch.ones_like(parameter)
        lookahead.step()
        rates.append(reference.param_groups[0]["lr"])
        moved = before - parameter.item()
        pull = 1.0 if not buffer.any() else 1.0 + momentum * buffer.item()
        assert moved == pytest.approx(rates[-1] * pull)
        scheduler.step()
        reference.step()
        expected.step()
    assert len(set(rates)) > 3


# ---------------------------------------------------------------------- in a run


class Ahead(Regression):
    """Task that trains with Lookahead, a schedule, and a loss whose first gradients overflow in half precision."""

    overflow = 1.0

    def training_step(self, batch):
        return super().training_step(batch) * self.overflow

    def configure_optimizers(self):
        optimizer = Lookahead(torch.optim.AdamW(self.parameters(), lr=0.02, fused=True), k=4)
        schedule = OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(tmp_path, *, overflow=1.0, **options):
    task = Ahead(dropout=0.1)
    task.overflow = overflow
    trainer = quiet_trainer(tmp_path, **{"max_steps": 20} | options)
    trainer.fit(task, loader())
    return trainer, task


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resumed_lookahead_run_is_exact(tmp_path, precision):
    options = {"precision": precision, "overflow": 3e3 if precision == "fp16" else 1.0}
    whole_trainer, whole = fit(tmp_path / "whole", **options)
    for cut in (3, 13, 20):  # before the first exchange, and between two
        trainer, task = fit(tmp_path, max_steps=cut, resume="auto", **options)
    assert torch.equal(weights(task), weights(whole))
    ours, theirs = trainer.optimizers[0], whole_trainer.optimizers[0]
    for mine, other in zip(task.parameters(), whole.parameters(), strict=True):
        assert ours.state[mine].keys() == theirs.state[other].keys() >= {"slow", "exp_avg", "step"}
        assert all(torch.equal(ours.state[mine][key], theirs.state[other][key]) for key in ours.state[mine])
    assert [{**group, "params": None} for group in ours.param_groups] == [
        {**group, "params": None} for group in theirs.param_groups
    ]
    assert ours.param_groups[0]["lookahead_step"] == 0


def test_an_update_skipped_for_overflow_is_no_step(tmp_path):
    counts = []

    class Watched(Ahead):
        overflow = 3e3

        def on_train_batch_end(self, outputs, batch, batch_idx):
            counts.append((self.global_step, self.trainer.optimizers[0].param_groups[0]["lookahead_step"]))

    trainer = quiet_trainer(tmp_path, max_steps=9, precision="fp16")
    trainer.fit(Watched(), loader())
    assert len(counts) >= trainer.global_step + 3
    assert all(count == step % 4 for step, count in counts)
