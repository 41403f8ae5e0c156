"""Checks of `Trainer(reduction="exact")`: parts of a run that would differ between numbers of processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.internals.optimizers import disable_fused
from lumen.internals.tensors import get_gradient_hooks, get_version
from lumen.metrics.torchmetrics_states import find_metrics, sums_floats
from lumen.optim import Lookahead, MultiOptimizer, list_on_parts
from lumen.run.run import Run
from lumen.strategies import Strategy, make_exact_error
from lumen.task.hooks import is_overridden
from lumen.task.teacher import find_places

#: Optimizers that treat each element of a parameter alone.
_NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD")
_ELEMENTWISE = (Lookahead, MultiOptimizer, *(getattr(torch.optim, name) for name in _NAMES))


def check_exact_reduction(run: Run) -> None:
    """Refuse parts of a training that would not be bitwise identical on any number of processes.

    Collective: every rank must call this, once the optimizer is built.

    Raises:
        ConfigError: The run has such a part, or the processes run on different devices or versions of torch.
    """
    if not run.strategy.is_exact:
        return
    if (reason := next(_find_reasons(run), None)) is not None:
        raise make_exact_error(reason)
    facts = run.processes.all_gather(describe_numerics(run.strategy))
    for rank, other in enumerate(facts):
        if other != facts[0]:
            raise ConfigError(
                f"reduction: exact: rank 0 runs with {facts[0]}, and rank {rank} with {other}. Their micro-batches "
                "would be rounded differently: use equal devices, versions and OMP_NUM_THREADS."
            )
    if (threads := facts[0].get("threads", 1)) != 1:
        _log.warning(
            "reduction: exact: %s threads add in a different order than 1 thread. To compare runs on different numbers "
            "of processes, set OMP_NUM_THREADS=1 for all of them",
            threads,
        )
    for name, metric in find_metrics(run.task).items():
        if sums_floats(metric):
            _log.warning(
                "reduction: exact: %s (%s) adds floats on each process, so its last digits depend on the number of "
                "processes. Log a number with self.log instead, whose mean is exact",
                name, type(metric).__name__,
            )  # fmt: skip
    if run.strategy.parameter_device.type == "cpu":
        for each in run.optim.optimizers:
            disable_fused(each)  # it rounds the last elements of a tensor, or of a shard, differently


def describe_numerics(strategy: Strategy) -> dict[str, str | int]:
    """Return facts that must be equal in all runs that shall be bitwise identical; none if the sums are not exact."""
    if not strategy.is_exact:
        return {}
    is_cuda = strategy.device.type == "cuda"
    device = torch.cuda.get_device_name(strategy.device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    threads = {} if is_cuda else {"threads": torch.get_num_threads()}
    return {"reduction": "exact", "torch": str(torch.__version__), "device": device, **threads}


def _find_reasons(run: Run) -> Iterator[str]:
    """Yield what is not supported and what to do instead."""
    optim, task = run.optim, run.task
    if optim.manual is not None:
        yield "manual optimization. Use automatic optimization"
    if optim.needs_closure:
        yield f"{type(optim.optimizer).__name__}, which evaluates the loss several times. Use another optimizer"
    if "optimizer_zero_grad" in optim.overridden_hooks:
        yield "a task with optimizer_zero_grad. Remove the method"
    if run.plan.halve_on_oom:
        yield "halve_on_oom, which computes other micro-batches. Use a smaller batch_size"
    for owner in (*run.hooks.callbacks, task):
        if is_overridden(owner, "on_after_backward") and not type(owner).__module__.startswith("lumen."):
            yield (
                f"{type(owner).__name__}.on_after_backward, which sees the gradient of one micro-batch on several "
                "processes, and a sum on one process. Use on_before_optimizer_step"
            )
    if any(get_gradient_hooks(each)[1] for each in task.parameters()):
        yield "register_post_accumulate_grad_hook. Use register_hook"
    for each in optim.optimizers if run.strategy.shards else ():
        yield from (
            f"{type(inner).__name__} on shards, unless it treats each element alone. Write "
            f"lumen.optim.WholeMatrices({type(inner).__name__}(...)), use strategy: ddp"
            for inner in list_on_parts(each)
            if type(inner) not in _ELEMENTWISE
        )


def list_buffer_writes(run: Run) -> dict[str, tuple[int, int]]:
    """Return the identity of each buffer that checkpoints contain, by name, and the number of writes to it."""
    found = find_places(run.task, buffers=True, persistent=True)
    buffers = {name: held[key] for name, (held, key) in found.items()}
    return {name: (id(each), get_version(each)) for name, each in buffers.items() if not isinstance(each, nn.Parameter)}


def check_no_buffer_writes(run: Run, before: dict[str, tuple[int, int]]) -> None:
    """Refuse statistics in buffers, which a process computes from its own batches only.

    Args:
        run: The run that trains.
        before: The return value of `list_buffer_writes` before the call of `training_step`.

    Raises:
        ConfigError: `training_step` has written a buffer that checkpoints contain.
    """
    if written := [name for name, writes in list_buffer_writes(run).items() if writes != before.get(name)]:
        raise make_exact_error(
            f"the buffer {written[0]}, which training_step writes from the batches of a process. Use a layer without "
            "running statistics, such as GroupNorm or LayerNorm, call its eval() in __init__"
        )
