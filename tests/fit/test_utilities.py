"""Helpers that code for Lightning imports, called outside of a trainer."""

import random
import warnings
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, backpropagate, bare_trainer, loader, network, quiet_trainer


def test_grad_norm_returns_each_and_total():
    net = network(dtype=torch.float64)
    assert lumen.grad_norm(net, 2) == {}
    backpropagate(net)
    net[0].bias.grad = None
    every = torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None])
    for kind in (1, 2.0, "inf"):
        norms = lumen.grad_norm(net, kind, group_separator=".")
        names = {f"grad_{float(kind)}_norm.{name}" for name in ("0.weight", "3.weight", "3.bias")}
        assert {*norms} == names | {f"grad_{float(kind)}_norm_total"}
        one = torch.linalg.vector_norm(net[0].weight.grad, float(kind))
        assert norms[f"grad_{float(kind)}_norm.0.weight"] == one
        torch.testing.assert_close(
            norms[f"grad_{float(kind)}_norm_total"], torch.linalg.vector_norm(every, float(kind))
        )
    with pytest.raises(ConfigError, match="norm_type must be more than 0, or 'inf', found 0"):
        lumen.grad_norm(net, 0)


def test_sparse_and_dense_gradient_norms_are_equal():
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=sparse)
        table(torch.tensor([1, 1, 4])).square().sum().backward()
        norms.append(lumen.grad_norm(table, 2)["grad_2.0_norm/weight"])
    torch.testing.assert_close(*norms)


def test_norms_are_logged_where_gradients_are_complete(tmp_path):
    class Norms(Regression):
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(lumen.grad_norm(self, norm_type=2), on_step=True)

    trainer = bare_trainer(tmp_path, max_steps=2)
    trainer.fit(Norms(), loader())
    assert trainer.callback_metrics["grad_2.0_norm_total"] > 0


def test_generators_are_as_before_after_what_is_isolated():
    def draw():
        return torch.rand(2).tolist(), numpy.random.rand(2).tolist(), random.random()

    lumen.seed_everything(3, verbose=False)
    first, second = draw(), draw()
    lumen.seed_everything(3, verbose=False)
    assert draw() == first
    with lumen.isolate_rng(include_cuda=False):
        draw()
        numpy.random.seed(1)
    assert draw() == second


@dataclass
class Pair:
    left: torch.Tensor
    right: str


def test_whatever_holds_tensors_is_moved():
    batch = {"x": [torch.ones(2), (torch.zeros(1), 3)], "pair": Pair(torch.ones(1), "a")}
    moved = lumen.move_data_to_device(batch, "meta")
    assert {moved["x"][0].device.type, moved["x"][1][0].device.type, moved["pair"].left.device.type} == {"meta"}
    assert (moved["x"][1][1], moved["pair"].right) == (3, "a")
    with pytest.raises(ConfigError, match=r"move_data_to_device: expected a device, .* found 'nowhere'"):
        lumen.move_data_to_device(batch, "nowhere")


def test_rank_zero_messages_are_shown_outside_runs_too(tmp_path, capsys):
    class Saying(Regression):
        def on_train_start(self):
            lumen.rank_zero_info("hello %s", "run")
            lumen.rank_zero_debug("hidden")

    lumen.rank_zero_info("before %d", 1)
    trainer = quiet_trainer(tmp_path, max_steps=1, log_level="INFO")
    trainer.fit(Saying(), loader())
    captured = capsys.readouterr()
    assert (captured.out + captured.err).splitlines()[0] == "before 1"
    record = (trainer.run_directory / "run.log").read_text()
    assert "hello run" in record
    assert "hidden" not in record


def test_rank_zero_warn_uses_the_line_of_caller():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lumen.rank_zero_warn("careful", category=FutureWarning)
    assert [(str(each.message), each.category, each.filename) for each in caught] == [
        ("careful", FutureWarning, __file__)
    ]


def test_the_rank_is_found_and_not_chosen(monkeypatch):
    @lumen.rank_zero_only
    def act(value):
        return value

    assert (act.__name__, act(5), lumen.rank_zero_only.rank) == ("act", 5, 0)
    lumen.rank_zero_only.rank = 0
    with pytest.raises(ConfigError, match="rank cannot be set to 3: this process has rank 0"):
        lumen.rank_zero_only.rank = 3
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert (act(5), lumen.rank_zero_only.rank) == (None, 1)


def test_summarize_works_outside_a_run():
    net = network()
    net[0].weight.requires_grad_(False)
    summary = lumen.summarize(net, max_depth=-1)
    assert (summary.total_parameters, summary.trainable_parameters) == (129, 33)
    assert summary.model_size == pytest.approx(129 * 4 / 1e6)
    assert (summary.layer_names, summary.param_nums) == (["0", "1", "2", "3"], [112, 0, 0, 17])
    assert summary.layer_types == ["Linear", "Tanh", "Dropout", "Linear"]
    first, *_, last = str(summary).splitlines()
    assert first.split() == ["name", "type", "parameters", "trainable"]
    assert last.startswith("Sequential: 129 parameters (33 trainable, 96 frozen)")
    assert str(lumen.summarize(net, max_depth=0)) == last
