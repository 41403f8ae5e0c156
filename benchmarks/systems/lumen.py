"""Lumen: its defaults, without what the loop by hand does not do either (records, bar, checkpoints, summary)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.nothing import LOSS, NoOptimizer, no_backward, no_loader, no_seeding
from benchmarks.problem import EMA_DECAY, Problem
from lumen import EMA, LambdaCallback, ModelCheckpoint, TaskModule, TensorBoardLogger, Trainer


class Task(TaskModule):
    """Task of all cases."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.problem = problem
        self.model = problem.model
        build = problem.optimizers if problem.case.optimizers else problem.optimizer
        self.configure_optimizers = lambda: build(self.parameters())


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
        """Compute one batch."""
        self.log("result", self.problem.loss(self.model, batch))


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
        self.log("result", self.accuracy)


class Nothing(TaskModule):
    """Task with a constant loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))  # An optimizer needs a parameter.

    def training_step(self, batch: Any) -> Tensor:
        """Compute one batch."""
        return LOSS

    def configure_optimizers(self) -> NoOptimizer:
        """Return an optimizer that changes nothing."""
        return NoOptimizer(self.parameters())


def make_trainer(problem: Problem, **options: Any) -> Trainer:
    """Return a trainer for a case."""
    case = problem.case
    settings = {
        "accelerator": case.device, "devices": case.ranks, "precision": case.precision, "compile": case.compiled,
        "gradient_clip_val": case.clip, "accumulate_grad_batches": case.accumulate,
        "enable_checkpointing": False, "enable_model_summary": False, "log_level": "WARNING", "seed": 0,
        "default_root_dir": problem.directory,
    }  # fmt: skip
    off = {"logger": False, "enable_progress_bar": False}
    on = {"logger": [TensorBoardLogger()]}
    if case.sharded:
        settings["strategy"] = "fsdp"
    if problem.system == "lumen-exact":
        settings["reduction"] = "exact"
    if case.ema:
        settings["callbacks"] = [EMA(EMA_DECAY)]
    return Trainer(**settings | (on if case.full else off) | options)


def train(problem: Problem) -> None:
    """Train; Lumen assigns the batches to the processes itself."""
    case = problem.case
    task = (ManualTraining if case.optimizers else LoggedTraining if case.logs else Training)(problem)
    make_trainer(problem, max_steps=problem.steps).fit(task, problem.loader(shards=False))


def evaluate(problem: Problem) -> None:
    """Evaluate."""
    task = {None: Evaluation, "loss": LossEvaluation, "accuracy": AccuracyEvaluation}[problem.case.metric](problem)
    task.load_state_dict(task.state_dict())  # Otherwise Lumen warns about untrained weights.
    loaders = problem.loader() if problem.case.loaders == 1 else problem.loaders()
    values, *_ = make_trainer(problem).validate(task, loaders)
    problem.result = values.get("result")


def nothing(problem: Problem) -> None:
    """Make steps in which nothing is computed."""
    clock = LambdaCallback(on_train_epoch_end=lambda *_: problem.end_epoch())
    trainer = make_trainer(problem, max_epochs=problem.case.epochs + 1, callbacks=[clock])
    with no_backward(), no_seeding() if problem.system == "lumen-own" else nullcontext():
        trainer.fit(Nothing(), no_loader(problem.case.epoch))
    problem.final_loss = LOSS.detach()


def checkpoint(problem: Problem) -> None:
    """Train and save, asynchronously or synchronously."""
    later = False if problem.system == "lumen-at-once" else None
    saving = ModelCheckpoint(every_n_train_steps=problem.case.save_every, at_end=False, asynchronous=later)
    trainer = make_trainer(problem, max_steps=problem.steps, enable_checkpointing=True, callbacks=[saving])
    trainer.fit(Training(problem), problem.loader())
