"""Monitors of learning rates, speed, memory and hardware use; peak speeds of devices."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, final

import torch
from torch.optim import Optimizer

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.callbacks.throughput import Throughput, measure_memory_mb
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.internals.compiler import is_compiled
from lumen.internals.optional_packages import import_optional
from lumen.task.task_module import TaskModule

# Dense peaks in TFLOP/s (10^12 FLOP per second), without the factor 2 for structured sparsity. 16-bit matrix products
# accumulate in float32, as in PyTorch. None: the device has no such unit, or it is no faster than float32.
# Sources, all by NVIDIA: the data sheets of V100 (2020), T4 (2019), A100 (2021), L4, L40S and H100 (2023), H200 (2024)
# and HGX B200 (2025); the architecture papers of GA102 (RTX 3090, table 2) and Ada (RTX 4090, table 2).
_PEAKS_TFLOP_PER_S: tuple[tuple[str, float, float | None, float | None, float], ...] = (
    # device name (torch.cuda.get_device_name)       float32  TF32   bfloat16  float16
    (r"Tesla V100-SXM2-\d+GB", 15.7, None, None, 125.0),
    (r"Tesla V100-PCIE-\d+GB", 14.0, None, None, 112.0),
    (r"Tesla T4", 8.1, None, None, 65.0),
    (r"(NVIDIA )?A100-.*|NVIDIA A100 .*PCIe", 19.5, 156.0, 312.0, 312.0),
    (r"NVIDIA L4", 30.3, 60.0, 121.0, 121.0),
    (r"NVIDIA L40S", 91.6, 183.0, 362.0, 362.0),
    (r"NVIDIA H100 80GB HBM3", 67.0, 494.7, 989.4, 989.4),
    (r"NVIDIA H100 PCIe", 51.2, 378.0, 756.0, 756.0),
    (r"NVIDIA H100 NVL", 60.0, 417.5, 835.5, 835.5),
    (r"NVIDIA H200", 67.0, 494.7, 989.4, 989.4),
    (r"NVIDIA H200 NVL", 60.0, 417.5, 835.5, 835.5),
    (r"NVIDIA B200", 75.0, 1100.0, 2250.0, 2250.0),
    (r"NVIDIA GeForce RTX 3090", 35.6, None, 71.0, 71.0),
    (r"NVIDIA GeForce RTX 4090", 82.6, None, 165.2, 165.2),
)


def find_peak_flop_per_s(device_name: str, dtype: torch.dtype, *, tf32: bool) -> float | None:
    """Return the peak floating-point operations per second of a device, for dense matrix products.

    Args:
        device_name: A name such as "NVIDIA H100 80GB HBM3", from `torch.cuda.get_device_name`.
        dtype: The dtype of the matrix products: float32, bfloat16 or float16.
        tf32: True if float32 products are computed in TF32.

    Returns:
        The peak, or None if it is unknown: for other devices, for a part of a device (MIG), and for other dtypes.
    """
    for name, float32, of_tf32, bfloat16, float16 in _PEAKS_TFLOP_PER_S:
        if re.fullmatch(name, device_name) and "MIG" not in device_name:
            as_float32 = (of_tf32 if tf32 else None) or float32
            peak = {torch.float32: as_float32, torch.bfloat16: bfloat16, torch.float16: float16}.get(dtype)
            return None if peak is None else peak * 1e12
    return None


_COUNTED_OPERATORS = (
    "Lumen counts the samples of the loader, and as units the weights from training_step or batch_weight."
)


class _SystemMonitor(Callback, ABC):
    """Base class of callbacks that give loggers values for `system.csv` at each `log_every_n_steps`-th step."""

    may_stop_at_steps = False

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Begin to measure."""
        # A checkpoint saved while a validation is due contains a step that has no record yet.
        self._recorded_step = trainer.global_step - trainer.progress.validation_due
        self._start_measuring(trainer, task)

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Write a record if one is due."""
        step, is_new = trainer.global_step, trainer.global_step != self._recorded_step  # False after a skipped update.
        if is_new and step % trainer.plan.log_every_n_steps == 0:
            self._recorded_step = step
            if values := self._measure_values(trainer):
                trainer.run.records.log_system(values)

    @abstractmethod
    def _start_measuring(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Begin to measure."""

    @abstractmethod
    def _measure_values(self, trainer: CallbackTrainer) -> dict[str, float]:
        """Return the values by name; an empty dictionary if there are none."""


