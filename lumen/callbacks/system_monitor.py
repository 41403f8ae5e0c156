"""Record speed and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from lumen.callbacks.base import Callback
from lumen.callbacks.throughput import Throughput, memory_mb

if TYPE_CHECKING:
    from lumen.task import TaskModule
    from lumen.trainer import Trainer


@final
class SystemMonitor(Callback):
    """Gives every logger, at each `log_every_n_steps`-th step, what no two runs share.

    `time_s`: seconds of training over all resumed parts; `steps_per_s`, `samples_per_s` and `data_wait_share` (0 to
    1): since the last record, evaluations left out; `memory_mb`: 10^6 bytes, on CUDA the peak of what tensors took,
    elsewhere what the process holds in RAM, without loader workers.
    """

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._recorded_step = 0

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Start the clock."""
        self._throughput.start(trainer.run)
        self._recorded_step = trainer.global_step

    def on_validation_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Stop the clock."""
        self._throughput.pause()

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Go on."""
        self._throughput.resume()

    def on_boundary(self, trainer: Trainer, task: TaskModule) -> None:
        """Write a record if one is due."""
        run = trainer.run
        step = run.progress.step
        if step % run.plan.log_every_n_steps or step == self._recorded_step:  # a skipped update is no new step
            return
        self._recorded_step = step
        values = {
            "time_s": run.progress.elapsed_s,
            **self._throughput.measure(run)._asdict(),
            "memory_mb": memory_mb(run.strategy.device),
        }
        for logger in run.loggers:
            logger.log_system(values, step)
