"""A pole that stands on a cart, and games with it that a policy plays: data that there is only while one trains."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

LONGEST = 500
"""Steps of a game that is won."""


def begin(games: int) -> Tensor:
    """States in which games begin, of shape ``(games, 4)``: the cart's place and speed, the pole's angle and speed."""
    return 0.1 * torch.rand(games, 4) - 0.05


def push(states: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The carts after a fiftieth of a second (Barto, Sutton and Anderson, 1983).

    Args:
        states: As of `begin`, in metres, radians and seconds.
        right: Whether each cart is pushed to the right, of shape ``(games,)``; else it is to the left.

    Returns:
        The next states, and whether the cart has left the track or the pole is down, of shape ``(games,)``.
    """
    _, speed, angle, turning = states.unbind(-1)
    sine, cosine, force = angle.sin(), angle.cos(), 20.0 * right - 10.0
    pushed = (force + 0.05 * turning.square() * sine) / 1.1
    turned = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    moved = pushed - 0.05 * turned * cosine / 1.1
    steps = torch.stack([speed, moved, turning, turned], dim=-1)
    states = states + 0.02 * steps
    return states, (states[..., 0].abs() > 2.4) | (states[..., 2].abs() > math.radians(12))


class Games(IterableDataset):
    """Plays games side by side, by the policy as it is, and gives some steps of them after each other.

    A batch is a dictionary: ``states`` before each step, float32 of shape ``(games, steps, 4)``; ``right``, what was
    done, bool of shape ``(games, steps)``; ``fallen``, whether that ended a game, and ``over``, whether it ended there
    or was won, both bool of that shape; ``next``, the states after it, as ``states``.

    Args:
        policy: The probability of pushing to the right, of shape ``(games,)``, in each of the states.
        games: That are played side by side.
        steps: Of each of them in a batch.
        batches: Of an epoch.
    """

    #: What comes next depends on the policy: it is played when the step before has changed that, not ahead of it.
    follows_training = True

    def __init__(self, policy: Callable[[Tensor], Tensor], games: int, steps: int, batches: int):
        self.policy, self.steps, self.batches = policy, steps, batches
        self.states, self.ages = begin(games), torch.zeros(games, dtype=torch.int64)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            played = [self.play() for _ in range(self.steps)]
            yield {name: torch.stack([each[name] for each in played], dim=1) for name in played[0]}

    @torch.no_grad()
    def play(self) -> dict[str, Tensor]:
        """One step of each game; where one is over, another begins."""
        states = self.states
        right = torch.rand(len(states)) < self.policy(states).to(states.device)  # the games are on the CPU
        after, fallen = push(states, right)
        self.ages = self.ages + 1
        over = fallen | (self.ages == LONGEST)
        self.states = torch.where(over[:, None], begin(len(states)), after)
        self.ages = self.ages.masked_fill(over, 0)
        return {"states": states, "right": right, "fallen": fallen, "over": over, "next": after}

    def state_dict(self) -> dict[str, Any]:
        """Where the games stand, for a checkpoint."""
        return {"states": self.states, "ages": self.ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the games of a checkpoint."""
        self.states, self.ages = state["states"], state["ages"]
