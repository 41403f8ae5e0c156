"""What callbacks and tasks may read of the data of a run: its loaders and how many batches they have."""

from __future__ import annotations

from lumen.errors import ConfigError
from lumen.run.open_loaders import open_loaders
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
        assert self.run.loaders.train is not None
        return self.plan.total_steps(self.run.loaders.train)

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of a training epoch; None if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return self.plan.batches("train", adapter)

    @property
    def num_evaluation_batches(self) -> int | None:
        """Batches of the evaluation in progress, of all loaders and ranks; None if a loader has no length."""
        counts = [self.plan.batches(self.run.stage, adapter) for adapter in self.run.loaders.evaluation]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of a training epoch, as long as the data is now; None if the loader has no length."""
        adapter = self.run.loaders.train
        if adapter is None:
            raise ConfigError("there is no training loader: it is opened during fit.")
        return adapter.steps(self.plan.limit("train", adapter))

    @property
    def batch_indices(self) -> list[int] | None:
        """Indices in the data set of the samples of a prediction's batch in progress; None where nobody knows them."""
        return self.run.values.batch_indices
