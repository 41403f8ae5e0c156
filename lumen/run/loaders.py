"""The open loaders of a run."""

from __future__ import annotations

from typing import Any, final

from lumen.console import logger as _log
from lumen.data.adapter import LoaderAdapter
from lumen.run.plan import EpochLengths, Plan, Progress
from lumen.task.data_module import DataModule


@final
class Loaders:
    """The open loaders of a run.

    Args:
        datamodule: The data module; None if loaders were passed, or the task has them.
        user_loaders: The loaders that were passed instead of a data module, for training and for evaluation; None if
            the data module or the task has them.
        plan: Settings of the run, with the size of steps.
        progress: Counters of the run.
        data_world_size: Number of parts into which the training data of a step is divided.

    Attributes:
        train: The training loader; None before `fit` has opened it.
        evaluation: Loaders of the evaluation; during `fit` the loaders of the validation.
        sources: Loader or loaders as the user made them, by stage.
        epoch: The epoch for which the loaders of `fit` were requested.
        empty_stages: Reasons why evaluation loaders gave no batch, a sentence each.
        max_samples_per_part: Largest number of samples of a part of a batch, by stage of evaluation. A stage without an
            entry has had no batch too large for memory.
    """

    def __init__(
        self,
        datamodule: DataModule | None,
        user_loaders: tuple[Any, Any] | None,
        plan: Plan,
        progress: Progress,
        data_world_size: int,
    ) -> None:
        self.datamodule, self.user_loaders = datamodule, user_loaders
        self._plan, self._progress, self._data_world_size = plan, progress, data_world_size
        self.train: LoaderAdapter | None = None
        self.evaluation: list[LoaderAdapter] = []
        self.sources: dict[str, Any] = {}
        self.epoch, self.empty_stages = 0, list[str]()
        self.max_samples_per_part: dict[str, int] = {}

    def measure_training(self) -> LoaderAdapter:
        """Update length and steps of the training loader for the epoch in progress, and return the loader."""
        assert self.train is not None
        self.train.measure(self._progress.position)  # The data may grow or shrink between epochs.
        if len(self._plan.accumulate) > 1:
            self.train.set_per_step(self._plan.get_accumulation(self._progress.epoch) * self._data_world_size)
        return self.train

    def get_epoch_lengths(self) -> EpochLengths | None:
        """Return the optimizer steps of every epoch for the current length of the data; None if it is unknown."""
        assert self.train is not None
        limit, sizes = self._plan.get_limit("train", self.train), self._plan.accumulate
        is_constant = len(sizes) == 1  # Then the loader's own steps count, which `global_batch_size` may set.
        sizes_per_step = {
            epoch: None if is_constant else number * self._data_world_size for epoch, number in sizes.items()
        }
        lengths = {
            epoch: steps
            for epoch in sizes_per_step
            if (steps := self.train.count_steps(limit, sizes_per_step[epoch])) is not None
        }
        return EpochLengths(lengths) if lengths else None

    def set_max_samples(self, stage: str, max_samples: int) -> None:
        """Evaluate later batches of a stage in parts of at most `max_samples` samples."""
        self.max_samples_per_part[stage] = max_samples

    def count_evaluation_batches(self, stage: str) -> int | None:
        """Return the number of batches of an evaluation over all loaders and ranks; None if a loader has no length.

        Args:
            stage: "validate", "sanity", "test" or "predict".
        """
        counts = [count for each in self.evaluation if (count := self._plan.count_batches(stage, each)) is not None]
        return sum(counts) if len(counts) == len(self.evaluation) else None

    def warn_of_empty(self, stage: str, adapter: LoaderAdapter) -> None:
        """Warn once that an evaluation loader gave no batch, and keep the reason for later errors.

        Args:
            stage: "validate", "sanity", "test" or "predict".
            adapter: Adapter of the loader without batches.
        """
        stage = "validate" if stage == "sanity" else stage
        why = f"the loader{f' {adapter.name}' if adapter.name else ''} to {stage} is empty: {adapter.explain_empty()}"
        if why not in self.empty_stages:
            self.empty_stages.append(why)
            _log.warning("%s. This loader gives no values", why)

    def list_suffixes(self) -> list[str]:
        """Return the suffix of logged names for each evaluation loader: its name or number; "" for a single loader."""
        if len(self.evaluation) == 1:
            return [""]
        return [f"/{adapter.name or f'dataloader_idx_{number}'}" for number, adapter in enumerate(self.evaluation)]

    def close(self) -> None:
        """End the loaders' workers."""
        for adapter in (self.train, *self.evaluation):
            if adapter is not None:
                adapter.close()
