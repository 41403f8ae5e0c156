"""Under FSDP one process has less memory than the others, which wait for it in each unit: the step is the same."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen import FSDP
from lumen.errors import ConfigError
from tests.helpers.cramped_training import (
    Cramped,
    Fickle,
    Heads,
    Limited,
    OwnStream,
    Silent,
    Spread,
    Touchy,
    Tower,
    Weighed,
    WeighedBefore,
)
from tests.helpers.sharded import whole
from tests.helpers.tasks import bare_trainer, loader

KINDS = {
    "plain": Cramped, "weighed": Weighed, "weighed before": WeighedBefore, "tower": Tower, "fickle": Fickle,
    "silent": Silent, "heads": Heads, "spread": Spread, "touchy": Touchy,
}  # fmt: skip


def train(folder, kind, fits, where, strategy=None, ranks=(1,), batch_size=8, data=None, **options):
    """Weights, rows, what is known to fit, and sizes of batches that were tried, after 50 samples twice, in 32s."""
    task = KINDS[kind](fits, where, ranks=ranks)
    options = {"max_epochs": 2, "precision": "fp64", "global_batch_size": 32} | options
    task = task if options["precision"] == "fp64" else task.float()
    strategy = FSDP(**(strategy or {}))
    trainer = bare_trainer(folder, strategy=strategy, halve_on_oom=fits < 100, **options)
    trainer.fit(task, loader(50, batch_size, dtype=next(task.parameters()).dtype) if data is None else data)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "drawn"}
    return torch.cat([whole(each).flatten() for each in task.parameters()]), values, trainer.progress.fits, task.sizes


def assert_same(found, expected, fits=2, rtol=1e-11, atol=1e-13):
    for (weights, values, known, _), (expected_weights, expected_values, _, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=rtol, atol=atol)
        assert values["error"] == pytest.approx(expected_values["error"], rel=max(rtol, 1e-6))  # it sums in float32
        assert known == fits


@pytest.mark.parametrize("where", ["start", "forward"])
@pytest.mark.parametrize("kind", ["plain", "weighed", "weighed before"])
def test_the_step_is_that_of_processes_with_enough_memory(group, tmp_path, where, kind):
    """18 samples are left for the second step: the first process has two batches of it, the other one and a dummy."""
    expected = group(2).run(train, tmp_path, kind, 10**6, where)
    found = group(2).run(train, tmp_path, kind, 3, where)
    assert_same(found, expected)


STRATEGIES = {
    "full": {}, "kept": {"sharding_strategy": "shard_grad_op"}, "reduced each time": {"reduce_every_backward": True},
    "unused": {"find_unused_parameters": True}, "offloaded": {"cpu_offload": True},
    "checkpointed": {"activation_checkpointing": "Floor"},
}  # fmt: skip


@pytest.mark.parametrize("where", ["forward 0", "forward 2", "backward 3", "backward 1", "backward 0"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_process_that_fails_in_any_unit_keeps_pace_with_the_others(group, tmp_path, where, strategy):
    expected = group(2).run(train, tmp_path, "tower", 10**6, where, STRATEGIES[strategy])
    found = group(2).run(train, tmp_path, "tower", 3, where, STRATEGIES[strategy])
    assert_same(found, expected)
    assert found[1][3][:2] == [8, 4]  # the first attempt, and what it keeps pace with


@pytest.mark.parametrize("ranks", [(0, 2), (0, 1, 2)])
def test_several_processes_fail_at_once(group, tmp_path, ranks):
    expected = group(3).run(train, tmp_path, "tower", 10**6, "backward 1", None, ranks)
    found = group(3).run(train, tmp_path, "tower", 3, "backward 1", None, ranks)
    assert_same(found, expected)


@pytest.mark.parametrize("where", ["forward 2", "backward 1"])
def test_one_process_alone_does_so_too(group, tmp_path, where):
    expected = group(1).run(train, tmp_path, "tower", 10**6, where, None, (0,))
    found = group(1).run(train, tmp_path, "tower", 3, where, None, (0,))
    assert_same(found, expected)


def train_once(folder, kind, fits):
    return train(folder, kind, fits, "backward 1", max_epochs=1)


def test_what_fails_again_when_all_is_made_again_is_logged_once(group, tmp_path):
    expected, found = (group(2).run(train_once, tmp_path, "fickle", fits) for fits in (10**6, 3))
    assert_same(found, expected)
    assert found[1][3][:4] == [8, 4, 4, 2]
    for (_, values, *_), (_, expected_values, *_) in zip(found, expected, strict=True):
        assert values == pytest.approx(expected_values, rel=1e-6)


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_a_process_without_a_loss_lends_what_fits_from_an_earlier_step(group, tmp_path, ranks):
    """Rank 1 returns None in the step in which memory ends: its part in it is that of a batch of the step before."""
    expected = group(2).run(train, tmp_path, "silent", 10**6, "backward 1", None, ranks)
    found = group(2).run(train, tmp_path, "silent", 3, "backward 1", None, ranks)
    assert_same(found, expected)


def test_parameters_of_a_micro_batch_before_the_one_that_failed_are_not_missing(group, tmp_path):
    expected, found = (group(2).run(train, tmp_path, "heads", fits, "backward 1") for fits in (10**6, 3))
    assert_same(found, expected)


def test_what_keeps_pace_computes_with_values_that_parameters_may_have(group, tmp_path):
    """Those of the other processes were sent to an attempt that is gone."""
    expected, found = (group(2).run(train, tmp_path, "spread", fits, "backward 1") for fits in (10**6, 3))
    assert_same(found, expected)


def train_on_own(folder, fits, sizes, ranks):
    data = DataLoader(OwnStream(sizes), batch_size=None)
    options = {"global_batch_size": None, "accumulate_grad_batches": 4, "max_epochs": 1}
    return train(folder, "tower", fits, "forward 2", None, ranks, data=data, **options)


APART = [([8, 8, 3, 3, 8, 8, 3, 3], [2]), ([8, 2, 2], [8, 8, 8, 2, 2])]


@pytest.mark.parametrize(("sizes", "ranks"), [(APART[0], (0,)), (APART[1], (0,)), (APART[1], (1,))])
def test_processes_whose_own_streams_end_at_different_times_cut_alike(group, tmp_path, sizes, ranks):
    """Dummies are of another size than what the others have in their round, whose number follows from no rank."""
    expected = group(2).run(train_on_own, tmp_path, 10**6, sizes, ranks)
    found = group(2).run(train_on_own, tmp_path, 3, sizes, ranks)
    assert_same(found, expected)


def fail_in_keeping_pace(folder):
    """Notes of the error of a batch that only keeps pace, and what the task is evaluated to after it, and anew."""
    task, data = Touchy(3, "backward 1", ranks=(0,)), loader(50, 8, shuffle=False, dtype=torch.float64)
    options = {"strategy": FSDP(), "precision": "fp64", "max_epochs": 1}
    with pytest.raises(ValueError, match="a small batch") as caught:
        bare_trainer(folder, halve_on_oom=True, **options).fit(task, data)
    task.fits = 10**6
    after = bare_trainer(folder, **options).validate(task, data)
    return caught.value.__notes__, after, bare_trainer(folder, **options).validate(Touchy(), data)


def test_an_error_in_keeping_pace_says_so_and_spoils_no_later_run(group, tmp_path):
    ((notes, after, anew),) = group(1).run(fail_in_keeping_pace, tmp_path)
    assert any("kept pace with the others for nothing" in note for note in notes)
    assert after == anew


def test_a_gradient_scaler_sees_the_same_step(group, tmp_path):
    """The first guess of a sum of weights is agreed on, once, by the process that fails too."""
    expected, found = (group(2).run(in_16_bits, tmp_path, fits) for fits in (10**6, 3))
    assert_same(found, expected, rtol=1e-2, atol=1e-3)


def in_16_bits(folder, fits):
    return train(folder, "weighed", fits, "forward", precision="fp16")


def test_while_all_fits_the_bits_are_those_without_the_flag(group, tmp_path):
    without, flagged = (group(2).run(train, tmp_path, "tower", fits, "forward 1") for fits in (10**6, 99))
    for (expected, *_), (found, *_) in zip(without, flagged, strict=True):
        assert torch.equal(found, expected)


CUT_UP = {"unshard_in_evaluation": False}


def evaluate(folder, fits, strategy, ranks, samples, kind="tower"):
    """What `validate` and `predict` give; the batches have 16 samples, or are those of the processes' own streams."""
    task, own = KINDS[kind](fits, "forward 2", ranks=ranks), not isinstance(samples, int)
    loaders = loader(50 if own else samples, 16, shuffle=False, dtype=torch.float64)
    loaders = DataLoader(OwnStream(samples), batch_size=None) if own else loaders
    trainer = bare_trainer(folder, strategy=FSDP(**(CUT_UP | strategy)), precision="fp64", halve_on_oom=fits < 100)
    (values,), sizes = trainer.validate(task, loaders), [*task.sizes]
    return values, trainer.predict(task, loaders), sizes