@final
class ThroughputMonitor(_SystemMonitor):
    """Callback that gives every logger timings and memory at each `log_every_n_steps`-th step, for `system.csv`.

    | column | |
    |---|---|
    | `time_s` | seconds of training over all resumed parts |
    | `steps_per_s`, `batches_per_s`, `samples_per_s` | updates, micro-batches, samples, without evaluations |
    | `units_per_s` | weights of the updates, if the task returns weights or defines `batch_weight`: tokens, boxes |
    | `data_wait_share` | share of the time spent waiting for the loader, 0 to 1 |
    | `flop_per_step`, `flop_per_s` | floating-point operations of forward and backward, with `measure_flops` |
    | `mfu` | share of the device's dense peak in the precision of the run, 0 to 1, if the peak is known |
    | `memory_mb` | 10^6 bytes: on CUDA the peak of allocated tensors, otherwise the RAM of the process |

    Speeds leave out the time at a debugger's prompt, and the time in which Ctrl-Z or SIGSTOP stops the process.
    Counts are sums over all processes; `data_wait_share` and `memory_mb` are measured in the first process.

    Operations are counted once, during the normal training of the first micro-batch: matrix products, convolutions and
    attention, including recomputed operations. Afterwards each sample is assumed to cost the same.

    Args:
        measure_flops: Count operations. The first micro-batch takes longer; its results are bitwise identical.
        window_s: Seconds to average over, >= 0; 0: since the last record.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "batch_size_fn": _COUNTED_OPERATORS,
        "length_fn": _COUNTED_OPERATORS,
        "window_size": "Use window_s, the time to average over.",
        "available_flops": "Leave it out: Lumen knows the peaks of common devices, and omits mfu for other devices.",
    }

    @check_arguments
    def __init__(self, *, measure_flops: bool = False, window_s: float = 0.0) -> None:
        check_at_least(0, "ThroughputMonitor", window_s=window_s)
        self.measure_flops = measure_flops
        self._throughput = Throughput(window_s)
        self._counter: Any = None  # a FlopCounterMode
        if measure_flops:  # Only this object gets the hooks, so other monitors cost no time per step.
            vars(self).update(
                on_before_zero_grad=self._start_counting,
                on_after_backward=self._take_count,
                on_train_batch_end=self._stop_counting,
                on_exception=self._stop_counting,
            )

    def _start_measuring(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        self._throughput.start(trainer)
        self._flop_per_sample: float | None = None
        self._should_count = self.measure_flops and trainer.is_global_zero
        if self._should_count and any(map(is_compiled, task.modules())):
            self._should_count = False
            _log.warning("ignoring measure_flops: Lumen cannot count the operations of a compiled model")

    def on_validation_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Stop the clock."""
        self._throughput.pause(trainer)

    def on_validation_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Start the clock again."""
        self._throughput.resume(trainer)

    def _start_counting(self, trainer: CallbackTrainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Begin to count operations: the forward of a step's first micro-batch follows."""
        if self._should_count and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode

            self._counted_samples = max(trainer.run.log.batch_samples, 1)
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def _take_count(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Read the count after the backward."""
        if self._counter is not None:
            operations = self._counter.get_total_flops()
            self._stop_counting()
            self._should_count = False
            self._flop_per_sample = operations / self._counted_samples
            self._peak = _find_run_peak_flop_per_s(trainer)
            _log.info("%.4g FLOP per sample, forward and backward", self._flop_per_sample)

    def _stop_counting(self, *_: Any) -> None:
        """Stop counting. If the micro-batch was skipped or failed, the next micro-batch is counted."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def _measure_values(self, trainer: CallbackTrainer) -> dict[str, float]:
        values = {"time_s": trainer.progress.elapsed_s, **self._throughput.measure(trainer)._asdict()}
        if not trainer.run.step.counters.counts_units:
            del values["units_per_s"]
        if self._flop_per_sample is not None:
            flop_per_s = self._flop_per_sample * values["samples_per_s"]
            values |= {"flop_per_step": flop_per_s / max(values["steps_per_s"], 1e-9), "flop_per_s": flop_per_s}
            if self._peak is not None:
                values["mfu"] = flop_per_s / (self._peak * trainer.world_size)
        return values | {"memory_mb": measure_memory_mb(trainer.strategy.device)}


def _find_run_peak_flop_per_s(trainer: CallbackTrainer) -> float | None:
    """Return the device's peak in the dtype of the run's matrix products; if it is unknown, log so and return None."""
    device = trainer.strategy.device
    with trainer.run.precision.forward():
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else trainer.run.optim.parameters[0].dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = find_peak_flop_per_s(name, dtype, tf32=torch.backends.cuda.matmul.fp32_precision == "tf32")
    if peak is None:
        _log.info("not logging mfu: the peak of %s in %s is unknown", name, str(dtype).removeprefix("torch."))
    return peak


@final
class LearningRateMonitor(Callback):
    """Callback that logs the learning rate of each update, as `lr`, or as `lr/group_N` with several parameter groups.

    A group with a "name", such as the groups of `decay_groups`, uses its name instead of `group_N`: `lr/no decay`.

    Args:
        logging_interval: "step": at every step whose metrics are logged; "epoch": at the first step of every epoch.
        log_momentum: Log `momentum` too; if the optimizer has no momentum, log the first of its `betas`.
        log_weight_decay: Log `weight_decay` too.

    Attributes:
        lrs: Logged learning rates of the newest `fit`, by logged name, in order.
        last_momentum_values: Newest logged momentum by logged name; empty without `log_momentum`.
        last_weight_decay_values: Newest logged weight decay by logged name; empty without `log_weight_decay`.
    """

    NONE_IS_DEFAULT = True

    @check_arguments
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] = "step",
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._logged_options = ["lr", *["momentum"] * log_momentum, *["weight_decay"] * log_weight_decay]

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Forget earlier values, and raise if the optimizer lacks a value to log."""
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}
        for optimizer in trainer.optimizers:
            missing = [
                name
                for name in self._logged_options
                for group in optimizer.param_groups
                if _get_group_value(group, name) is None
            ]
            if missing:
                raise ConfigError(
                    f"LearningRateMonitor: {type(optimizer).__name__} has no {missing[0]}. Leave log_{missing[0]} out."
                )

    def on_before_zero_grad(self, trainer: CallbackTrainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Log the values of the update in progress, once for all its micro-batches."""
        by_epoch = self.logging_interval == "epoch"
        if by_epoch and trainer.progress.batches:
            return
        groups = optimizer.param_groups
        suffixes = [""] if len(groups) == 1 else [f"/{name}" for name in _name_groups(groups)]
        for suffix, group in zip(suffixes, groups, strict=True):
            for name in self._logged_options:
                value = float(_get_group_value(group, name))
                task.log(f"{name}{suffix}", value, on_step=not by_epoch, on_epoch=by_epoch)
                if by_epoch or (trainer.global_step + 1) % trainer.plan.log_every_n_steps == 0:
                    self._keep_value(name, f"{name}{suffix}", value)

    def _keep_value(self, option: str, name: str, value: float) -> None:
        if option == "lr":
            self.lrs.setdefault(name, []).append(value)
        else:
            (self.last_momentum_values if option == "momentum" else self.last_weight_decay_values)[name] = value


