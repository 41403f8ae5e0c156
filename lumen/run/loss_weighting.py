"""The weighting of one optimizer step, in its one place.

The gradient of a step is (sum over micro-batches of weight * grad(mean loss)) / (sum of weights): the gradient of the
full batch, however it was cut and divided. Each backward gets `loss * (weight / planned)`, times the number of
processes, because gradients are averaged over them. Where the total is known beforehand it is what was planned and
nothing is left to do; otherwise the gradients are multiplied by `planned / total` once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import final

import torch

from lumen.errors import TrainingError

Answer = tuple[int, float | None] | None
BeginSum = Callable[[Sequence[float]], Callable[[], list[float]]]


@final
class LossWeighting:
    """Weights of the micro-batches of the optimizer step in progress.

    Args:
        by_task: Becomes the attribute.
        world: Number of data ranks, over which gradients are averaged.
        copies: Number of processes of each data rank, which make the same micro-batches.
        scaled: A gradient scaler is at work: the number of processes is then multiplied with gradients, not with the
            loss, so that what overflows does not depend on it.
        begin_sum: Begins to sum numbers over the processes; what it returns waits for the sums. None: there is one
            process.
        gather: What each process says, on all of them. None: there is one process.
        keeps_losses: Somebody asks for the loss of a step.

    Attributes:
        by_task: The known weights are the task's `batch_weight`, not numbers of samples: a returned one must agree.
        planned: The sum of the weights that the losses of the step are divided by.
        losses: What the micro-batches of this process have added to the step's loss, detached; None: nobody asks.
        unseeded: The guess is to be made of the first weight, by `seed`.
        total: The sum of the weights of this process; once they have agreed, of all.
    """

    def __init__(
        self,
        *,
        by_task: bool,
        world: int = 1,
        copies: int = 1,
        scaled: bool = False,
        begin_sum: BeginSum | None = None,
        gather: Callable[[Answer], list[Answer]] | None = None,
        keeps_losses: bool = False,
    ) -> None:
        self.losses: list[torch.Tensor] | None = [] if keeps_losses else None
        self.by_task = by_task
        self._in_loss, self._in_gradients = (1, world) if scaled else (world, 1)
        self._begin_sum, self._gather = begin_sum, gather
        self._world, self._copies = world, copies
        self.begin(0.0, 0, 1.0)

    def begin(self, planned: float, micro_batches: int, guess: float) -> None:
        """A step begins.

        Args:
            planned: The sum of the weights that are known before the forward, over all processes.
            micro_batches: Of all processes. The factor of a single one on a single process is exactly 1.
            guess: Stands in for an unknown sum: a power of two, so that multiplying by it rounds nothing. 0: none has
                been made yet.
        """
        self.total, self.planned = 0.0, planned
        self.losses = None if self.losses is None else []
        self._alone = micro_batches == self._world == 1
        self._micro_batches, self._guess = micro_batches, guess or 1.0
        # 16 bits alone mind how large what is summed becomes, and several processes would have to tell each other
        self.unseeded = not guess and not self.by_task and (self._world == 1 or self._in_gradients > 1)
        self._returned: bool | None = None
        self._sums: Callable[[], list[float]] | None = None
        self._wishes: list[bool] = []

    def seed(self, number: int | None, returned: float | None = None) -> None:
        """Make the first guess of the first weight there is, on all processes alike. Collective.

        Args:
            number: Of the micro-batch of this process in the step; None: it gives no loss.
            returned: The weight that the task returned for it; None: none.
        """
        answer = None if number is None else (number, returned)
        answers = [answer] if self._gather is None else self._gather(answer)
        if given := [each for each in answers if each is not None]:
            self.unseeded = False
            total = (min(given, key=itemgetter(0))[1] or 0.0) * self._micro_batches
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
        if self.by_task:
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
                self.planned = weight if self._alone else self._guess
        self.total += weight
        return self._in_loss * weight / self.planned if self.planned else 0.0

    def plan_with_guess(self) -> None:
        """A single micro-batch of a step is made in parts, whose weights are unknown: the first may weigh nothing."""
        self._alone = False
        if self._returned:
            self.planned = self._guess

    def keep_loss(self, part: torch.Tensor) -> None:
        """Keep what a micro-batch adds to the step's loss, if somebody asks for it."""
        if self.losses is not None:
            self.losses.append(part.detach())

    def drop_losses(self) -> None:
        """Keep no losses."""
        self.losses = None

    def mark(self) -> tuple[float, int]:
        """What is counted of this process by now, for `go_back`."""
        return self.total, len(self.losses or ())

    def go_back(self, mark: tuple[float, int]) -> None:
        """Forget what was counted since `mark`."""
        self.total, losses = mark
        if self.losses is not None:
            del self.losses[losses:]

    def begin_agreement(self, *wishes: bool) -> None:
        """All weights of this process are known: begin to sum them over the processes. Collective.

        Args:
            wishes: One bool for each question: what this process wishes.
        """
        self._wishes = list(wishes)
        if self._begin_sum is not None:
            told = self.total, self._returned is True, self._returned is False, *wishes
            self._sums = self._begin_sum(list(map(float, told)))

    def agree(self) -> list[bool]:
        """Wait for the sums over the processes.

        Returns:
            Of each question whether some process has the wish.

        Raises:
            TrainingError: Some processes have returned weights, and some have not.
        """
        if self._sums is None:
            return self._wishes
        (total, returned, plain, *wishes), self._sums = self._sums(), None
        self.total = total / self._copies
        if returned and plain:
            raise _mixed()
        if returned or plain:
            self._returned = bool(returned)
        if self._returned:
            self.planned = self._guess  # of a process that counted nothing, too
        return [wish > 0 for wish in wishes]

    @property
    def counted(self) -> bool:
        """Whether the weights are the user's own (tokens, boxes), not numbers of samples."""
        return self.by_task or bool(self._returned)

    @property
    def correction(self) -> float:
        """What to multiply the gradients with after the last backward; 1.0 where nothing is left to do."""
        late = 1.0 if self.total in (0.0, self.planned) else self.planned / self.total
        return late * self._in_gradients

    def mean(self, part: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The mean loss of the step over all processes, once they have agreed. Collective.

        Args:
            part: The sum of what this process's losses were when their backwards began: a scalar tensor.
            reduce: Sums a tensor over the processes.
        """
        processes = self._world * self._copies
        return (part if processes == 1 else reduce(part.double()) / processes) * self.correction

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
