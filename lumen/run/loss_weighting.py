"""Weights of the losses in one optimizer step.

The gradient of a step is (sum over micro-batches of weight * grad(mean loss)) / (sum of weights). This is the gradient
of the full batch for any micro-batch size and number of processes. Each backward gets `loss * (weight / planned)`,
times the number of processes, because DDP and FSDP average gradients. If the sum of weights is known before the
forward, `planned` is that sum. Otherwise Lumen multiplies the gradients by `planned / total` once, after the last
backward.
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
        by_task: True if the task has `batch_weight`; see the attribute.
        world: Number of data ranks, over which gradients are averaged.
        copies: Number of processes of each data rank, which compute the same micro-batches.
        scaled: True under a gradient scaler. Then gradients are multiplied by the number of processes, instead of the
            loss, so that overflows do not depend on this number.
        begin_sum: Function that begins to sum numbers over the processes. It returns a function that waits for the
            sums. None for a single process.
        gather: Function that returns the answers of all processes; None for a single process.
        keeps_losses: True if a callback reads the loss of a step.

    Attributes:
        by_task: True if the known weights come from the task's `batch_weight`, False if they are numbers of samples. A
            weight that `training_step` returns must equal that of `batch_weight`.
        planned: The sum of weights that the losses of the step are divided by.
        losses: Detached contributions of this process's micro-batches to the step's loss; None if no callback reads it.
        unseeded: True if `seed_guess` must make the guess from the first weight.
        total: The sum of the weights of this process; after `finish_sum` the sum over all data ranks.
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
        self.is_set_by_task = by_task
        self._in_loss, self._in_gradients = (1, world) if scaled else (world, 1)
        self._begin_sum, self._gather = begin_sum, gather
        self._world, self._copies = world, copies
        self.begin_step(0.0, 0, 1.0)

    def begin_step(self, planned: float, micro_batches: int, guess: float) -> None:
        """Begin a step.

        Args:
            planned: The sum of the weights that are known before the forward, over all processes.
            micro_batches: Number of micro-batches of all processes. If there is one, on a single process, its factor is
                exactly 1.
            guess: A guess of the sum if it is unknown: a power of two, so that multiplying by it does not round; 0 if
                there is no guess yet.
        """
        self.total, self.planned = 0.0, planned
        self.losses = None if self.losses is None else []
        self._is_single_micro_batch = micro_batches == self._world == 1
        self._micro_batches, self._guess = micro_batches, guess or 1.0
        # Only fp16 needs sums in its range. With several processes a guess costs a collective, so others skip it.
        self.unseeded = not guess and not self.is_set_by_task and (self._world == 1 or self._in_gradients > 1)
        self._returned: bool | None = None
        self._sums: Callable[[], list[float]] | None = None
        self._wishes: list[bool] = []

    def seed_guess(self, number: int | None, returned: float | None = None) -> None:
        """Make the first guess from the step's first weight, equal on all processes. Collective.

        Args:
            number: Number in the step of this process's micro-batch; None if it has no loss.
            returned: The weight that the task returned for the micro-batch; None if it returned no weight.
        """
        answer = None if number is None else (number, returned)
        answers = [answer] if self._gather is None else self._gather(answer)
        if given := [each for each in answers if each is not None]:
            self.unseeded = False
            total = (min(given, key=itemgetter(0))[1] or 0.0) * self._micro_batches
            self._guess = _round_up_to_power_of_two(total) if 0.0 < total < math.inf else 1.0

    def get_loss_factor(self, known: float, returned: float | None) -> float:
        """Return the factor of a micro-batch's mean loss before its backward.

        Args:
            known: The weight known before the forward.
            returned: The weight that the task returned with its loss, which replaces a number of samples; or None.

        Raises:
            TrainingError: The weight is negative or not finite, or differs from that of `batch_weight`; or only some
                micro-batches of the step have a returned weight.
        """
        if self.is_set_by_task:
            if returned not in (None, known):
                raise TrainingError(
                    f"training_step returned the weight {returned} for a micro-batch to which batch_weight gave "
                    f"{known}. Make the two agree, or drop one."
                )
            returned = None  # The known weight is equal.
        if self._returned not in (None, returned is not None):
            raise _make_mixed_weights_error()
        weight = known if returned is None else returned
        if not 0.0 <= weight < math.inf:
            raise TrainingError(f"a micro-batch has the weight {weight}; a weight is a finite number >= 0.")
        if self._returned is None:
            self._returned = returned is not None
            if self._returned:
                self.planned = weight if self._is_single_micro_batch else self._guess
        self.total += weight
        return self._in_loss * weight / self.planned if self.planned else 0.0

    def use_guess(self) -> None:
        """Divide by the guess, because a step's single micro-batch is computed in parts of unknown weights."""
        self._is_single_micro_batch = False
        if self._returned:
            self.planned = self._guess

    def keep_loss(self, part: torch.Tensor) -> None:
        """Keep the contribution of a micro-batch to the step's loss, if a callback reads that loss."""
        if self.losses is not None:
            self.losses.append(part.detach())

    def drop_losses(self) -> None:
        """Keep no losses."""
        self.losses = None

    def make_restore_point(self) -> tuple[float, int]:
        """Return the present counts of this process, for `restore`."""
        return self.total, len(self.losses or ())

    def restore(self, mark: tuple[float, int]) -> None:
        """Restore the counts in `make_restore_point`, a result of the method of this name."""
        self.total, losses = mark
        if self.losses is not None:
            del self.losses[losses:]

    def start_sum(self, *wishes: bool) -> None:
        """Begin to sum the weights over the processes, when those of this process are known. Collective.

        Args:
            wishes: Flags of this process, which are reduced along with the weights.
        """
        self._wishes = list(wishes)
        if self._begin_sum is not None:
            told = self.total, self._returned is True, self._returned is False, *wishes
            self._sums = self._begin_sum(list(map(float, told)))

    def finish_sum(self) -> list[bool]:
        """Wait for the sums over the processes.

        Returns:
            A bool for each flag: True if some process has set the flag.

        Raises:
            TrainingError: `training_step` returned weights on some processes only.
        """
        if self._sums is None:
            return self._wishes
        (total, returned, plain, *wishes), self._sums = self._sums(), None
        self.total = total / self._copies
        if returned and plain:
            raise _make_mixed_weights_error()
        if returned or plain:
            self._returned = bool(returned)
        if self._returned:
            self.planned = self._guess  # This holds on a process without a weight too.
        return [wish > 0 for wish in wishes]

    @property
    def counts_units(self) -> bool:
        """True if the weights come from the user (tokens, boxes), False for numbers of samples."""
        return self.is_set_by_task or bool(self._returned)

    @property
    def correction(self) -> float:
        """Factor of the gradients after the last backward; 1.0 if they need no correction."""
        late = 1.0 if self.total in (0.0, self.planned) else self.planned / self.total
        return late * self._in_gradients

    def compute_mean_loss(self, part: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of the step over all processes, after `finish_sum`. Collective.

        Args:
            part: The sum of this process's weighted losses, as passed to backward: a scalar tensor.
            reduce: Function that sums a tensor over the processes.
        """
        processes = self._world * self._copies
        return (part if processes == 1 else reduce(part.double()) / processes) * self.correction

    @property
    def next_guess(self) -> float:
        """Guess for the next step, which keeps fp16 gradients in range: the next power of two above this step's total.

        The guess is at least half of this step's guess. So varying totals do not overflow whenever they rise.
        """
        if self.unseeded:
            return 0.0
        return (
            max(_round_up_to_power_of_two(self.total), self._guess / 2)
            if self._returned and self.total
            else self._guess
        )


def _round_up_to_power_of_two(number: float) -> float:
    """Return the smallest power of two that is at least `number`."""
    return 2.0 ** math.ceil(math.log2(number))


def _make_mixed_weights_error() -> TrainingError:
    return TrainingError(
        "training_step returned a weight for one micro-batch of a step and none for another. "
        "Return (loss, weight) always or never."
    )
