"""The loaders of a run, as it reads them."""

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
        datamodule: None: the loaders were given, or are the task's.
        given: The loaders that a stage was given instead of a data module, for training and for evaluation; None: the
            data module or the task has them.
        plan: Says how large steps are.
        progress: Counters of the run.
        readers: How many processes read the training data together.

    Attributes:
        train: The training loader; None before `fit` has opened it.
        evaluation: Those of the evaluation; during `fit` of its validation.
        sources: What gave them, by stage: a loader or several, as the user made them.
        epoch: The epoch as of which those of `fit` were asked for.
        empty: Why evaluation loaders gave no batch, a sentence each.
        fits: Samples of the largest part of a batch that is tried, by stage of evaluation; none: all have fitted.
    """

    def __init__(
        self, datamodule: DataModule | None, given: tuple[Any, Any] | None, plan: Plan, progress: Progress, readers: int
    ) -> None:
        self.datamodule, self.given = datamodule, given
        self._plan, self._progress, self._readers = plan, progress, readers
        self.train: LoaderAdapter | None = None
        self.evaluation: list[LoaderAdapter] = []
        self.sources: dict[str, Any] = {}
        self.epoch, self.empty = 0, list[str]()
        self.fits: dict[str, int] = {}

    def measure(self) -> LoaderAdapter:
        """The training data, with the length and the steps of the epoch in progress."""
        assert self.train is not None
        self.train.measure(self._progress.position)  # it may grow or shrink from one epoch to the next
        if len(self._plan.accumulate) > 1:
            self.train.regroup(self._plan.accumulate_in(self._progress.epoch) * self._readers)
        return self.train

    def epoch_lengths(self) -> EpochLengths | None:
        """Optimizer steps of every epoch, as long as the training data is now; None if nobody knows how long it is."""
        assert self.train is not None
        limit, sizes = self._plan.limit("train", self.train), self._plan.accumulate
        own = len(sizes) == 1  # the steps that it makes now: of `global_batch_size`, it may be
        each = {epoch: None if own else number * self._readers for epoch, number in sizes.items()}
        lengths = {epoch: steps for epoch in each if (steps := self.train.steps(limit, each[epoch])) is not None}
        return EpochLengths(lengths) if lengths else None

    def shrink_parts(self, stage: str, fits: int) -> None:
        """Try no larger part of a batch again in a stage of evaluation."""
        self.fits[stage] = fits

    def evaluation_batches(self, stage: str) -> int | None:
        """Return the number of batches of an evaluation, of all loaders and ranks; None if a loader has no length.

        Args:
            stage: "validate", "sanity", "test" or "predict".
        """
        counts = [count for each in self.evaluation if (count := self._plan.batches(stage, each)) is not None]
        return sum(counts) if len(counts) == len(self.evaluation) else None

    def say_empty(self, stage: str, adapter: LoaderAdapter) -> None:
        """Warn once that a loader gave an evaluation no batch; who misses its values hears of it again.

        Args:
            stage: "validate", "sanity", "test" or "predict".
            adapter: Adapter of the loader without batches.
        """
        stage = "validate" if stage == "sanity" else stage
        why = f"the loader{f' {adapter.name}' if adapter.name else ''} to {stage} is empty: {adapter.nothing()}"
        if why not in self.empty:
            self.empty.append(why)
            _log.warning("%s. It gives no values", why)

    def suffixes(self) -> list[str]:
        """What is added to the names logged for each evaluation loader: its name or number; nothing for one alone."""
        if len(self.evaluation) == 1:
            return [""]
        return [f"/{adapter.name or f'dataloader_idx_{number}'}" for number, adapter in enumerate(self.evaluation)]

    def close(self) -> None:
        """End the loaders' workers."""
        for adapter in (self.train, *self.evaluation):
            if adapter is not None:
                adapter.close()