@pytest.mark.parametrize("strategy", [{}, {"sharding_strategy": "shard_grad_op"}])
@pytest.mark.parametrize(("ranks", "world", "samples"), [((1,), 2, 50), ((0,), 2, 50), ((1, 2), 3, 37)])
def test_an_evaluation_whose_forwards_communicate_has_the_same_values(group, tmp_path, strategy, ranks, world, samples):
    """Of 50 samples two are left for the last round, in which the other process has a dummy."""
    expected = group(world).run(evaluate, tmp_path, 10**6, strategy, ranks, samples)
    found = group(world).run(evaluate, tmp_path, 3, strategy, ranks, samples)
    for (values, outputs, sizes), (expected_values, expected_outputs, _) in zip(found, expected, strict=True):
        assert values == pytest.approx(expected_values, rel=1e-12)
        assert [len(each) for each in outputs or []] == [len(each) for each in expected_outputs or []]
        torch.testing.assert_close(outputs, expected_outputs, rtol=1e-12, atol=1e-14)
        assert max(sizes[3:]) < 16  # what does not fit is tried once


@pytest.mark.parametrize(
    ("kind", "samples"), [("fickle", 50), ("tower", ([8, 8, 3, 3, 8, 8, 3, 3], [2])), ("fickle", ([3], [8, 8, 3, 8]))]
)
def test_an_evaluation_has_them_where_it_fails_again_and_where_streams_end_apart(group, tmp_path, kind, samples):
    expected = group(2).run(evaluate, tmp_path, 10**6, {}, (1,), samples, kind)
    found = group(2).run(evaluate, tmp_path, 3, {}, (1,), samples, kind)
    for (values, outputs, _), (expected_values, expected_outputs, _) in zip(found, expected, strict=True):
        assert values == pytest.approx(expected_values, rel=1e-12)
        torch.testing.assert_close(outputs, expected_outputs, rtol=1e-12, atol=1e-14)


