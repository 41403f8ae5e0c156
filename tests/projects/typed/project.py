"""A project whose author runs a strict type checker: callbacks, a task and a logger, annotated with public names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lumen


def describe(trainer: lumen.Trainer, task: lumen.TaskModule) -> str:
    return f"{type(task).__name__} at {trainer.global_step} in {trainer.log_dir}"


class Watch(lumen.Callback):
    def setup(self, trainer: lumen.Trainer, task: lumen.TaskModule, stage: str) -> None:
        super().setup(trainer, task, stage)

    def on_train_start(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
        print(describe(trainer, task), trainer.max_epochs)

    def on_train_batch_end(
        self, trainer: lumen.Trainer, task: lumen.TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trainer.should_stop = trainer.global_step > 3


class Unfreeze(lumen.BaseFinetuning):
    def freeze_before_training(self, task: lumen.TaskModule) -> None:
        self.freeze(task)

    def finetune_function(self, task: lumen.TaskModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        print(epoch)

    def on_train_epoch_start(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
        super().on_train_epoch_start(trainer, task)


class Write(lumen.BasePredictionWriter):
    def write_on_epoch_end(
        self, trainer: lumen.Trainer, task: lumen.TaskModule, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save(predictions, Path(str(trainer.log_dir)) / "predictions.pt")

    def on_predict_epoch_end(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
        super().on_predict_epoch_end(trainer, task)


class Task(lumen.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(describe(self.trainer, self))
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def steps_left(self) -> int:
        return self.trainer.estimated_stepping_batches - self.trainer.global_step

    def name(self) -> str:
        return self.trainer.global_step  # type: ignore[return-value]  # needless if the trainer had no types


class Data(lumen.DataModule):
    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            print(self.trainer.world_size)

    def train_dataloader(self) -> list[Tensor]:
        return [torch.ones(4, 2)]


class Log(lumen.Logger):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        print(step, dict(metrics))


def train() -> Task:
    stop = lumen.EarlyStopping("loss")
    trainer = lumen.Trainer(max_steps=3, callbacks=[Watch(), Unfreeze(), Write(), stop], logger=Log())
    trainer.fit(Task(), Data())
    stop.on_train_start(trainer, Task())
    return Task.load_from_checkpoint("runs/Task", strict=False)
