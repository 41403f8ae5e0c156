"""The batch size: trained with ever larger ones, until memory ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, final

from lumen.callbacks import Callback
from lumen.errors import ConfigError, DataError, TrainingError
from lumen.internals.memory import is_out_of_memory
from lumen.trainer.tuner.trial import Trials

if TYPE_CHECKING:
    from lumen.run.plan import Plan
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer

_log = logging.getLogger("lumen")
Mode = Literal["power", "binsearch"]


@final
class LargestBatch(Callback):
    """Notes how large batches are.

    Attributes:
        samples: Of the largest so far.
    """

    def __init__(self) -> None:
        self.samples = 0

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Look at a batch."""
        self.samples = max(self.samples, trainer.batch_samples)


@final
class BatchSizeSearch:
    """Finds the largest micro-batch that fits into memory.

    Args:
        trials: The trainings of copies, one for each size that is tried.
        plan: The trainer's own, which says how large a step is.
        name: Of the attribute or hyperparameter.
        steps: Updates of each trial.
        max_trials: How many trials there may be.
    """

    def __init__(self, trials: Trials, plan: Plan, name: str, steps: int, max_trials: int) -> None:
        self._trials, self._name, self._steps, self._left = trials, name, steps, max_trials
        self._most = plan.global_batch_size
        self._accumulates = plan.global_batch_size is not None or plan.accumulates

    def find(self, init_val: int, mode: Mode, margin: float) -> int:
        """The batch size that is found.

        Args:
            init_val: The first one to try.
            mode: "power": doubled until memory ends; "binsearch": then halved between what fits and what does not.
            margin: This part less is used, where "binsearch" has met the end of memory.

        Raises:
            TrainingError: Not even one sample fits.
        """
        fits, too_large, size = 0, None, init_val if self._most is None else min(init_val, self._most)
        while self._left and (too_large is None or fits == 0):
            found = self._try(size)
            if found is None:
                too_large, size = size, size // 2
                if size == 0:
                    raise TrainingError("a batch of one sample does not fit into memory: no batch size does.")
                continue
            fits = found
            if found < size or too_large is not None or size == self._most:
                break
            size = size * 2 if self._most is None else min(size * 2, self._most)
        while mode == "binsearch" and too_large is not None and self._left and too_large - fits > 1:
            middle = (fits + too_large) // 2
            found = self._try(middle)
            fits, too_large = (fits, middle) if found is None else (found, too_large)
        if not fits:
            raise TrainingError(f"no batch size was found to fit: {size * 2} does not. Set max_trials larger.")
        if mode == "binsearch" and too_large is not None:
            fits = max(1, int(fits * (1 - margin)))
        _log.info("batch size: %d fits into memory%s", fits, f", {too_large} does not" if too_large is not None else "")
        return fits if self._most is None else _even(self._most, fits)

    def _try(self, size: int) -> int | None:
        """Train a little. Returns how large batches were; None if memory did not suffice."""
        self._left -= 1
        largest = LargestBatch()
        try:
            self._trials.run(
                largest, {self._name: size},
                max_steps=self._steps, accumulate={0: 1 + self._accumulates}, global_batch_size=None,
                halve_on_oom=False,
            )  # fmt: skip
        except (RuntimeError, DataError) as error:
            if isinstance(error, DataError):
                if size == 1 or largest.samples:
                    raise
                return None  # with drop_last there is no batch of this size
            if not is_out_of_memory(error):
                raise
            return None
        if largest.samples > size:
            raise ConfigError(
                f"{self._name} was set to {size}, but batches have {largest.samples} samples: the loader does not take "
                "its size from there. Write DataLoader(..., batch_size=self.hparams.batch_size), or as it is called."
            )
        return largest.samples


def _even(total: int, most: int) -> int:
    """The micro-batch that cuts a step into equal parts, of at most so many samples."""
    parts = -(-total // most)
    return -(-total // parts)
