"""The weighting of one optimizer step, in its one place.

The gradient of a step is (sum over micro-batches of weight * grad(mean loss)) / (sum of weights): the gradient of the
full batch, however it was cut. Each backward gets `loss * (weight / planned)`. Where the total is known beforehand it
is what was planned and nothing is left to do; otherwise the gradients are multiplied by `planned / total` once.
"""

from __future__ import annotations

import math
from typing import final

from lumen.errors import TrainingError


@final
class StepWeights:
    """Weights of the micro-batches of one optimizer step.

    Args:
        planned: The sum of the weights that are known before the forward.
        alone: The step has a single micro-batch on a single process: then its share is exactly 1.
        by_task: The known weights are the task's `batch_weight`, not numbers of samples: a returned one must agree.
        guess: Stands in for an unknown sum: a power of two, so that multiplying by it rounds nothing.
    """

    def __init__(self, planned: float, *, alone: bool, by_task: bool, guess: float) -> None:
        self.total = 0.0
        self._planned = planned
        self._alone = alone
        self._by_task = by_task
        self._guess = guess
        self._returned: bool | None = None

    def share(self, known: float, returned: float | None) -> float:
        """What to multiply a micro-batch's mean loss with before backward.

        Args:
            known: The weight known before the forward.
            returned: The weight that the task returned with its loss; it replaces a number of samples.

        Raises:
            TrainingError: A negative or non-finite weight; some micro-batches of a step with and some without one;
                one that differs from `batch_weight`.
        """
        if self._returned not in (None, returned is not None):
            raise TrainingError(
                "training_step returned a weight for one micro-batch of a step and none for another. "
                "Return (loss, weight) always or never."
            )
        if self._by_task and returned not in (None, known):
            raise TrainingError(
                f"training_step returned the weight {returned} for a micro-batch to which batch_weight gave {known}. "
                "Make the two agree, or drop one."
            )
        weight = known if returned is None else returned
        if not 0.0 <= weight < math.inf:
            raise TrainingError(f"a micro-batch has the weight {weight}; a weight is a finite number >= 0.")
        if self._returned is None:
            self._returned = returned is not None
            if self._returned and not self._by_task:
                self._planned = weight if self._alone else self._guess
        self.total += weight
        return weight / self._planned if self._planned else 0.0

    @property
    def counted(self) -> bool:
        """Whether the weights are the user's own (tokens, boxes), not numbers of samples."""
        return self._by_task or bool(self._returned)

    @property
    def correction(self) -> float:
        """What to multiply the gradients with after the last backward; 1.0 where nothing is left to do."""
        return 1.0 if self.total in (0.0, self._planned) else self._planned / self.total

    @property
    def next_guess(self) -> float:
        """The power of two nearest below this step's total, for the next step: it keeps fp16 gradients in range."""
        return 2.0 ** math.floor(math.log2(self.total)) if self._returned and self.total else self._guess
