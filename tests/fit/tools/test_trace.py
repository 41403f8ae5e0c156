"""Traces of two trainings: the records of each step, and their first difference."""

from functools import partial

import pytest
import torch

from lumen.tools.proof.difference import compare_trainings, find_first_difference, record_steps
from lumen.tools.proof.recorder import KINDS, Key, Recorder
from tests.helpers.recorded_trainings import (
    Deep,
    OtherDropout,
    OtherRate,
    Unkeyed,
    UnkeyedBackward,
    WithModule,
    change_sample,
    make_other_layer,
    make_training,
)
from tests.helpers.tasks import Regression, weights


def test_equal_trainings_have_equal_records(tmp_path):
    fit = make_training(tmp_path)
    first, second = record_steps(fit, 9), record_steps(fit, 9)
    assert find_first_difference(first, second) is None
    assert [step.step for step in first] == [*range(1, 10)]
    assert [step.epoch for step in first] == [0] * 7 + [1] * 2


@pytest.mark.parametrize(
    ("change", "kind", "step", "place"),
    [
        ({"task": make_other_layer}, "initial parameter", 1, "net.4.bias"),
        ({"seed": 4}, "order", 1, ""),
        ({"data": partial(change_sample, 30)}, "batch", None, ""),
        ({"task": OtherDropout}, "random", 2, "training_step"),
        ({"task": OtherRate}, "setting", 3, "groups[0].lr"),
        ({"gradient_clip_val": 0.01}, "clipped gradient", 1, "net.0.weight"),
        ({"task": partial(Deep, optimizer="SGD")}, "setting", 1, "groups[0].betas"),
    ],
)
def test_difference_is_named_by_kind_step_and_place(tmp_path, change, kind, step, place):
    found = compare_trainings(make_training(tmp_path), make_training(tmp_path, **change), 7)
    assert (found.key.kind, found.key.place) == (kind, place)
    if step is None:
        steps = record_steps(make_training(tmp_path), 7)
        step = next(each.step for each in steps if "30" in each.events[Key(0, "order", "", 0)].split())
    assert found.step == step
    assert found.repeats
    assert not any(count.differ for count in found.counts if [*KINDS].index(count.kind) < [*KINDS].index(kind))


def test_values_and_the_largest_differences_are_told(tmp_path):
    found = compare_trainings(make_training(tmp_path), make_training(tmp_path, make_other_layer), 2)
    assert found.element == "[0]"
    assert found.values[1] - found.values[0] == found.absolute
    assert found.absolute == pytest.approx(1e-6, rel=0.1)
    assert found.relative == found.absolute / max(map(abs, found.values))


@pytest.mark.parametrize(
    ("module", "kind", "operator"),
    [(Unkeyed, "output", "aten.add.Tensor"), (UnkeyedBackward, "gradient of input", "aten.add.Tensor")],
)
def test_nondeterministic_module_is_named_with_operator(tmp_path, module, kind, operator):
    fit = make_training(tmp_path, lambda: WithModule(module()))
    found = compare_trainings(fit, fit, 4)
    assert (found.step, found.key.kind, found.key.place, found.operator) == (1, kind, "net.2", operator)
    assert found.repeats is False


def test_computation_between_modules_is_distinguished(tmp_path):
    class Between(Deep):
        def forward(self, inputs):
            return self.net(inputs + 1e-3)

    found = compare_trainings(make_training(tmp_path), make_training(tmp_path, Between), 2)
    assert (found.key.kind, found.key.place, found.operator) == ("input", "net", "aten.add.Tensor")


def test_the_micro_batch_of_a_step_is_named(tmp_path):
    fits = [
        make_training(tmp_path, data=partial(change_sample, number), accumulate_grad_batches=7, max_epochs=1)
        for number in (30, 31)
    ]
    found = compare_trainings(*fits, 1)
    orders = [code.split() for key, code in record_steps(fits[0], 1)[0].events.items() if key.kind == "order"]
    assert len(orders) == 7
    assert found.key.micro == min(place for place, order in enumerate(orders) if {"30", "31"} & {*order})


def test_module_called_by_only_one_is_a_difference(tmp_path):
    found = compare_trainings(make_training(tmp_path, partial(Deep, dropout=0.0)), make_training(tmp_path), 2)
    assert (found.key.kind, found.key.place, found.a) == ("random", "net.3", None)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16"}, {"halve_on_oom": True}],
)
def test_recording_leaves_every_bit_of_a_training_alone(tmp_path, options):
    fit = make_training(tmp_path, **options)
    plain, recorded = fit(None), fit(Recorder(operators_at=2))
    for (name, mine), other in zip(plain.state_dict().items(), recorded.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in recorded.modules())


def test_a_task_that_optimizes_by_hand_is_recorded(tmp_path):
    class ByHand(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()

    fit = make_training(tmp_path, ByHand)
    trace = record_steps(fit, 3)
    kinds = {key.kind for key in trace[-1].events}
    assert {"order", "batch", "output", "loss", "gradient", "setting", "parameter"} <= kinds
    assert torch.equal(weights(fit(None)), weights(fit(Recorder())))
