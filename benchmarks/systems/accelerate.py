"""Accelerate: the loop by hand with prepared objects; what a case does not need is not called."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch import nn

from benchmarks.problem import Problem

LOG_EVERY = 50  # steps, as the other systems do


def make_accelerator(problem: Problem) -> Accelerator:
    """Return an accelerator for a case."""
    case = problem.case
    return Accelerator(
        cpu=case.device == "cpu",
        mixed_precision={"fp32": "no"}.get(case.precision, case.precision),
        gradient_accumulation_steps=case.accumulate,
        log_with="tensorboard" if case.full else None,
        project_dir=problem.directory,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor") if case.compiled else None,
    )


def train(problem: Problem) -> None:
    """Train, with the loop that the case needs."""
    accelerator = make_accelerator(problem)
    model, optimizer, loader = accelerator.prepare(
        problem.model, problem.optimizer(problem.model.parameters()), problem.loader(shards=False)
    )
    if problem.case.full:
        accelerator.init_trackers("benchmark")
    model.train()
    if problem.case.accumulate > 1:
        _accumulated(problem, accelerator, model, optimizer, loader)
    elif problem.case.logs:
        _logged(problem, accelerator, model, optimizer, loader)
    else:
        _plain(problem, accelerator, model, optimizer, loader)
    accelerator.end_training()


def _plain(problem: Problem, accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    steps, clip = 0, problem.case.clip
    for _ in count():
        for batch in loader:
            optimizer.zero_grad()
            loss = problem.loss(model, batch)
            accelerator.backward(loss)
            if clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            steps += 1
            if steps == problem.steps:
                return


def _accumulated(problem: Problem, accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    batches = 0
    for _ in count():
        for batch in loader:
            with accelerator.accumulate(model):
                loss = problem.loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
            if batches == problem.case.batches:
                return


def _logged(problem: Problem, accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    """Train with the user's own logging every few steps, and a tqdm bar."""
    names = [f"loss_{number}" for number in range(problem.case.logs)]
    bar = None
    if problem.case.full:
        from tqdm import tqdm

        bar = tqdm(total=problem.steps)
    steps = 0
    for _ in count():
        for batch in loader:
            optimizer.zero_grad()
            loss = problem.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if bar is not None:
                bar.update()
            if steps % LOG_EVERY == 0:
                value = loss.item()
                accelerator.log(dict.fromkeys(names, value), step=steps)
                if bar is not None:
                    bar.set_postfix(loss=value)
            if steps == problem.steps:
                return


def evaluate(problem: Problem) -> None:
    """Evaluate."""
    accelerator = make_accelerator(problem)
    model, loader = accelerator.prepare(problem.model, problem.loader(shards=False))
    model.eval()
    case, total, samples = problem.case, torch.zeros(()), 0
    if case.metric == "accuracy":
        from torchmetrics.classification import MulticlassAccuracy

        accuracy = MulticlassAccuracy(4)
    with torch.inference_mode():
        for batch in loader:
            loss, logits = problem.loss_and_logits(model, batch)
            if case.metric == "accuracy":
                accuracy.update(*accelerator.gather_for_metrics((logits, batch[1])))
            elif case.metric == "loss":
                total += loss * len(batch[0])
                samples += len(batch[0])
    if case.metric == "accuracy":
        problem.result = float(accuracy.compute())
    elif case.metric == "loss":
        problem.result = float(total / samples)
