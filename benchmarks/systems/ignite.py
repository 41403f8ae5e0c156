"""Ignite: an engine around the user's step function, which does the same as the loop by hand."""

from __future__ import annotations

from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.metrics import Loss, RunningAverage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.problem import Problem


def train(problem: Problem) -> None:
    """Train."""
    case = problem.case
    model = problem.model
    optimizer = problem.optimizer(model.parameters())
    if case.ranks > 1:
        torch.distributed.init_process_group("gloo")  # its end is the process's: DDP must not outlive it
        model = DistributedDataParallel(model)
    model.train()
    make_step = (
        _scaled if case.precision == "fp16" else _autocast if case.precision == "bf16"
        else _accumulated if case.accumulate > 1 else _plain
    )  # fmt: skip
    engine = Engine(make_step(problem, model, optimizer))
    for number in range(case.logs):
        RunningAverage(output_transform=lambda loss: loss).attach(engine, f"loss_{number}")
    if case.full:
        _show(problem, engine)
    engine.run(problem.loader(), max_iters=case.batches)


def _plain(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    clip = problem.case.clip

    def step(engine: Engine, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return step


def _accumulated(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    accumulate = problem.case.accumulate

    def step(engine: Engine, batch: Any) -> Any:
        loss = problem.loss(model, batch) / accumulate
        loss.backward()
        if engine.state.iteration % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def _autocast(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(engine: Engine, batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _scaled(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    scaler = torch.amp.GradScaler("cpu")

    def step(engine: Engine, batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = problem.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def _show(problem: Problem, engine: Engine) -> None:
    """Attach the bar and the TensorBoard handler as in Ignite's guides."""
    from ignite.handlers import ProgressBar
    from ignite.handlers.tensorboard_logger import TensorboardLogger

    names = [f"loss_{number}" for number in range(problem.case.logs)]
    ProgressBar().attach(engine, metric_names=names)
    logger = TensorboardLogger(log_dir=problem.directory)
    logger.attach_output_handler(
        engine, event_name=Events.ITERATION_COMPLETED(every=50), tag="training", metric_names=names
    )


def evaluate(problem: Problem) -> None:
    """Evaluate."""
    model, metric = problem.model, problem.case.metric
    model.eval()

    def step(engine: Engine, batch: Any) -> Any:
        loss, logits = problem.loss_and_logits(model, batch)
        if metric == "accuracy":
            accuracy.update(logits, batch[1])
        return loss, len(batch[0])

    engine = Engine(step)
    if metric == "accuracy":
        from torchmetrics.classification import MulticlassAccuracy

        accuracy = MulticlassAccuracy(4)
    elif metric == "loss":
        Loss(lambda loss, _: loss, batch_size=int).attach(engine, "result")
    loader = problem.loader()
    with torch.inference_mode():
        engine.run(loader)
    if metric == "accuracy":
        problem.result = float(accuracy.compute())
    elif metric == "loss":
        problem.result = engine.state.metrics["result"]
