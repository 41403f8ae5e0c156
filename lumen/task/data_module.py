"""DataModule: where the data comes from, apart from the task that uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lumen.data.nested import move
from lumen.task.hyperparameters import HasHyperparameters

if TYPE_CHECKING:
    from lumen.run.run import Run
    from lumen.trainer.trainer import Trainer


class Attached:
    """Mixin: the run that a task or data module is attached to while it lasts."""

    _run: Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of copies, and of what is sent to workers."""
        return {name: value for name, value in self.__dict__.items() if name != "_run"}


class DataHooks:
    """Where batches come from and how they reach the device: the part that tasks and data modules share."""

    def prepare_data(self) -> None:
        """Download and unpack, once per node; keep no state here."""

    def train_dataloader(self) -> Any:
        """The training loader."""

    def val_dataloader(self) -> Any:
        """One validation loader or a list."""

    def test_dataloader(self) -> Any:
        """One test loader or a list."""

    def predict_dataloader(self) -> Any:
        """One prediction loader or a list."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is copied to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch to the device. Default: every tensor in it."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device: augmentation there is keyed like dropout."""
        return batch


class DataModule(HasHyperparameters, DataHooks, Attached):
    """Loaders for training, validation, test and prediction.

    Return ordinary `torch.utils.data.DataLoader`s. Lumen keeps their data set, collate function, workers and pinning,
    and decides which sample comes when; `shuffle=True` means an order that is a pure function of (seed, epoch).
    """

    @property
    def trainer(self) -> Trainer | None:
        """The trainer of the run; None before the first one."""
        return None if self._run is None else self._run.trainer

    def setup(self, stage: str) -> None:
        """Build data sets for a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
