"""PyTorch Lightning: a Trainer with everything off that the loop by hand does not do either, on its own engine."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from torch import Tensor

from benchmarks.problem import Problem

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")  # about few workers, and intervals longer than the run


class Task(LightningModule):
    """Task of all cases."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.problem = problem
        self.model = torch.compile(problem.model) if problem.case.compiled else problem.model

    def configure_optimizers(self) -> Any:
        """Return the optimizers of the case."""
        return (self.problem.optimizers if self.problem.case.optimizers else self.problem.optimizer)(self.parameters())


class Training(Task):
    """Task that logs nothing."""

    def training_step(self, batch: Any) -> Tensor:
        """Compute one batch."""
        return self.problem.loss(self.model, batch)


class LoggedTraining(Task):
    """Task that logs the loss under all names of the case."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.names = [f"loss_{number}" for number in range(problem.case.logs)]
        self.shown = problem.case.full

    def training_step(self, batch: Any) -> Tensor:
        """Compute one batch."""
        loss = self.problem.loss(self.model, batch)
        for name in self.names:
            self.log(name, loss, prog_bar=self.shown)
        return loss


class ManualTraining(Task):
    """Task with manual optimization."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        """Compute one batch."""
        loss = self.problem.loss(self.model, batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class Evaluation(Task):
    """Task that logs nothing."""

    def validation_step(self, batch: Any) -> None:
        """Compute one batch."""
        self.problem.loss(self.model, batch)


class LossEvaluation(Task):
    """Task that logs the mean loss."""

    def validation_step(self, batch: Any) -> None:
        """Log the loss with the batch size, for which Lightning would otherwise search the batch."""
        self.log("result", self.problem.loss(self.model, batch), batch_size=len(batch[0]))


class AccuracyEvaluation(Task):
    """Task that logs a torchmetrics object."""

    def __init__(self, problem: Problem):
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__(problem)
        self.accuracy = MulticlassAccuracy(4)

    def validation_step(self, batch: Any) -> None:
        """Compute one batch."""
        _, logits = self.problem.loss_and_logits(self.model, batch)
        self.accuracy.update(logits, batch[1])
        self.log("result", self.accuracy, batch_size=len(batch[0]))


def make_trainer(problem: Problem, **options: Any) -> Trainer:
    """Return a trainer for a case."""
    case = problem.case
    off = {"logger": False, "enable_progress_bar": False}
    on = {"logger": TensorBoardLogger(problem.directory)}
    if case.precision == "fp16" and case.device == "cpu":  # which Lightning does only if it gets the scaler
        options["plugins"] = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    else:
        options["precision"] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[case.precision]
    settings = {
        "accelerator": "gpu" if case.device == "cuda" else "cpu", "devices": case.ranks, "max_epochs": -1,
        "gradient_clip_val": case.clip, "accumulate_grad_batches": case.accumulate, "enable_checkpointing": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
        "default_root_dir": problem.directory, "strategy": "ddp" if case.ranks > 1 else "auto",
    }  # fmt: skip
    return Trainer(**settings | (on if case.full else off) | options)


def train(problem: Problem) -> None:
    """Train."""
    case = problem.case
    task = (ManualTraining if case.optimizers else LoggedTraining if case.logs else Training)(problem)
    make_trainer(problem, max_steps=problem.steps * max(case.optimizers, 1)).fit(task, problem.loader())


def evaluate(problem: Problem) -> None:
    """Evaluate."""
    task = {None: Evaluation, "loss": LossEvaluation, "accuracy": AccuracyEvaluation}[problem.case.metric](problem)
    (values,) = make_trainer(problem).validate(task, problem.loader(), verbose=False)
    problem.result = values.get("result")


def checkpoint(problem: Problem) -> None:
    """Train and save, at once or by the plugin with a thread."""
    saving = ModelCheckpoint(problem.directory, every_n_train_steps=problem.case.save_every)
    options = {"plugins": AsyncCheckpointIO()} if problem.system == "lightning-async" else {}
    trainer = make_trainer(problem, max_steps=problem.steps, enable_checkpointing=True, callbacks=[saving], **options)
    trainer.fit(Training(problem), problem.loader())
