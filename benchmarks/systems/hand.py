"""The loops by hand, as one writes them in PyTorch: a loop for each need, and nothing in it that is not needed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.nothing import LOSS, NoOptimizer, no_backward, no_loader
from benchmarks.problem import EMA_DECAY, Problem


def train(problem: Problem) -> None:
    """Train with the loop that the case needs."""
    case = problem.case
    model = problem.model.to(case.device)
    if case.compiled:
        model = torch.compile(model)
    if case.ranks > 1:
        torch.distributed.init_process_group("gloo")  # its end is the process's: DDP must not outlive it
        model = _sharded(model) if case.sharded else DistributedDataParallel(model)
    optimizer: Any = (problem.optimizers if case.optimizers else problem.optimizer)(model.parameters())
    model.train()
    batches = _sliced(problem) if problem.system == "hand-sliced" else _batches(problem)
    if problem.system == "hand-seeded":
        batches = _seeded(batches)
    loop = (
        _summed if problem.system == "hand-summed" else _averaged if case.ema else _several if case.optimizers
        else _scaled if case.precision == "fp16" else _autocast if case.precision == "bf16"
        else _accumulated if case.accumulate > 1 else _clipped if case.clip else _plain
    )  # fmt: skip
    loop(problem, model, optimizer, batches)


def _plain(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()


def _summed(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    """Sum the weights and a vote to stop over the processes in each step, while the backward runs."""
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        weight_and_vote = torch.tensor([float(len(batch[0])), 0.0], dtype=torch.float64)
        work = torch.distributed.all_reduce(weight_and_vote, async_op=True)
        loss.backward()
        work.wait()
        total, stops = weight_and_vote.tolist()
        if stops or total != problem.case.batch_size * problem.case.ranks:
            break
        optimizer.step()


def _sharded(model: nn.Module) -> nn.Module:
    """Shard each linear layer as a unit, as Lumen does with layers of one class, and the rest with the root."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def _averaged(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    parameters = [parameter.detach() for parameter in model.parameters()]
    averages = [parameter.clone() for parameter in parameters]
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(averages, parameters, 1 - EMA_DECAY)
    torch._foreach_copy_(parameters, averages)


def _several(problem: Problem, model: nn.Module, optimizers: Any, batches: Iterator[Any]) -> None:
    for _, batch in zip(range(problem.steps), batches, strict=False):
        loss = problem.loss(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def _clipped(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), problem.case.clip)
        optimizer.step()


def _accumulated(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    accumulate = problem.case.accumulate
    for index, batch in zip(range(1, problem.case.batches + 1), batches, strict=False):
        loss = problem.loss(model, batch) / accumulate
        loss.backward()
        if index % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def _autocast(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    device = problem.case.device
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()


def _scaled(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    device = problem.case.device
    scaler = torch.amp.GradScaler(device)
    for _, batch in zip(range(problem.steps), batches, strict=False):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = problem.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _batches(problem: Problem) -> Iterator[Any]:
    """Yield batches, epoch after epoch."""
    loader, device = problem.loader(), problem.case.device
    while True:
        if device == "cpu":
            yield from loader
        else:
            for batch in loader:
                yield [part.to(device, non_blocking=True) for part in batch]


def _seeded(batches: Iterable[Any]) -> Iterator[Any]:
    """Seed the three generators before each step, the least that makes its random numbers independent of the others.

    `torch.manual_seed` visits all devices and takes six times as long.
    """
    for key, batch in enumerate(batches):
        torch.default_generator.manual_seed(key)
        np.random.seed(key)
        random.seed(key)
        yield batch


def _sliced(problem: Problem) -> Iterator[Any]:
    """Yield slices of two tensors in a known order, without a loader."""
    tensors, size = problem.loader().dataset.tensors, problem.case.batch_size
    while True:
        yield from zip(*(tensor.split(size) for tensor in tensors), strict=True)


def evaluate(problem: Problem) -> None:
    """Evaluate; the mean loss is over samples, the accuracy a torchmetrics object."""
    model, metric = problem.model, problem.case.metric
    # The data is made outside inference mode, whose tensors are indexed faster than users' tensors.
    loader: Iterable[Any] = problem.loader() if problem.case.loaders == 1 else chain(*problem.loaders())
    if problem.system == "hand-seeded":
        loader = _seeded(loader)
    model.eval()
    if metric == "accuracy":
        _evaluate_accuracy(problem, model, loader)
        return
    total, samples = torch.zeros(()), 0
    with torch.inference_mode():
        for batch in loader:
            loss = problem.loss(model, batch)
            if metric == "loss":
                total += loss * len(batch[0])
                samples += len(batch[0])
    if metric == "loss":
        problem.result = float(total / samples)


def _evaluate_accuracy(problem: Problem, model: nn.Module, loader: Iterable[Any]) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    accuracy = MulticlassAccuracy(4)
    with torch.inference_mode():
        for batch in loader:
            _, logits = problem.loss_and_logits(model, batch)
            accuracy.update(logits, batch[1])
    problem.result = float(accuracy.compute())


def nothing(problem: Problem) -> None:
    """Make steps in which nothing is computed."""
    optimizer, loader = NoOptimizer([nn.Parameter(torch.zeros(()))]), no_loader(problem.case.epoch)
    with no_backward():
        for _ in range(problem.case.epochs + 1):
            for batch in loader:
                optimizer.zero_grad()
                loss = _no_forward(batch)
                loss.backward()
                optimizer.step()
            problem.end_epoch()
    problem.final_loss = LOSS.detach()


def _no_forward(batch: Any) -> Tensor:
    return LOSS


def checkpoint(problem: Problem) -> None:
    """Train and save with `torch.save`."""
    model = problem.model
    optimizer = problem.optimizer(model.parameters())
    model.train()
    for step, batch in zip(range(1, problem.steps + 1), _batches(problem), strict=False):
        optimizer.zero_grad()
        loss = problem.loss(model, batch)
        loss.backward()
        optimizer.step()
        if step % problem.case.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, problem.directory / "checkpoint.pt")
