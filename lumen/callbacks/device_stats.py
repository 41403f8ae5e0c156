"""Logs what the device and the host have in use, and the learning rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.errors.arguments import checked, optional

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class LearningRateMonitor(Callback):
    """Logs the learning rate that each update uses, as `lr`, or with several parameter groups as `lr/group_N`.

    A group's own "name" is used instead of `group_N`, as those of `decay_groups` have one: `lr/no decay`.

    Args:
        logging_interval: "step": at every step whose metrics are logged; "epoch": at the first step of every epoch.
        log_momentum: Log `momentum` too; of an optimizer without one the first of its `betas`.
        log_weight_decay: Log `weight_decay` too.
    """

    NONE_IS_DEFAULT = True

    @checked
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] = "step",
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.logging_interval = logging_interval
        self._wanted = ["lr", *["momentum"] * log_momentum, *["weight_decay"] * log_weight_decay]

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Refuse to log what the optimizer does not have."""
        for optimizer in trainer.optimizers:
            missing = [name for name in self._wanted for group in optimizer.param_groups if _value(group, name) is None]
            if missing:
                raise ConfigError(
                    f"LearningRateMonitor: {type(optimizer).__name__} has no {missing[0]}. Leave log_{missing[0]} out."
                )

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Log the values of the update in progress, once for all its micro-batches."""
        by_epoch = self.logging_interval == "epoch"
        if by_epoch and trainer.progress.batches:
            return
        groups = optimizer.param_groups
        suffixes = [""] if len(groups) == 1 else [f"/{name}" for name in _names(groups)]
        for suffix, group in zip(suffixes, groups, strict=True):
            for name in self._wanted:
                task.log(f"{name}{suffix}", float(_value(group, name)), on_step=not by_epoch, on_epoch=by_epoch)


def _names(groups: list[dict[str, Any]]) -> list[str]:
    """The groups' names; a group that has none, or shares one, is named by its number."""
    names = [str(group.get("name", f"group_{number}")) for number, group in enumerate(groups)]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names)]


def _value(group: dict[str, Any], name: str) -> Any:
    if name == "momentum" and "momentum" not in group:
        return group.get("betas", (None,))[0]
    return group.get(name)


_CUDA = {
    "cuda_allocated_mb": ("allocated_bytes.all.current", 1e6),
    "cuda_allocated_peak_mb": ("allocated_bytes.all.peak", 1e6),
    "cuda_reserved_mb": ("reserved_bytes.all.current", 1e6),
    "cuda_reserved_peak_mb": ("reserved_bytes.all.peak", 1e6),
    "cuda_inactive_split_mb": ("inactive_split_bytes.all.current", 1e6),
    "cuda_alloc_retries": ("num_alloc_retries", 1),
    "cuda_ooms": ("num_ooms", 1),
}


@final
class DeviceStatsMonitor(Callback):
    """Gives every logger, at each `log_every_n_steps`-th step, memory and load of the first process, for `system.csv`.

    | column | |
    |---|---|
    | `cuda_allocated_mb`, `cuda_reserved_mb` | what tensors take, and what the allocator of torch holds; 10^6 bytes |
    | `cuda_allocated_peak_mb`, `cuda_reserved_peak_mb` | the most that it was since the run began |
    | `cuda_inactive_split_mb` | held in pieces that nobody uses: what fragmentation costs |
    | `cuda_alloc_retries`, `cuda_ooms` | how often memory was short: given back to be found, and not found |
    | `mps_allocated_mb`, `mps_driver_mb` | what tensors take on MPS, and what its driver has allocated |
    | `cpu_percent`, `cpu_vm_percent`, `cpu_swap_percent` | load of all cores since the last record; RAM, swap in use |

    They are what counters of the host say: nothing waits for the device, no process asks another.

    Args:
        cpu_stats: Those of the CPU, which `psutil` reads. None: where the run is on the CPU.

    Raises:
        ConfigError: `psutil` is needed and not installed.
    """

    stops_at_steps = False

    @checked
    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._recorded_step = 0
        self._sources: list[Callable[[], dict[str, float]]] = []

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Find what can be read."""
        device = trainer.strategy.device
        self._sources = []
        if device.type == "cpu" if self.cpu_stats is None else self.cpu_stats:
            trainer.processes.on_rank_zero(_find_psutil)
            self._sources.append(_of_host)
        if device.type == "cuda":
            self._sources.append(partial(_of_cuda, device))
        elif device.type == "mps":
            self._sources.append(_of_mps)

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Begin to measure the load."""
        self._recorded_step = trainer.global_step - trainer.validation_due
        self._read(trainer)

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Write a record if one is due."""
        step = trainer.global_step
        if step % trainer.plan.log_every_n_steps or step == self._recorded_step:  # a skipped update is no new step
            return
        self._recorded_step = step
        if values := self._read(trainer):
            trainer.log_system(values)

    def _read(self, trainer: Trainer) -> dict[str, float]:
        sources = self._sources if trainer.is_global_zero else []
        return {name: value for read in sources for name, value in read().items()}


def _find_psutil() -> None:
    optional("psutil", "DeviceStatsMonitor, for statistics of the CPU,", "stats")


def _of_host() -> dict[str, float]:
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def _of_cuda(device: torch.device) -> dict[str, float]:
    known = torch.cuda.memory_stats(device)
    return {name: known.get(key, 0) / unit for name, (key, unit) in _CUDA.items()}


def _of_mps() -> dict[str, float]:
    allocated, driver = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    return {"mps_allocated_mb": allocated / 1e6, "mps_driver_mb": driver / 1e6}
