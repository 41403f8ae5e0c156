"""Reinforcement learning: a policy plays, and is trained on what it has met (actor and critic, Mnih et al., 2016)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from datamodules.cartpole import LONGEST, Games, begin, push
from lumen.optim import linear


class ActorCritic(lumen.TaskModule):
    """Learns to keep a pole upright on a cart; it brings its own data, as it makes it.

    A batch is that of `datamodules.cartpole.Games`; one of a validation holds the states in which games begin.

    Args:
        games: Played side by side.
        steps: Of each of them, between two updates.
        epoch: Updates of an epoch.
        width: Hidden units.
        discount: What a reward counts that comes a step later, in [0, 1].
        trust: How far an advantage looks ahead (Schulman et al., 2016: lambda), in [0, 1].
        value: Weight of the critic's loss.
        entropy: Weight of the policy's entropy, which keeps it trying.
        learning_rate: Adam's, at the start; it falls to 0 with the run.
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
        """The probability of pushing to the right, of shape ``(games,)``, in states of shape ``(games, 4)``."""
        return self.actor(states.to(self.device, self.dtype)).sigmoid()

    def train_dataloader(self) -> DataLoader:
        """Games, played by this very policy."""
        h = self.hparams
        return DataLoader(Games(self, h.games, h.steps, h.epoch), batch_size=None)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Do more often what went better than expected, and expect what came."""
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
        """What came, beyond what was expected, of shape ``(games, steps)``.

        Each step is rewarded, by so much that a game without an end is worth 1.
        """
        h = self.hparams
        surprises = 1 - h.discount + h.discount * after * ~batch["fallen"] - values
        found, later = [], torch.zeros_like(surprises[:, 0])
        for surprise, over in zip(surprises.unbind(1)[::-1], batch["over"].unbind(1)[::-1], strict=True):
            later = surprise + h.discount * h.trust * later * ~over
            found.append(later)
        return torch.stack(found[::-1], dim=1)

    def val_dataloader(self) -> DataLoader:
        """Where 20 games begin, the same in each validation."""
        return DataLoader(TensorDataset(begin(20)), batch_size=20)

    def validation_step(self, batch: list[Tensor]) -> None:
        """Play each game to its end by what the policy finds likelier, and log how many steps that takes."""
        (states,) = batch
        lasted, alive = states.new_zeros(len(states)), torch.ones_like(states[:, 0], dtype=torch.bool)
        for _ in range(LONGEST):
            states, fallen = push(states, self(states) > 0.5)
            lasted += alive
            alive &= ~fallen
        self.log("val_steps", lasted.mean(), prog_bar=True)

    def configure_optimizers(self) -> dict:
        """Adam; its learning rate falls to 0 with the run, so that the policy comes to rest."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        schedule = linear(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
