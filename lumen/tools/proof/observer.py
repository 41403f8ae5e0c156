"""Callback that records what a process of a variant computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from itertools import islice
from types import FrameType, FunctionType
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lumen.callbacks import Callback
from lumen.data.combined import list_loaders
from lumen.data.fingerprint import get_length
from lumen.data.generators import KeptGenerators
from lumen.distributed.dtensor import get_packed_parts, is_sharded, mark_packed
from lumen.distributed.process_location import Frame
from lumen.internals.tensors import get_version
from lumen.loggers import Logger
from lumen.random import preserve_generators
from lumen.task.hooks import HOOKS, is_overridden
from lumen.task.task_module import TaskModule
from lumen.tools.proof.outcome import EventWriter, Outcome, count_units, get_loss
from lumen.tools.proof.outside_calls import OutsideCall
from lumen.tools.proof.recorder import (
    describe_samples,
    digest_generators,
    digest_value,
    iterate_optimizer_state,
    iterate_state,
)
from lumen.trainer.trainer import Trainer


@final
class RowCollector(Logger):
    """Logger that keeps the logged values in an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the values of a step."""
        self._outcome.rows.append((step, dict(metrics)))


@final
class VariantObserver(Callback):
    """Callback that records what a training computes, as the last callback, to see the effects of the others.

    Collective: every rank must have an observer with the same arguments.

    Args:
        outcome: The record to add events to.
        save_every: Steps between two checkpoints. The optimizer state is recorded at these steps too.
        modules: True to record inputs and outputs of each module; False for compiled forwards and cut layers.

    Attributes:
        step: Number of completed steps.
    """

    may_stop_at_steps = False

    def __init__(self, outcome: Outcome, save_every: int, *, modules: bool = True) -> None:
        self._outcome, self._save_every, self._modules = outcome, save_every, modules
        self._micro, self._events = -1, EventWriter(outcome.events)
        self._generators: dict[str, str] | None = None
        self.step, self._first, self._number = 0, -1, 0
        self._before_validation: dict[str, str] = {}

    def _add_event(self, kind: str, name: str, value: Any, micro: int = -1) -> None:
        self._events.add(self.step, micro, kind, name, value)

    def note_outside_call(self, call: OutsideCall) -> None:
        """Record a call that may return a different value in each run, and the number of events before the call."""
        if (noted := (len(self._outcome.events), *call)) not in self._outcome.calls[-8:]:
            self._outcome.calls.append(noted)

    def watch_hooks(self, task: TaskModule, callbacks: list[Callback]) -> None:
        """Record from now on which user hooks write parameters or buffers, and which functions log values.

        Args:
            task: The task, before its run starts.
            callbacks: The callbacks of the run.
        """
        for owner in (*(each for each in callbacks if find_source_lines(each) is not None), task):
            for name in HOOKS:
                if name not in _NOT_WATCHED and is_overridden(owner, name):
                    setattr(owner, name, self._watch_hook(task, owner, name))
        object.__setattr__(task, "log", partial(self._record_log_call, task.log))

    def _watch_hook(self, task: TaskModule, owner: Any, name: str) -> Callable[..., Any]:
        hook = getattr(owner, name)
        place = f"{type(owner).__name__}.{name} ({_find_source_place(hook)})"

        @wraps(hook)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = _get_versions(task)
            result = hook(*args, **kwargs)
            changed = [each for each, version in _get_versions(task).items() if version != before.get(each)]
            self._outcome.written += [(self.step, place, each) for each in changed]
            return result

        return watched

    def _record_log_call(self, log: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        self._outcome.logged.setdefault(name, _find_user_function(frame.f_back if frame else None))
        return log(name, *args, **kwargs)

    def record_tensors(self, task: TaskModule, kind: str) -> None:
        """Record the parameters and buffers. Collective: every rank must call this."""
        for role, name, tensor in iterate_state(task):
            if not (role == "parameter" and tensor.is_meta):
                self._add_event(kind, name if role == "parameter" else f"buffer {name}", tensor)

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the initial state, and register hooks on the modules."""
        self.step = trainer.global_step
        if self.step:
            self._record_state(trainer, task)
        else:
            self.record_tensors(task, "start")
        loader = trainer.train_dataloader
        self._outcome.workers = max((getattr(each, "num_workers", 0) for _, each in list_loaders(loader)), default=0)
        self._outcome.probes["lengths"] = [get_length(getattr(loader, "dataset", None))]
        self._outcome.plan = "task" if task.parallel_plan else "model" if any(map(_has_plan, task.modules())) else ""
        self._outcome.classes = {name: type(module).__name__ for name, module in task.named_modules()}
        parts: list[tuple[str, Any]] = [("data", trainer.datamodule)]  # objects of the user that are not modules
        parts += [(name.replace("_", " "), getattr(loader, name, None)) for name in _LOADER_PARTS]
        parts += [("optimizer", each) for each in trainer.optimizers]
        for name, thing in (*task.named_modules(), *parts):
            if (lines := find_source_lines(thing)) is not None:
                self._outcome.lines[name or "task"] = lines
        for name, module in task.named_modules() if self._modules else ():
            module.register_forward_hook(partial(self._record_call, name))

    def _record_call(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._micro >= 0 and not torch.compiler.is_compiling():
            with torch.no_grad():
                self._add_event("input", name, inputs, self._micro)
                self._add_event("module", name, output, self._micro)

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Record the batch."""
        self.step, self._micro = trainer.global_step, batch_idx
        self._number = self._number + 1 if self._first == self.step else 0
        self._first = self.step
        if (samples := describe_samples(trainer, self._number)) is not None:
            self._add_event("order", "", samples, batch_idx)
        self._add_event("batch", "", batch, batch_idx)
        if not self.step:
            self._outcome.counts[batch_idx] = count_units(batch)
        self._generators = digest_generators()

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the gradients accumulated so far, in the first step."""
        if self._generators is not None and self._generators != digest_generators():
            self._outcome.draws.append((self.step, self._micro))
        self._generators = None
        if not self.step and not any(is_sharded(parameter) for parameter in task.parameters()):
            for name, parameter in task.named_parameters():
                if parameter.grad is not None:
                    self._add_event("partial", name, parameter.grad, self._micro)

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients. With manual optimization, only this optimizer's, because others may be stale."""
        moved = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in task.named_parameters():
            if parameter.grad is not None and (task.automatic_optimization or parameter in moved):
                self._add_event("gradient", name, mark_packed(parameter.grad, get_packed_parts(parameter)))

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss."""
        if (loss := get_loss(outputs)) is not None:
            self._add_event("loss", "", loss, batch_idx)
            self._outcome.dtypes = sorted({*self._outcome.dtypes, str(loss.dtype).removeprefix("torch.")})
        self._micro = -1

    def on_validation_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the state before the validation, and stop recording modules."""
        self._micro = -1
        self._before_validation = _digest_tensors(task)

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the modules that are in training mode."""
        found = [name for name, module in task.named_modules() if module.training]
        self._outcome.training += [name for name in found if name not in self._outcome.training]

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the parameters and buffers that the validation changed."""
        after = _digest_tensors(task)
        changed = [name for name, code in self._before_validation.items() if after.get(name) != code]
        self._outcome.moved += [name for name in changed if name not in self._outcome.moved]

    def on_step_checkpoint(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the parameters and buffers after the step, as checkpoints save them: `on_step_end` may write some."""
        if self.step != trainer.global_step:
            self.step = trainer.global_step
            self._record_state(trainer, task)

    def _record_state(self, trainer: Trainer, task: TaskModule) -> None:
        for kind, name, tensor in iterate_state(task):
            self._add_event(kind, name, tensor)
        if self.step % self._save_every == 0:
            self._record_optimizers(trainer, task)

    def _record_optimizers(self, trainer: Trainer, task: TaskModule) -> None:
        packed = {name: get_packed_parts(parameter) for name, parameter in task.named_parameters()}
        for name, key, value in iterate_optimizer_state(task, trainer.optimizers):
            if isinstance(value, torch.Tensor):
                self._add_event("optimizer", f"{key} of {name}", mark_packed(value, packed.get(name)))

    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Record the optimizer state, and probe the dataset."""
        if self.step % self._save_every:
            self._record_optimizers(trainer, task)
        if trainer.world_size == 1:
            lengths = self._outcome.probes.get("lengths", [])
            found = probe_dataset(trainer.train_dataloader)
            self._outcome.probes = {"lengths": [*lengths, *found.pop("length", [])], **found}


def _has_plan(module: Any) -> bool:
    """Return True if a module is a model of transformers that has a plan for tensor parallelism."""
    return hasattr(type(module), "tp_plan") and bool(module.tp_plan)


def _digest_tensors(task: TaskModule) -> dict[str, str]:
    """Return digests of parameters and buffers, for sharded tensors of this process's shard."""
    return {name: digest_value([tensor.detach().clone()]) for _, name, tensor in iterate_state(task)}


_NOT_WATCHED = ("setup", "on_load_checkpoint", "on_save_checkpoint", "on_exception", "teardown")
_MAX_HASHED_ELEMENTS = 1 << 20
_SAMPLES, _ORDER, _KEY = 4, 16, 0x5EED
_LOADER_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")


def find_source_lines(thing: Any) -> tuple[str, int, int] | None:
    """Return file, first and last line of a user's class or function, or None if a library has it or lacks source."""
    kind = thing if isinstance(thing, type | FunctionType) else type(thing)
    with suppress(OSError, TypeError):
        file = str(inspect.getsourcefile(kind))
        if Frame(file, 0, "").is_in_user_code:  # checked first, since finding the lines of a class is slow
            text, first = inspect.getsourcelines(kind)
            return file, first, first + len(text) - 1
    return None


def _get_versions(task: TaskModule) -> dict[str, Any]:
    """Return a marker for each parameter and buffer, which changes when the tensor is written."""
    named = {name: tensor for _, name, tensor in iterate_state(task)}
    is_large = sum(tensor.numel() for tensor in named.values()) > _MAX_HASHED_ELEMENTS
    return {
        name: (id(tensor), get_version(tensor), None if is_large else digest_value(tensor.detach().clone()))
        for name, tensor in named.items()
        if not tensor.is_inference()
    }


def _find_user_function(frame: FrameType | None) -> str:
    """Return the innermost function of the user in the call stack, with file and line."""
    while frame is not None and not Frame(frame.f_code.co_filename, frame.f_lineno, "").is_in_user_code:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _find_source_place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


# ---------------------------------------------------------------------- data


def probe_dataset(loader: Any) -> dict[str, list[Any]]:
    """Read a map-style dataset once, and its sampler twice with the same seeds. Other loaders give no entries.

    Reading shows which functions the dataset calls, also if workers read it in the training. Call this at the end of a
    run, because reading may change a dataset that keeps state.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return {}
    with preserve_generators():
        found: dict[str, list[Any]] = {"length": [get_length(loader.dataset)]}
        _read_samples(loader)
        found["order"] = [_list_sampler_order(loader) for _ in range(2)]
    return found


def _read_samples(loader: DataLoader[Any]) -> None:
    generators = KeptGenerators({"dataset": loader.dataset})
    for index in range(min(_SAMPLES, get_length(loader.dataset) or 0)):
        generators.seed_function(_KEY)
        with suppress(Exception):  # Errors of user code are not reported here.
            loader.dataset[index]


def _list_sampler_order(loader: DataLoader[Any]) -> list[str]:
    """Return the first `_ORDER` indices of the sampler."""
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    generators = KeptGenerators({"sampler": sampler, "loader": loader.generator}, by_seed=True)
    generators.seed_function(_KEY)
    torch.default_generator.manual_seed(_KEY)
    first = [str(each) for each in islice(iter(sampler), _ORDER)]
    generators.restore_states()
    return first
