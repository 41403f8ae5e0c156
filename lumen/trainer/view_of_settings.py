"""The arguments of a trainer under their names, the processes that it runs in, and the data of its run."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from lumen import console
from lumen.data.adapter import LoaderAdapter
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError
from lumen.run.open_loaders import open_loaders
from lumen.run.step_context import begun_in_step
from lumen.task.data_module import DataModule
from lumen.trainer.view_base import ViewBase


class ViewOfSettings(ViewBase):
    """Arguments of the trainer, as they are after `fast_dev_run` and `overfit_batches`, its processes and its data.

    None can be set afterwards.
    """

    @property
    def max_steps(self) -> int:
        """The limit; -1: there is none."""
        return -1 if self.plan.max_steps is None else self.plan.max_steps

    @property
    def max_epochs(self) -> int:
        """The limit; -1: there is none."""
        return -1 if self.plan.max_epochs is None else self.plan.max_epochs

    @property
    def min_steps(self) -> int:
        """Optimizer updates before a callback may stop the run."""
        return self.plan.min_steps

    @property
    def min_epochs(self) -> int:
        """Epochs before a callback may stop the run."""
        return self.plan.min_epochs

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step in each process, in the epoch in progress; with `global_batch_size` they follow.

        Raises:
            ConfigError: They follow from the training loader, which is not open yet.
        """
        if self.plan.global_batch_size is None:
            return self.plan.accumulate_in(self.current_epoch)
        loader = None if self._run is None else self._run.loaders.train
        if loader is None:
            raise ConfigError(
                "accumulate_grad_batches: it follows from global_batch_size and the training loader, which is not open "
                "yet. Read it during fit."
            )
        return math.ceil(loader.per_step / self.strategy.data_world_size)

    @property
    def gradient_clip_val(self) -> float | None:
        """Largest gradient norm or element; None: nothing is clipped."""
        return self.plan.clip_value if self.plan.clip_norm is None else self.plan.clip_norm

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """By "norm" or by "value"; None: nothing is clipped."""
        return None if self.gradient_clip_val is None else "value" if self.plan.clip_norm is None else "norm"

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """When to validate: optimizer steps as an int, a share of an epoch as a float, or a duration."""
        if self.plan.val_every_s is not None:
            return timedelta(seconds=self.plan.val_every_s)
        every, share = self.plan.val_every_n_steps, self.plan.val_every_epoch_fraction
        return every if every is not None else share if share is not None else 1.0

    @property
    def check_val_every_n_epoch(self) -> int:
        """Validate in every n-th epoch only."""
        return self.plan.val_every_n_epochs

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Validation batches to try before training; infinite: all."""
        return math.inf if self.plan.sanity_batches < 0 else self.plan.sanity_batches

    @property
    def limit_train_batches(self) -> int | float:
        """A count, or a share, of the batches of an epoch."""
        return self._limit("train")

    @property
    def limit_val_batches(self) -> int | float:
        """Likewise for validation."""
        return self._limit("validate")

    @property
    def limit_test_batches(self) -> int | float:
        """Likewise for test."""
        return self._limit("test")

    @property
    def limit_predict_batches(self) -> int | float:
        """Likewise for prediction."""
        return self._limit("predict")

    @property
    def overfit_batches(self) -> int | float:
        """A count, or a share, of the batches that every epoch repeats; 0.0: off."""
        return self._limit("train") if self.plan.same_batches else 0.0

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """New loaders are asked for at the start of every n-th epoch; 0: never."""
        return self.plan.reload_every_n_epochs

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two written values."""
        return self.plan.log_every_n_steps

    def _limit(self, stage: str) -> int | float:
        limit = self.plan.limits.get(stage)
        return 1.0 if limit is None else limit

    @property
    def processes(self) -> Processes:
        """Who takes part in the run, and what of plain data they tell each other."""
        return self.strategy.processes

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.processes.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self.processes.node

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return self.processes.nodes

    @property
    def num_devices(self) -> int:
        """Devices of this node that the run uses; a process has one."""
        return self.processes.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Their numbers on this node."""
        return list(range(self.num_devices))

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print once, in the first process, above the progress bar."""
        if self.is_global_zero:
            console.print_values(*values, sep=sep, end=end)

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""
        return self.processes.is_global_zero

    # ------------------------------------------------------------------ data

    @property
    def datamodule(self) -> DataModule | None:
        """The data module of the run."""
        return self.run.loaders.datamodule

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules that need their length, as long as the data is now.

        Raises:
            ConfigError: Neither `max_steps` nor `max_epochs` with a loader of known length says so.
        """
        if self.run.loaders.train is None:
            open_loaders(self.run)
        return self.plan.total_steps(self.run.loaders.epoch_lengths())

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of a training epoch, as one process would count; infinite if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self._batches("train", adapter)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of the epoch in progress, as long as the data is now; None if the loader has no length."""
        if self.run.loaders.train is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        lengths = self.run.loaders.epoch_lengths()
        return None if lengths is None else lengths.of(self.run.progress.epoch)

    @property
    def train_dataloader(self) -> Any:
        """The training loader, or several, as the user gave them; None before they are opened.

        A run reads it in its own way, so that a look at it changes nothing; with several processes it is that of all.
        """
        return self._source("fit")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or several, likewise."""
        return self._source("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader, or several, likewise."""
        return self._source("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader, or several, likewise."""
        return self._source("predict")

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader that the sanity check tries, as one process would count."""
        return self._of_evaluation("sanity", "fit")

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader, as one process would count; infinite for one without a length."""
        return self._of_evaluation("validate", "fit", "validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader, likewise."""
        return self._of_evaluation("test", "test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each prediction loader, likewise."""
        return self._of_evaluation("predict", "predict")

    @property
    def enable_validation(self) -> bool:
        """`fit` has a validation; known once its loaders are open, before `on_fit_start`."""
        return bool(self.num_val_batches)

    @property
    def is_last_batch(self) -> bool:
        """The micro-batch of this process in progress, or the newest one, is its last of the epoch.

        Raises:
            ConfigError: The loader has no length, so that only its end will tell.
        """
        run, batches = self.run, self.num_training_batches
        if batches == math.inf:
            raise ConfigError("is_last_batch: the training loader has no length, so that only its end will tell.")
        if not run.log.in_train_step:
            return run.progress.batches >= batches
        others = run.strategy.data_world_size - 1 if run.task.automatic_optimization else 0
        return run.progress.batches + begun_in_step(run.step) + others >= batches

    @property
    def is_epoch_end(self) -> bool:
        """All batches of the epoch are done, in a validation or `on_train_epoch_end`; False if the run ends before."""
        return self.run.ending.ends_epoch

    def _source(self, stage: str) -> Any:
        return None if self._run is None else self._run.loaders.sources.get(stage)

    def _of_evaluation(self, stage: str, *runs: str) -> list[int | float]:
        if self._run is None or self._fn not in runs:
            return []
        return [self._batches(stage, adapter) for adapter in self._run.loaders.evaluation]

    def _batches(self, stage: str, adapter: LoaderAdapter) -> int | float:
        batches = self.plan.batches(stage, adapter)
        return math.inf if batches is None else batches
