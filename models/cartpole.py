"""Reinforcement learning: a policy plays, and trains on its own games (actor and critic, Mnih et al., 2016)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from datamodules.cartpole import LONGEST, Games, begin, push
from lumen.optim import linear


class ActorCritic(lumen.TaskModule):
    """Actor and critic that learn to balance a pole on a cart, with data from their own games.

    Training batches are as in `datamodules.cartpole.Games`. A validation batch has the initial states of games.

    Args:
        games: Number of parallel games.
        steps: Number of steps of each game between two updates.
        epoch: Number of updates in an epoch.
        width: Number of hidden units.
        discount: Factor for a reward that comes a step later, in [0, 1].
        trust: Lambda of generalized advantage estimation (Schulman et al., 2016), in [0, 1].
        value: Weight of the critic's loss.
        entropy: Weight of the policy's entropy, which favours exploration.
        learning_rate: Initial learning rate of Adam, which falls to 0 at the end of the run.
    """

    def __init__(
        self,
        games: int = 16,
        steps: int = 32,
        epoch: int = 50,
        width: int = 64,
        discount: float = 0.99,
        trust: float = 0.95,
        value: float = 0.2,
        entropy: float = 0.002,
        learning_rate: float = 1e-2,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(-2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1), nn.Flatten(-2))

    def forward(self, states: Tensor) -> Tensor:
        """Return the probability of a push to the right, of shape ``(games,)``, in states of shape ``(games, 4)``."""
        return self.actor(states.to(self.device, self.dtype)).sigmoid()

    def train_dataloader(self) -> DataLoader:
        """Return games that are played by this policy."""
        h = self.hparams
        return DataLoader(Games(self, h.games, h.steps, h.epoch), batch_size=None)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of the policy, by advantages, and of the critic, by the returns."""
        values, after = self.critic(batch["states"]), self.critic(batch["next"])
        advantages = self.advantages(batch, values.detach(), after.detach())
        logits = self.actor(batch["states"])
        surprise = F.binary_cross_entropy_with_logits(logits, batch["right"].float(), reduction="none")
        policy_loss = (surprise * advantages).mean()
        value_loss = F.smooth_l1_loss(values, advantages + values.detach())
        entropy = F.binary_cross_entropy_with_logits(logits, logits.sigmoid())
        self.log_dict({"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy})
        return policy_loss + self.hparams.value * value_loss - self.hparams.entropy * entropy

    def advantages(self, batch: dict[str, Tensor], values: Tensor, after: Tensor) -> Tensor:
        """Return the advantages of shape ``(games, steps)``.

        The reward of a step is such that the return of an endless game is 1.
        """
        h = self.hparams
        surprises = 1 - h.discount + h.discount * after * ~batch["fallen"] - values
        found, later = [], torch.zeros_like(surprises[:, 0])
        for surprise, over in zip(surprises.unbind(1)[::-1], batch["over"].unbind(1)[::-1], strict=True):
            later = surprise + h.discount * h.trust * later * ~over
            found.append(later)
        return torch.stack(found[::-1], dim=1)

    def val_dataloader(self) -> DataLoader:
        """Return the initial states of 20 games, the same in each validation."""
        return DataLoader(TensorDataset(begin(20)), batch_size=20)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Play each game to its end by the more likely action, and log the mean number of steps."""
        (states,) = batch
        lasted, alive = states.new_zeros(len(states)), torch.ones_like(states[:, 0], dtype=torch.bool)
        for _ in range(LONGEST):
            states, fallen = push(states, self(states) > 0.5)
            lasted += alive
            alive &= ~fallen
        self.log("val_steps", lasted.mean(), prog_bar=True)

    def configure_optimizers(self) -> dict:
        """Return Adam with a learning rate that falls to 0 at the end of the run."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        schedule = linear(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
