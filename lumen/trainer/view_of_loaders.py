"""What callbacks and tasks may read of the data of a run: its loaders and how many batches they have."""

from __future__ import annotations

import math
from typing import Any

from lumen.data.adapter import LoaderAdapter
from lumen.errors import ConfigError
from lumen.run.open_loaders import open_loaders
from lumen.run.plan import EpochLengths
from lumen.run.step_context import begun_in_step
from lumen.task.data_module import DataModule
from lumen.trainer.view_base import ViewBase


class ViewOfLoaders(ViewBase):
    """The data module, and how many batches, samples and steps there are."""

    @property
    def batch_samples(self) -> int:
        """Samples of the micro-batch in progress."""
        return self.run.log.batch_samples

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
    def num_evaluation_batches(self) -> int | None:
        """Batches of the evaluation in progress, of all loaders and ranks; None if a loader has no length."""
        counts = [self.plan.batches(self.run.stage, adapter) for adapter in self.run.loaders.evaluation]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def epoch_lengths(self) -> EpochLengths | None:
        """Optimizer steps of every epoch, as long as the data is now; None if the loader has no length."""
        if self.run.loaders.train is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self.run.loaders.epoch_lengths()

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of the epoch in progress, as long as the data is now; None if the loader has no length."""
        lengths = self.epoch_lengths
        return None if lengths is None else lengths.of(self.run.progress.epoch)

    @property
    def batch_indices(self) -> list[int] | None:
        """Indices in the data set of the samples of a prediction's batch in progress; None where nobody knows them."""
        return self.run.values.batch_indices

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
