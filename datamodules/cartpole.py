"""Cart-pole games that a policy plays: data that exists only during training."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

LONGEST = 500
"""Number of steps of a game that is won."""


def begin(games: int) -> Tensor:
    """Return initial states of shape ``(games, 4)``: position and speed of the cart, angle and speed of the pole."""
    return 0.1 * torch.rand(games, 4) - 0.05


def push(states: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Simulate the carts for a fiftieth of a second (Barto, Sutton and Anderson, 1983).

    Args:
        states: States as returned by `begin`, in metres, radians and seconds.
        right: Bool of shape ``(games,)``, True to push a cart to the right, False to the left.

    Returns:
        The next states, and a bool of shape ``(games,)``, True if the cart left the track or the pole fell.
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
    """Stream of steps of parallel games, played by the current policy.

    A batch is a dictionary: ``states`` before each step, float32 of shape ``(games, steps, 4)``; ``right``, the action,
    bool of shape ``(games, steps)``; ``fallen``, True if the pole fell, and ``over``, True if the pole fell or the game
    was won, both bool of the same shape; ``next``, the states after each step, as ``states``.

    Args:
        policy: Function from states to probabilities of a push to the right, of shape ``(games,)``.
        games: Number of parallel games.
        steps: Number of steps of each game in a batch.
        batches: Number of batches in an epoch.
    """

    #: True, because each batch depends on the policy after the last optimizer step, so nothing is loaded ahead.
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
        """Play one step of each game, and start a new game for each game that is over."""
        states = self.states
        right = torch.rand(len(states)) < self.policy(states).to(states.device)  # the games are on the CPU
        after, fallen = push(states, right)
        self.ages = self.ages + 1
        over = fallen | (self.ages == LONGEST)
        self.states = torch.where(over[:, None], begin(len(states)), after)
        self.ages = self.ages.masked_fill(over, 0)
        return {"states": states, "right": right, "fallen": fallen, "over": over, "next": after}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the games, for a checkpoint."""
        return {"states": self.states, "ages": self.ages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the games of a checkpoint."""
        self.states, self.ages = state["states"], state["ages"]
