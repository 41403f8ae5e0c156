"""The loaders of a run, as it reads them."""

from __future__ import annotations

import logging
from typing import Any, final

from lumen.data.adapter import LoaderAdapter
from lumen.run.progress import Progress
from lumen.task.data_module import DataModule

_log = logging.getLogger("lumen")


@final
class Loaders:
    """The open loaders of a run.

    Args:
        datamodule: None: the loaders were given, or are the task's.
        given: The loaders that a stage was given instead of a data module, for training and for evaluation; None: the
            data module or the task has them.
        progress: Counters of the run.

    Attributes:
        train: The training loader; None before `fit` has opened it.
        evaluation: Those of the evaluation; during `fit` of its validation.
        epoch: The epoch as of which those of `fit` were asked for.
        empty: Why evaluation loaders gave no batch, a sentence each.
        too_large: It was said that an evaluation batch does not fit into memory.
    """

    def __init__(self, datamodule: DataModule | None, given: tuple[Any, Any] | None, progress: Progress) -> None:
        self.datamodule, self.given = datamodule, given
        self._progress = progress
        self.train: LoaderAdapter | None = None
        self.evaluation: list[LoaderAdapter] = []
        self.epoch = 0
        self.empty: list[str] = []
        self.too_large = False

    def measure(self) -> LoaderAdapter:
        """The training data, with the length of the epoch in progress: it may grow or shrink from one to the next."""
        assert self.train is not None
        self.train.measure(self._progress.position)
        return self.train

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
