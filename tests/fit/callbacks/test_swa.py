"""SWA: the mean of torch's tools, evaluated, saved, resumed and exported in place of the parameters."""

import numpy as np
import pytest
import torch

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.errors import ConfigError
from tests.helpers.ema import RecordStates
from tests.helpers.finetuning import RecordRates
from tests.helpers.group import assert_equal
from tests.helpers.swa import EPOCHS, SAMPLES, START, Scheduled, train_by_hand, train_with_swa
from tests.helpers.tasks import loader, quiet_trainer


@pytest.mark.slow
@pytest.mark.parametrize(("annealing", "strategy"), [(2, "cos"), (2, "linear"), (10, "cos")])
def test_swa_mean_and_rates_equal_those_of_torch(tmp_path, annealing, strategy):
    rates = RecordRates()
    ours, _ = train_with_swa(tmp_path, lumen.SWA(0.02, START, annealing, strategy), rates)
    theirs, expected = train_by_hand(annealing, strategy)
    counter = "net.1.num_batches_tracked"  # torch divides by it too
    assert (ours.pop(counter), theirs.pop(counter)) == (EPOCHS * SAMPLES // 8, pytest.approx(30, abs=3))
    assert_equal(ours, theirs)
    np.testing.assert_allclose([each[0] for each in rates.seen], expected, rtol=0, atol=1e-15)


def test_without_annealing_the_rate_is_there_at_once(tmp_path):
    rates = RecordRates()
    train_with_swa(tmp_path, lumen.SWA([0.02], 0.5, 0), rates)
    assert [each[0] for each in rates.seen] == [0.1, 0.1, 0.05, 0.02, 0.02, 0.02]


def test_buffers_may_be_left_as_they_are(tmp_path):
    kept = RecordStates()
    ours, _ = train_with_swa(tmp_path, lumen.SWA(0.02, START, 2, use_buffers=False), kept)
    theirs, _ = train_by_hand(2, "cos")
    last = kept.states[-1]
    assert_equal({"weight": ours["net.0.weight"]}, {"weight": theirs["net.0.weight"]})
    assert_equal({"mean": ours["net.1.running_mean"]}, {"mean": last["net.1.running_mean"].numpy()}, 0.0)


def test_validation_uses_the_mean_once_it_exists(tmp_path):
    kept, seen = RecordStates(), []

    class Watching(lumen.Callback):
        def on_validation_start(self, trainer, task):
            seen.append(task.net[0].weight.detach().clone())

    train_with_swa(tmp_path, lumen.SWA(0.02, 3, 2), kept, Watching(), num_sanity_val_steps=0)
    ends = [kept.states[6 * epoch - 1]["net.0.weight"] for epoch in range(1, EPOCHS + 1)]
    expected = [*ends[:4], (ends[3] + ends[4]) / 2, (ends[3] + ends[4] + ends[5]) / 3]
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-15)


def test_checkpoints_hold_parameters_and_mean_once_it_exists(tmp_path):
    _, trainer = train_with_swa(tmp_path, swa := lumen.SWA(0.02, START, 2))
    newest = find_checkpoints(trainer.run_directory / "checkpoints")[-1]
    mean = Scheduled.load_from_checkpoint(newest, average="SWA").state_dict()
    assert mean.keys() == swa.average.keys()
    assert all(torch.equal(each, swa.average[name]) for name, each in mean.items())
    plain = Scheduled.load_from_checkpoint(newest, average="parameters")
    assert not torch.equal(plain.net[0].weight, mean["net.0.weight"])
    _, trainer = train_with_swa(tmp_path / "early", lumen.SWA(0.02, START, 2), steps=12)
    newest = find_checkpoints(trainer.run_directory / "checkpoints")[-1]
    with pytest.raises(ConfigError, match="has no average of that name"):
        Scheduled.load_from_checkpoint(newest, average="SWA")


def test_runs_without_a_mean_keep_their_parameters(tmp_path, caplog):
    kept = RecordStates()
    end, _ = train_with_swa(tmp_path, lumen.SWA(0.02, START), kept, steps=12, log_level="WARNING")
    assert_equal(end, {name: each.numpy() for name, each in kept.states[-1].items()}, 0.0)
    assert "SWA: the run ended before the average began, so the task keeps its parameters" in caplog.text


def test_mean_begun_after_resume_counts_epochs_once(tmp_path):
    kept = RecordStates()
    train_with_swa(tmp_path, kept, steps=6 * (START + 1))
    end, _ = train_with_swa(tmp_path, lumen.SWA(0.02, START, 2), kept)
    ends = [kept.states[6 * epoch - 1] for epoch in range(START + 2, EPOCHS + 1)]
    expected = {name: sum(state[name] for state in ends) / len(ends) for name in ("net.0.weight", "net.4.bias")}
    assert_equal({name: end[name] for name in expected}, {name: each.numpy() for name, each in expected.items()})


@pytest.mark.parametrize("steps", [26, 33])
def test_an_unfinished_epoch_is_not_in_the_mean(tmp_path, steps):
    kept = RecordStates()
    end, trainer = train_with_swa(tmp_path, lumen.SWA(0.02, START, 2), kept, steps=steps)
    ends = [kept.states[6 * epoch - 1] for epoch in range(START + 1, steps // 6 + 1)]
    expected = {name: sum(state[name] for state in ends) / len(ends) for name in ("net.0.weight", "net.4.bias")}
    assert_equal({name: end[name] for name in expected}, {name: each.numpy() for name, each in expected.items()})
    newest = find_checkpoints(trainer.run_directory / "checkpoints")[-1]
    saved = Scheduled.load_from_checkpoint(newest).state_dict()
    assert_equal({name: each.numpy() for name, each in saved.items()}, end, 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"swa_lrs": 0.0}, "swa_lrs must be above 0"),
        ({"swa_lrs": [0.1, -0.1]}, "swa_lrs must be above 0"),
        ({"swa_epoch_start": 1.5}, "swa_epoch_start is a share below 1 or a whole epoch, found 1.5"),
        ({"swa_epoch_start": -1}, "swa_epoch_start"),
        ({"annealing_epochs": -1}, "annealing_epochs"),
        ({"annealing_strategy": "step"}, "annealing_strategy"),
        ({"avg_fn": max}, "SWA is the plain mean"),
        ({"swa_lrs": [0.1, 0.1]}, "swa_lrs has 2 rates, but there are 1 parameter groups"),
    ],
)
def test_what_it_cannot_be_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        train_with_swa(tmp_path, lumen.SWA(**{"swa_lrs": 0.1} | options))


def test_a_share_needs_epochs_to_be_of(tmp_path):
    trainer = quiet_trainer(tmp_path, max_steps=3, callbacks=lumen.SWA(0.1))
    with pytest.raises(ConfigError, match=r"swa_epoch_start=0.8 is a share of max_epochs, which this run"):
        trainer.fit(Scheduled(), loader(SAMPLES, dtype=torch.float64))
