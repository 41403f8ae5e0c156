"""Callbacks that update the teacher and keep losses."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities.exceptions import MisconfigurationException


class MomentumTeacher(Callback):
    """Moves the teacher towards the student after each step, ever slower.

    Args:
        start: Momentum at the beginning, between 0 and 1.
        end: Momentum at the end of training.
    """

    def __init__(self, start: float = 0.9, end: float = 1.0) -> None:
        if not 0 <= start <= end <= 1:
            raise MisconfigurationException(f"momentum must rise between 0 and 1, found {start} to {end}")
        self.start = start
        self.end = end
        self.momentum = start
        self.updates = 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        share = min(1.0, trainer.global_step / trainer.estimated_stepping_batches)
        self.momentum = self.end - (self.end - self.start) * (math.cos(math.pi * share) + 1) / 2
        with torch.no_grad():
            pairs = zip(pl_module.teacher.parameters(), pl_module.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - self.momentum)
        self.updates += 1
        pl_module.log("momentum", self.momentum, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, float]:
        return {"momentum": self.momentum, "updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.momentum, self.updates = state_dict["momentum"], state_dict["updates"]


class LossHistory(Callback):
    """Losses of every step, kept over resumes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_fit_end(self, trainer: pl.Trainer, pl_module) -> None:
        limit = "max_steps" if trainer.max_steps and trainer.max_steps > 0 else "max_epochs"
        print(f"{len(self.losses)} losses, {limit}, of {type(trainer.lightning_module).__name__}")

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])
