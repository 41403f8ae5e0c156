"""Example that learns by playing: its physics, its advantages, and a resume with the games that it played."""

import pytest
import torch

from datamodules.cartpole import LONGEST, Games, begin, push
from models.cartpole import ActorCritic
from tests.helpers.cli import run_model
from tests.helpers.tables import read_rows
from tests.helpers.tasks import bare_trainer, quiet_trainer


def make_player(**options):
    torch.manual_seed(0)
    return ActorCritic(**options)


def test_push_follows_the_physics():
    states = torch.zeros(2, 4, dtype=torch.float64)
    after, fallen = push(states, torch.tensor([True, False]))
    # a force of 10 N on 1.1 kg, and on a pole of 0.1 kg and 0.5 m to its middle, for 0.02 s
    turned = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    moved = 10 / 1.1 - 0.1 * 0.5 * turned / 1.1
    expected = torch.tensor([0.0, 0.02 * moved, 0.0, 0.02 * turned], dtype=torch.float64)
    torch.testing.assert_close(after, torch.stack([expected, -expected]))
    assert not fallen.any()
    assert push(torch.tensor([[2.5, 0, 0, 0], [0, 0, 0.22, 0], [0, 0, 0.2, 0]]), torch.ones(3) > 0)[1].tolist() == [
        True, True, False,
    ]  # fmt: skip


def test_game_ends_when_pole_falls_or_player_wins():
    torch.manual_seed(0)
    games = Games(lambda states: torch.ones(len(states)), games=3, steps=40, batches=1)
    batch = next(iter(games))
    assert batch["states"].shape == (3, 40, 4)
    assert batch["right"].all()
    assert batch["fallen"].any(1).all()
    assert torch.equal(batch["fallen"], batch["over"])
    ends = batch["over"][:, :-1]
    assert (batch["states"][:, 1:][ends].abs() <= 0.05).all()
    assert torch.equal(batch["states"][:, 1:][~ends], batch["next"][:, :-1][~ends])
    games.ages[:] = LONGEST - 1
    games.states = begin(3)
    played = games.play()
    assert played["over"].all()
    assert not played["fallen"].any()
    assert games.ages.tolist() == [0, 0, 0]


def test_advantages_equal_generalized_advantage_estimation():
    task = make_player(discount=0.5, trust=1.0)
    values, after = torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[0.2, 0.3, 0.4]])
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    found = task.advantages({"fallen": nothing, "over": nothing}, values, after)
    expected = [0.5 + 0.25 + 0.125 + 0.125 * 0.4 - 0.1, 0.5 + 0.25 + 0.25 * 0.4 - 0.2, 0.5 + 0.5 * 0.4 - 0.3]
    assert found[0].tolist() == pytest.approx(expected)
    second = torch.tensor([[False, True, False]])
    fell = task.advantages({"fallen": second, "over": second}, values, after)
    assert fell[0].tolist() == pytest.approx([0.5 + 0.25 - 0.1, 0.5 - 0.2, 0.5 + 0.5 * 0.4 - 0.3])
    won = task.advantages({"fallen": nothing, "over": second}, values, after)
    assert won[0].tolist() == pytest.approx([0.5 + 0.25 + 0.25 * 0.3 - 0.1, 0.5 + 0.5 * 0.3 - 0.2, 0.4])


def train(folder, steps, **options):
    task = make_player(games=4, steps=8, epoch=5)
    seen = []

    class Seen(type(task)):
        def training_step(self, batch):
            seen.append(batch["states"].sum().item())
            return super().training_step(batch)

    task.__class__ = Seen
    task.configure_optimizers = lambda: torch.optim.Adam(task.parameters(), 0.01)
    quiet_trainer(folder, max_steps=steps, limit_val_batches=0, **options).fit(task)
    return task, seen


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5, 7])
def test_resumed_run_plays_the_same_games(tmp_path, step):
    whole, seen = train(tmp_path / "whole", 12)
    _, first = train(tmp_path / "parts", step)
    again, rest = train(tmp_path / "parts", 12, resume="auto")
    assert first + rest == seen
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


@pytest.mark.slow
def test_hundred_updates_balance_five_times_longer(tmp_path):
    task = make_player()
    (before,) = bare_trainer(tmp_path).validate(task)
    trainer = bare_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0, check_val_every_n_epoch=2)
    trainer.fit(task)
    assert before["val_steps"] < 20
    assert float(trainer.callback_metrics["val_steps"]) > 5 * before["val_steps"]


@pytest.mark.slow
@pytest.mark.time_limit(200)
def test_config_balances_the_pole_until_the_end(tmp_path):
    run_model("fit", "cartpole", tmp_path)
    found = [float(row["val_steps"]) for row in read_rows(tmp_path / "cartpole/metrics.csv") if row["val_steps"]]
    assert found[0] < 400
    assert found[-1] >= 450
