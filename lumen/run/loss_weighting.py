"""The weighting of one optimizer step, in its one place.

The gradient of a step is (sum over micro-batches of weight * grad(mean loss)) / (sum of weights): the gradient of the
full batch, however it was cut and dealt to processes. Each backward gets `loss * (weight / planned)`, times the number
of processes, because gradients are averaged over them. Where the total is known beforehand it is what was planned and
nothing is left to do; otherwise the gradients are multiplied by `planned / total` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import final

from lumen.errors import TrainingError

Answer = tuple[int, float | None] | None
BeginAgreement = Callable[[Sequence[float], bool], Callable[[], list[float] | None]]


@final
class LossWeighting:
    """Weights of the micro-batches of the optimizer step in progress.

    Args:
        by_task: The known weights are the task's `batch_weight`, not numbers of samples: a returned one must agree.
        world: Number of processes.
        scaled: A gradient scaler is at work: the number of processes is then multiplied with gradients, not with the
            loss, so that what overflows does not depend on it.
        begin_agreement: Begins to sum numbers over the processes; what it returns waits for the sums, None if none of
            them has news. None: there is one process.
        gather: What each process says, on all of them. None: there is one process.

    Attributes:
        unseeded: The guess is to be made of the first weight, by `seed`.
        total: The sum of the weights of this process; once they have agreed, of all.
        skipped: A hook of some process ended the epoch in this step.
        left_out: A micro-batch of this process counts nothing, although it was planned.
    """

    def __init__(
        self,
        *,
        by_task: bool,
        world: int = 1,
        scaled: bool = False,
        begin_agreement: BeginAgreement | None = None,
        gather: Callable[[Answer], list[Answer]] | None = None,
    ) -> None:
        self._by_task = by_task
        self._in_loss, self._in_gradients = (1, world) if scaled else (world, 1)
        self._begin_agreement, self._gather = begin_agreement, gather
        self._world = world
        self.begin(0.0, 0, 1.0)

    def begin(self, planned: float, micro_batches: int, guess: float) -> None:
        """A step begins.

        Args:
            planned: The sum of the weights that are known before the forward, over all processes.
            micro_batches: Of all processes. The factor of a single one on a single process is exactly 1.
            guess: Stands in for an unknown sum: a power of two, so that multiplying by it rounds nothing. 0: none has
                been made yet.
        """
        self.total = 0.0
        self.skipped = self.left_out = False
        self._planned = planned
        self._alone = micro_batches == self._world == 1
        self._micro_batches, self._guess = micro_batches, guess or 1.0
        # 16 bits alone mind how large what is summed becomes, and several processes would have to tell each other
        self.unseeded = not guess and not self._by_task and (self._world == 1 or self._in_gradients > 1)
        self._returned: bool | None = None
        self._finish: Callable[[], list[float] | None] | None = None

    def seed(self, number: int | None, returned: float | None = None) -> None:
        """Make the first guess of the first weight there is, on all processes alike. Collective.

        Args:
            number: Of the micro-batch of this process in the step; None: it gives no loss.
            returned: The weight that the task returned for it; None: none.
        """
        answer = None if number is None else (number, returned)
        answers = [answer] if self._gather is None else self._gather(answer)
        if given := [each for each in answers if each is not None]:
            first = min(given, key=itemgetter(0))[1]
            self.unseeded = False
            total = (first or 0.0) * self._micro_batches
            self._guess = _power_of_two(total) if 0.0 < total < math.inf else 1.0

    def loss_factor(self, known: float, returned: float | None) -> float:
        """What to multiply a micro-batch's mean loss with before backward.

        Args:
            known: The weight known before the forward.
            returned: The weight that the task returned with its loss; it replaces a number of samples.

        Raises:
            TrainingError: A negative or non-finite weight; some micro-batches of a step with and some without one;
                one that differs from `batch_weight`.
        """
        if self._by_task:
            if returned not in (None, known):
                raise TrainingError(
                    f"training_step returned the weight {returned} for a micro-batch to which batch_weight gave "
                    f"{known}. Make the two agree, or drop one."
                )
            returned = None  # it was known
        if self._returned not in (None, returned is not None):
            raise _mixed()
        weight = known if returned is None else returned
        if not 0.0 <= weight < math.inf:
            raise TrainingError(f"a micro-batch has the weight {weight}; a weight is a finite number >= 0.")
        if self._returned is None:
            self._returned = returned is not None
            if self._returned:
                self._planned = weight if self._alone else self._guess
        self.total += weight
        return self._in_loss * weight / self._planned if self._planned else 0.0

    def begin_agreement(self) -> None:
        """All weights of this process are known: begin to sum them over the processes. Collective."""
        if self._begin_agreement is not None:
            returned, skipped = self._returned is True, self.skipped
            kinds = map(float, (returned, self._returned is False, skipped, False))
            self._finish = self._begin_agreement([self.total, *kinds], returned or skipped or self.left_out)

    @staticmethod
    def leave(sum_over_ranks: Callable[[Sequence[float]], list[float]], world: int) -> None:
        """Take part in the next agreement with nothing but the message that this process has left.

        Raises:
            TrainingError: On every process: some of them go on.
        """
        left = sum_over_ranks([0.0, 0.0, 0.0, 0.0, 1.0])[-1]
        if left < world:
            raise _apart(left)

    def agree(self) -> None:
        """Wait for the sums over the processes.

        Raises:
            TrainingError: Some processes have returned weights, and some have not; or some have left.
        """
        if self._finish is None:
            return
        sums, self._finish = self._finish(), None
        if sums is None:
            self.total = self._planned
            return
        self.total, returned, plain, skipped, left = sums
        self.skipped = bool(skipped)
        if left:
            raise _apart(left)
        if returned and plain:
            raise _mixed()
        if returned or plain:
            self._returned = bool(returned)
        if self._returned:
            self._planned = self._guess  # of a process that counted nothing, too

    @property
    def counted(self) -> bool:
        """Whether the weights are the user's own (tokens, boxes), not numbers of samples."""
        return self._by_task or bool(self._returned)

    @property
    def correction(self) -> float:
        """What to multiply the gradients with after the last backward; 1.0 where nothing is left to do."""
        late = 1.0 if self.total in (0.0, self._planned) else self._planned / self.total
        return late * self._in_gradients

    @property
    def next_guess(self) -> float:
        """The power of two nearest above this step's total, for the next step: it keeps fp16 gradients in range.

        Not less than half of this step's guess: totals that go up and down must not overflow whenever they go up.
        """
        if self.unseeded:
            return 0.0
        return max(_power_of_two(self.total), self._guess / 2) if self._returned and self.total else self._guess


def _power_of_two(number: float) -> float:
    """The least one that is not less."""
    return 2.0 ** math.ceil(math.log2(number))


def _mixed() -> TrainingError:
    return TrainingError(
        "training_step returned a weight for one micro-batch of a step and none for another. "
        "Return (loss, weight) always or never."
    )


def _apart(left: float) -> TrainingError:
    return TrainingError(
        f"{left:g} processes end the run here, but others go on: should_stop was not set on every rank. Set it in "
        "on_validation_end or on_train_epoch_end, where one rank is enough, or by what is equal on all ranks."
    )
