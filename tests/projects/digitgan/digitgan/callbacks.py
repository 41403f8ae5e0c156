"""Callbacks that watch the training of the GAN."""

from pathlib import Path

import lightning as L
import torch


class SampleGrid(L.Callback):
    """Keep the images that the generator makes from the same noise, after every n-th epoch."""

    def __init__(self, directory: str, every_n_epochs: int = 1):
        self.directory = Path(directory)
        self.every_n_epochs = every_n_epochs

    @torch.no_grad()
    def on_train_epoch_end(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs or not trainer.is_global_zero:
            return
        was_training = pl_module.training
        pl_module.eval()
        images = pl_module(pl_module.fixed_noise, torch.arange(10, device=pl_module.device))
        pl_module.train(was_training)
        self.directory.mkdir(parents=True, exist_ok=True)
        torch.save(images.cpu(), self.directory / f"epoch-{trainer.current_epoch:03d}.pt")


class BalanceWatch(L.Callback):
    """Stop a run whose critic has won: its gradient penalty is gone and its loss falls without end."""

    def __init__(self, lowest_loss: float = -1e3, patience: int = 5):
        self.lowest_loss = lowest_loss
        self.patience = patience
        self.strikes = 0
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen += 1
        loss = trainer.callback_metrics.get("critic/loss_step")
        if loss is None:
            return
        self.strikes = self.strikes + 1 if loss < self.lowest_loss else 0
        if self.strikes >= self.patience:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, int]:
        return {"strikes": self.strikes, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.strikes, self.seen = state_dict["strikes"], state_dict["seen"]
