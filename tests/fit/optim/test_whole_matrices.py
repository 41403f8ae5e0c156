"""WholeMatrices with unsharded tensors: the inner optimizer and users of the optimizer work as usual."""

import copy
import pickle

import pytest
import torch
from torch.optim import LBFGS, SGD

from lumen.errors import ConfigError
from lumen.optim import Lookahead, WholeMatrices
from tests.helpers.checkpoints import is_same_tensor
from tests.helpers.tasks import backpropagate, bare_trainer, loader, network, weights
from tests.helpers.whole_matrices import KINDS, Matrices, Shampoo


@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
def test_it_has_the_bits_of_the_optimizer_inside(tmp_path, kind):
    class Plain(Matrices):
        def configure_optimizers(self):
            found = super().configure_optimizers()
            held = found["optimizer"].optimizers
            held[0] = held[0].optimizer
            return found

    tasks = Matrices(kind), Plain(kind)
    for task in tasks:
        bare_trainer(tmp_path, max_steps=6).fit(task, loader(40, dtype=torch.float64))
    assert torch.equal(*map(weights, tasks))


def matrices(net):
    return [each for each in net.parameters() if each.ndim == 2]


def stepped(make, steps=3):
    net = network(dtype=torch.float64)
    optimizer = make(matrices(net))
    for _ in range(steps):
        backpropagate(net)
        optimizer.step()
    return net, optimizer


def test_wrapper_shares_groups_and_state_also_when_copied():
    net, optimizer = stepped(lambda held: WholeMatrices(Shampoo(held)))
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    other, plain = WholeMatrices(Shampoo(matrices(net))), Shampoo(matrices(net))
    for each in (other, plain):
        each.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.state is other.optimizer.state
    assert is_same_tensor(other.state_dict(), plain.state_dict())
    again = pickle.loads(pickle.dumps(optimizer))
    assert is_same_tensor(again.state_dict(), optimizer.state_dict())
    assert again.state is again.optimizer.state
    optimizer.param_groups[0]["lr"] = 0.25
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def test_lookahead_goes_around_it():
    one, _ = stepped(lambda held: Lookahead(WholeMatrices(KINDS["Muon"](held)), k=2))
    other, _ = stepped(lambda held: Lookahead(KINDS["Muon"](held), k=2))
    assert torch.equal(weights(one), weights(other))


def test_a_closure_is_called_once():
    net, losses = network(dtype=torch.float64), []
    optimizer = WholeMatrices(SGD(net.parameters(), lr=0.1))

    def closure():
        losses.append(backpropagate(net))
        return losses[-1]

    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1


def test_what_it_cannot_hold_is_refused():
    net = network()
    with pytest.raises(ConfigError, match=r"expected an optimizer, found type. Write WholeMatrices\(torch.optim.Muon"):
        WholeMatrices(SGD)
    with pytest.raises(ConfigError, match="LBFGS evaluates a closure several times in one step"):
        WholeMatrices(LBFGS(net.parameters()))
