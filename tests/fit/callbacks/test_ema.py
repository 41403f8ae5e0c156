"""EMA: equal to the average by hand, and evaluated, saved, resumed and exported in place of the parameters."""

import pytest
import torch
from torch import nn

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.errors import ConfigError
from tests.helpers.ema import Normed, RecordStates, average_by_hand, fit
from tests.helpers.manual_optimization import Gan, make_pair_loader
from tests.helpers.tasks import loader, quiet_trainer


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], each) for name, each in expected.items())


def get_newest(trainer):
    return find_checkpoints(trainer.run_directory / "checkpoints")[-1]


def test_ema_is_exact_and_stays_in_the_task(tmp_path):
    first, ema, kept = Normed().state_dict(), lumen.EMA(decay=0.8), RecordStates()
    _, task = fit(tmp_path, ema, kept)
    expected = average_by_hand(kept.states, first, 0.8)
    assert assert_same(dict(ema.average), expected)
    assert assert_same(task.state_dict(), expected)


def test_average_without_updates_leaves_the_parameters(tmp_path):
    kept = RecordStates()
    _, task = fit(tmp_path, lumen.EMA(update_every_n_steps=100), kept)
    assert assert_same(task.state_dict(), kept.states[-1])


def test_validation_in_fit_uses_the_newest_average(tmp_path):
    first, kept, seen = Normed().state_dict(), RecordStates(), []

    class Watching(lumen.Callback):
        def on_validation_start(self, trainer, task):
            seen.append({name: each.clone() for name, each in task.state_dict().items()})

    trainer, _ = fit(tmp_path, lumen.EMA(decay=0.8), kept, Watching(), num_sanity_val_steps=0, max_steps=8)
    assert assert_same(seen[0], average_by_hand(kept.states[:4], first, 0.8))
    assert assert_same(seen[1], average_by_hand(kept.states[:8], first, 0.8))
    task = Normed()
    task.load_state_dict(seen[1])
    values = trainer.validate(task, loader(20, shuffle=False, dtype=torch.float64))[0]
    assert trainer.checkpoint_callback.best_model_path != ""
    rows = (trainer.run_directory / "metrics.csv").read_text().splitlines()
    assert any(str(values["val_loss"]) in row for row in rows)


@pytest.mark.parametrize("cut", [3, 4, 8])
def test_resumed_ema_equals_uninterrupted_run(tmp_path, cut):
    whole, parts = lumen.EMA(decay=0.7, warmup=True), lumen.EMA(decay=0.7, warmup=True)
    expected, _ = fit(tmp_path / "whole", whole)
    fit(tmp_path / "parts", lumen.EMA(decay=0.7, warmup=True), max_steps=cut)
    trainer, _ = fit(tmp_path / "parts", parts)
    assert assert_same(dict(parts.average), dict(whole.average))
    files = [(each.run_directory / "metrics.csv").read_bytes() for each in (expected, trainer)]
    assert files[0] == files[1]


def test_validation_error_restores_the_parameters(tmp_path):
    class Failing(Normed):
        def validation_step(self, batch):
            raise ZeroDivisionError

    kept = RecordStates()
    task = Failing()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, lumen.EMA(decay=0.8), kept, task=task, num_sanity_val_steps=0)
    alone = RecordStates()
    fit(tmp_path / "alone", alone, max_steps=4)
    assert assert_same(task.state_dict(), alone.states[3])


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({"update_every_n_steps": 3}, {3: 0.8, 6: 0.8, 9: 0.8}),
        ({"update_starting_at_step": 2}, {1: 0.0, 2: 0.0} | dict.fromkeys(range(3, 10), 0.8)),
        ({"update_starting_at_epoch": 1}, dict.fromkeys(range(1, 7), 0.0) | dict.fromkeys(range(7, 10), 0.8)),
        ({"warmup": True}, {step: min(0.8, step / (9 + step)) for step in range(1, 10)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("val_check_interval", [1.0, 4])
def test_when_and_how_far_it_moves(tmp_path, options, moves, val_check_interval):
    first, ema, kept = Normed().state_dict(), lumen.EMA(decay=0.8, **options), RecordStates()
    fit(tmp_path, ema, kept, val_check_interval=val_check_interval)
    expected = {name: each.clone() for name, each in first.items()}
    for step, decay in moves.items():
        expected = average_by_hand(kept.states[step - 1 : step], expected, decay)
    assert all(torch.equal(ema.average[name], each) for name, each in expected.items() if each.is_floating_point())


def test_ema_without_buffers_uses_buffers_of_the_model(tmp_path):
    ema, kept = lumen.EMA(decay=0.8, use_buffers=False), RecordStates()
    _, task = fit(tmp_path, ema, kept)
    assert ema.average.keys() == dict(task.named_parameters()).keys()
    assert torch.equal(task.net[1].running_mean, kept.states[-1]["net.1.running_mean"])


def test_updates_that_overflow_do_not_move_it(tmp_path):
    precision, ema = lumen.precision.Float16(init_scale=2.0**40), lumen.EMA(decay=0.5)
    trainer = quiet_trainer(tmp_path, precision=precision, callbacks=[ema], max_epochs=1, max_steps=1)
    task = Normed(torch.float32)
    before = {name: each.detach().clone() for name, each in task.named_parameters()}
    trainer.fit(task, loader(400))
    assert precision.skipped_updates > 1
    for name, each in before.items():
        moved = (ema.average[name] - each).abs().max()
        assert 0 < moved < 1e-2  # by one update of AdamW with this rate


def test_ema_with_manual_optimization_updates_once_per_step(tmp_path):
    first, ema, kept = Gan().state_dict(), lumen.EMA(decay=0.8), RecordStates()
    quiet_trainer(tmp_path, max_steps=5, callbacks=[ema, kept]).fit(Gan(every=2), make_pair_loader())
    assert assert_same(dict(ema.average), average_by_hand(kept.states, first, 0.8))


def test_what_it_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="decay must be at least 0 and less than 1, found 1"):
        lumen.EMA(decay=1.0)
    with pytest.raises(ConfigError, match="update_every_n_steps"):
        lumen.EMA(update_every_n_steps=0)
    with pytest.raises(ConfigError, match="the average is on the devices of the parameters"):
        lumen.EMA(device="cpu")
    fit(tmp_path, lumen.EMA(), max_steps=2)
    with pytest.raises(ConfigError, match="use_buffers of the original run"):
        fit(tmp_path, lumen.EMA(use_buffers=False))


def test_user_callback_can_wrap_validation(tmp_path):
    calls = []

    class Around(lumen.Callback):
        def validation_context(self, trainer, task):
            calls.append("made")
            return nn.utils.parametrize.cached()

        def on_validation_start(self, trainer, task):
            calls.append("start")

    trainer, task = fit(tmp_path, Around(), max_steps=4)
    assert calls == ["made", "start"] * 2  # including the sanity check
    trainer.validate(task, loader(8, dtype=torch.float64))
    assert calls == ["made", "start"] * 2 + ["start"]