def train_and_validate(folder, fits):
    """Weights, and the values of validations in the middle of epochs and at their ends."""
    task, train_data = Tower(fits, "backward 1", ranks=(1,)), loader(50, 8, dtype=torch.float64)
    options = {"max_epochs": 2, "val_check_interval": 1, "num_sanity_val_steps": 1, "global_batch_size": 16}
    trainer = bare_trainer(folder, strategy=FSDP(**CUT_UP), precision="fp64", halve_on_oom=fits < 100, **options)
    trainer.fit(task, train_data, loader(50, 16, shuffle=False, dtype=torch.float64))
    weights = torch.cat([whole(each).flatten() for each in task.parameters()])
    return weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_training_goes_on_between_evaluations_as_with_enough_memory(group, tmp_path):
    expected, found = (group(2).run(train_and_validate, tmp_path, fits) for fits in (10**6, 3))
    for (weights, values), (expected_weights, expected_values) in zip(found, expected, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-11, atol=1e-13)
        assert values["val_loss"] == pytest.approx(expected_values["val_loss"], rel=1e-11)
        assert values["early"] == pytest.approx(expected_values["early"], rel=1e-11)


def train_limited(folder, left_mib):
    inputs = torch.randn(2048, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), 1024)
    task = Limited(left_mib)
    trainer = bare_trainer(folder, strategy=FSDP(), precision="fp64", max_epochs=2, halve_on_oom=bool(left_mib))
    trainer.fit(task, data)
    return torch.cat([whole(each).flatten() for each in task.parameters()]), trainer.progress.fits, task.sizes


def test_memory_that_is_really_used_up_ends_no_run(group, tmp_path):
    """One process has 250 MiB left, the four layers ask for 300 and more; the other process has memory."""
    expected, found = (group(2).run(train_limited, tmp_path, left_mib) for left_mib in (None, 250))
    for (weights, fits, sizes), (expected_weights, *_) in zip(found, expected, strict=True):
        torch.testing.assert_close(weights, expected_weights, rtol=1e-11, atol=1e-13)
        assert 0 < fits < 1024
        assert sizes.count(1024) == 1


class Lockstep(lumen.Strategy):
    """Says that its forwards communicate, and knows nothing of attempts that fail."""

    device = torch.device("cpu")
    setup = teardown = call = gradient_sync = lambda *_: None

    def communicates_in(self, part):
        return True


def test_a_strategy_that_cannot_make_a_forward_again_refuses_it(tmp_path):
    with pytest.raises(ConfigError, match="halve_on_oom: under Lockstep all processes communicate in each forward"):
        bare_trainer(tmp_path, strategy=Lockstep(), halve_on_oom=True, max_steps=1).fit(Tower(), loader())


def fail_alone(folder):
    """What ends a run in which a single sample does not fit."""
    try:
        train(folder, "tower", 0, "forward 1", None, (0, 1))
    except torch.OutOfMemoryError as error:
        return error.__notes__
    return []


def test_a_single_sample_that_does_not_fit_ends_the_run(group, tmp_path):
    for notes in group(2).run(fail_alone, tmp_path):
        assert any("One sample does not fit, so it cannot be halved any further." in note for note in notes)


def refused(folder):
    with pytest.raises(ConfigError, match=r"halve_on_oom: with sharding_strategy no_shard copies of the .* sum grad"):
        train(folder, "tower", 3, "forward 1", {"sharding_strategy": "no_shard"})
    return True


def test_copies_of_parameters_refuse_it_before_any_step(group, tmp_path):
    assert group(2).run(refused, tmp_path) == [True, True]