def _name_groups(groups: list[dict[str, Any]]) -> list[str]:
    """Return the names of the groups; a group without a unique name gets its number."""
    names = [str(group.get("name", f"group_{number}")) for number, group in enumerate(groups)]
    return [name if names.count(name) == 1 else f"{name} {number}" for number, name in enumerate(names)]


def _get_group_value(group: dict[str, Any], name: str) -> Any:
    if name == "momentum" and "momentum" not in group:
        return group.get("betas", (None,))[0]
    return group.get(name)


_CUDA_QUERIES = {
    "cuda_allocated_mb": ("allocated_bytes.all.current", 1e6),
    "cuda_allocated_peak_mb": ("allocated_bytes.all.peak", 1e6),
    "cuda_reserved_mb": ("reserved_bytes.all.current", 1e6),
    "cuda_reserved_peak_mb": ("reserved_bytes.all.peak", 1e6),
    "cuda_inactive_split_mb": ("inactive_split_bytes.all.current", 1e6),
    "cuda_alloc_retries": ("num_alloc_retries", 1),
    "cuda_ooms": ("num_ooms", 1),
}


@final
class DeviceStatsMonitor(_SystemMonitor):
    """Callback that logs memory and load of the first process, at each `log_every_n_steps`-th step, for `system.csv`.

    | column | |
    |---|---|
    | `cuda_allocated_mb`, `cuda_reserved_mb` | 10^6 bytes allocated by tensors, and reserved by torch's allocator |
    | `cuda_allocated_peak_mb`, `cuda_reserved_peak_mb` | peaks of these since the run began |
    | `cuda_inactive_split_mb` | unused pieces of reserved memory: the cost of fragmentation |
    | `cuda_alloc_retries`, `cuda_ooms` | number of retried allocations, and of out-of-memory errors |
    | `mps_allocated_mb`, `mps_driver_mb` | 10^6 bytes allocated by tensors on MPS, and by its driver |
    | `cpu_percent`, `cpu_vm_percent`, `cpu_swap_percent` | load of all cores since the last record; used RAM and swap |

    The values come from counters on the host: reading them needs no device synchronization and no communication.

    Args:
        cpu_stats: Log the values of the CPU, which `psutil` reads. None: only if the run is on the CPU.

    Raises:
        ConfigError: `psutil` is needed and not installed.
    """

    @check_arguments
    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Choose the counters to read."""
        device = trainer.strategy.device
        self._sources: list[Callable[[], dict[str, float]]] = []
        if device.type == "cpu" if self.cpu_stats is None else self.cpu_stats:
            trainer.processes.run_on_rank_zero(_find_psutil)
            self._sources.append(_measure_host)
        if device.type == "cuda":
            self._sources.append(partial(_measure_cuda, device))
        elif device.type == "mps":
            self._sources.append(_measure_mps)

    def _start_measuring(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        self._measure_values(trainer)  # psutil measures the load between two readings.

    def _measure_values(self, trainer: CallbackTrainer) -> dict[str, float]:
        sources = self._sources if trainer.is_global_zero else []
        return {name: value for read in sources for name, value in read().items()}


def _find_psutil() -> None:
    import_optional("psutil", "DeviceStatsMonitor, for statistics of the CPU,", "stats")


def _measure_host() -> dict[str, float]:
    import psutil

    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }


def _measure_cuda(device: torch.device) -> dict[str, float]:
    known = torch.cuda.memory_stats(device)
    return {name: known.get(key, 0) / unit for name, (key, unit) in _CUDA_QUERIES.items()}


def _measure_mps() -> dict[str, float]:
    allocated, driver = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    return {"mps_allocated_mb": allocated / 1e6, "mps_driver_mb": driver / 1e6}
