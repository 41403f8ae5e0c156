"""Weights of the losses in one optimizer step.

The gradient of a step is (sum over micro-batches of weight * grad(mean loss)) / (sum of weights). This is the gradient
of the full batch for any micro-batch size and number of processes. Each backward gets `loss * (weight / planned)`,
times the number of processes, because DDP and FSDP average gradients. If the sum of weights is known before the
forward, `planned` is that sum. Otherwise `planned` is a guess, and Lumen multiplies the gradients by `planned / total`
once, after the last backward.

Example: two ranks have one micro-batch each, with means over 30 and 10 tokens, and the guess is 32. The ranks call
backward on `loss * 2 * 30 / 32` and `loss * 2 * 10 / 32`. DDP averages both gradients, so that the factors of the two
means become 30 / 32 and 10 / 32. The correction 32 / 40 turns these factors into 30 / 40 and 10 / 40: the factors of
the mean over all 40 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import final

import torch

from lumen.errors import TrainingError

#: Number of a micro-batch in the step and its returned weight, if any; None from a process without a loss.
FirstWeight = tuple[int, float | None] | None
#: Function that begins to sum numbers over the processes, and returns a function that waits for the sums.
StartSum = Callable[[Sequence[float]], Callable[[], list[float]]]


@final
class LossWeighting:
    """Weights of the micro-batches of the optimizer step in progress.

    Args:
        is_set_by_task: True if the task has `batch_weight`; see the attribute.
        data_world_size: Number of data ranks, over which gradients are averaged unless `exact_rank` is given.
        processes_per_data_rank: Number of processes of each data rank, which compute the same micro-batches.
        context_size: Number of data ranks that share the samples of a micro-batch, each with a part of the sequences.
        uses_scaler: True under a gradient scaler. Then gradients are multiplied by the number of processes, instead of
            the loss, so that overflows do not depend on this number.
        start_sum: Function that begins to sum numbers over the processes. It returns a function that waits for the
            sums. None for a single process.
        gather: Function that returns the first weights of all processes; None for a single process.
        keeps_losses: True if a callback reads the loss of a step.
        exact_rank: The data rank of this process if gradients are summed in the order of micro-batches: then all values
            are bitwise identical on any number of processes. None if gradients are averaged.

    Attributes:
        is_set_by_task: True if the known weights come from the task's `batch_weight`, False if they are numbers of
            samples. A weight that `training_step` returns must equal that of `batch_weight`.
        has_returned_weights: True if `training_step` returned weights in this step; None before the first loss.
        planned: The sum of weights that the losses of the step are divided by: the true sum, or a guess.
        losses: Detached contributions of this process's micro-batches to the step's loss; None if no callback reads it.
        needs_guess: True if `set_first_guess` must make the guess from the first weight.
        total: The sum of the weights over all data ranks, after `finish_sum`; 0.0 before.
    """

    def __init__(
        self,
        *,
        is_set_by_task: bool,
        data_world_size: int = 1,
        processes_per_data_rank: int = 1,
        context_size: int = 1,
        uses_scaler: bool = False,
        start_sum: StartSum | None = None,
        gather: Callable[[FirstWeight], list[FirstWeight]] | None = None,
        keeps_losses: bool = False,
        exact_rank: int | None = None,
    ) -> None:
        self.losses: list[torch.Tensor] | None = [] if keeps_losses else None
        self.is_set_by_task = is_set_by_task
        # DDP and FSDP average gradients over the processes, but a step needs their sum. Multiplying the loss by the
        # number of processes costs nothing. Under fp16 a loss so enlarged could overflow, so the gradients are
        # multiplied instead.
        self._averaged = 1 if exact_rank is not None else data_world_size
        self._loss_multiplier, self._gradient_multiplier = (1, self._averaged) if uses_scaler else (self._averaged, 1)
        self._exact_rank = exact_rank
        self._guesses_first = uses_scaler or (exact_rank is None and data_world_size == 1)
        self._start_sum, self._gather = start_sum, gather
        self._data_world_size, self._processes_per_data_rank = data_world_size, processes_per_data_rank
        self._context_size = context_size
        self.begin_step(0.0, 0, 1.0)

    def begin_step(self, planned: float, micro_batches: int, guess: float) -> None:
        """Begin a step.

        Args:
            planned: The sum of the weights that are known before the forward, over all processes.
            micro_batches: Number of micro-batches of all data ranks. If there is one, and gradients are not averaged,
                its factor is exactly 1.
            guess: A guess of the sum if it is unknown: a power of two, so that multiplying by it does not round; 0 if
                there is no guess yet.
        """
        self.total, self.planned = 0.0, planned
        self.losses = None if self.losses is None else []
        self._weights: list[float] = []  # of this process's micro-batches
        self._is_single_micro_batch = micro_batches == 1 and self._averaged == 1
        self._micro_batches, self._guess = micro_batches, guess or 1.0
        # Only fp16 needs a guess of the right magnitude, to keep gradients in its range. In other precisions 1.0 is as
        # good. There a single process makes the guess, because that is free; several processes skip its collective.
        self.needs_guess = not guess and not self.is_set_by_task and self._guesses_first
        self.has_returned_weights: bool | None = None  # None until the first loss of the step
        self._sums: Callable[[], list[float]] | None = None  # waits for the sums over the processes
        self._flags: list[bool] = []

    def set_first_guess(self, number: int | None, returned_weight: float | None = None) -> None:
        """Make the first guess from the step's first weight, equal on all processes. Collective.

        Args:
            number: Number in the step of this process's micro-batch; None if it has no loss.
            returned_weight: The weight that the task returned for the micro-batch; None if it returned no weight.
        """
        first = None if number is None else (number, returned_weight)
        of_all = [first] if self._gather is None else self._gather(first)
        if weights := [each for each in of_all if each is not None]:
            self.needs_guess = False
            # The earliest micro-batch of the step decides, so the guess does not depend on the number of processes.
            # Processes that share its sequences have a part of its weight each.
            earliest = min(number for number, _ in weights)
            total = sum(weight or 0.0 for number, weight in weights if number == earliest) * self._micro_batches
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
                    f"{known}. Return equal weights from both methods, or remove one of them."
                )
            returned = None  # The known weight is equal.
        if self.has_returned_weights not in (None, returned is not None):
            raise _make_mixed_weights_error()
        if not self.is_set_by_task:  # The number of samples, which counts once for all their parts.
            known /= self._context_size
        weight = known if returned is None else returned
        if not 0.0 <= weight < math.inf:
            raise TrainingError(f"a micro-batch has the weight {weight}; a weight is a finite number >= 0.")
        if self.has_returned_weights is None:
            self.has_returned_weights = returned is not None
            if self.has_returned_weights:
                # The sum of returned weights is unknown until the last forward, except for a single micro-batch.
                self.planned = weight if self._is_single_micro_batch else self._guess
        self._weights.append(weight)
        # `planned` is 0 only if all known weights are 0: then the step makes no update.
        return self._loss_multiplier * weight / self.planned if self.planned else 0.0

    def use_guess(self) -> None:
        """Divide by the guess, because a step's single micro-batch is computed in parts of unknown weights."""
        self._is_single_micro_batch = False
        if self.has_returned_weights:
            self.planned = self._guess

    def keep_loss(self, part: torch.Tensor) -> None:
        """Keep the contribution of a micro-batch to the step's loss, for a callback that reads that loss."""
        assert self.losses is not None
        self.losses.append(part.detach())

    def copy_without_losses(self) -> LossWeighting:
        """Return a copy for a repeated evaluation of the step, before any loss was counted."""
        weighting = copy(self)
        weighting.losses, weighting._weights = None, []
        return weighting

    def make_restore_point(self) -> tuple[int, int]:
        """Return the present counts of this process, for `restore`."""
        return len(self._weights), len(self.losses or ())

    def restore(self, restore_point: tuple[int, int]) -> None:
        """Restore the counts that `make_restore_point` returned."""
        for held, count in zip((self._weights, self.losses or []), restore_point, strict=True):
            del held[count:]  # type: ignore[attr-defined]

    def start_sum(self, *flags: bool) -> None:
        """Begin to sum the weights over the processes, once all weights of this process are known. Collective.

        Args:
            *flags: Flags of this process, which are reduced along with the weights.
        """
        self._flags = list(flags)
        if self._start_sum is not None:
            # A flag travels as 0.0 or 1.0, so its sum is the number of processes that have set it.
            numbers = self.has_returned_weights is True, self.has_returned_weights is False, *flags
            self._sums = self._start_sum([*map(float, numbers), *self.spread(self._weights, self._micro_batches)])

    def spread(self, numbers: list[float], micro_batches: int) -> list[float]:
        """Return numbers to sum over the processes: `math.fsum` adds the results to the sum of all numbers.

        Args:
            numbers: The numbers of this process, such as its weights in the step.
            micro_batches: Number of micro-batches of all processes in the step.
        """
        if self._exact_rank is None:
            return [float(sum(numbers))]
        # Each number has a place of its own, where the other processes have 0. The exact sum is rounded once.
        rounds = -(-micro_batches // self._data_world_size)
        places = [0.0] * (rounds * self._data_world_size)
        places[self._exact_rank * rounds : self._exact_rank * rounds + len(numbers)] = numbers
        return places

    def finish_sum(self) -> list[bool]:
        """Wait for the sums over the processes.

        Returns:
            A bool for each flag: True if some process has set the flag.

        Raises:
            TrainingError: `training_step` returned weights on some processes only.
        """
        if self._sums is None:
            is_exact = self._exact_rank is not None
            self.total = math.fsum(self._weights) if is_exact else float(sum(self._weights))
            return self._flags
        (with_weight, without_weight, *rest), self._sums = self._sums(), None
        flags, weights = rest[: len(self._flags)], rest[len(self._flags) :]
        # All processes of a data rank have added the same weights.
        self.total = math.fsum(weights) / self._processes_per_data_rank
        if with_weight and without_weight:
            raise _make_mixed_weights_error()
        if with_weight or without_weight:
            self.has_returned_weights = bool(with_weight)
        if self.has_returned_weights:
            # A process without a loss learns only here that the other processes have divided by the guess.
            self.planned = self.total if self._is_single_micro_batch else self._guess
        return [flag > 0 for flag in flags]

    @property
    def counts_units(self) -> bool:
        """True if the weights come from the user (tokens, boxes), False for numbers of samples."""
        return self.is_set_by_task or bool(self.has_returned_weights)

    @property
    def correction(self) -> float:
        """Factor of the gradients after the last backward; 1.0 if they need no correction."""
        factor = 1.0 if self.total in (0.0, self.planned) else self.planned / self.total
        return factor * self._gradient_multiplier

    def compute_mean_loss(
        self, parts: Iterable[torch.Tensor | None], reduce: Callable[[list[float]], list[float]]
    ) -> torch.Tensor:
        """Return the mean loss of the step over all processes, after `finish_sum`. Collective.

        Args:
            parts: This process's weighted losses, as passed to backward: scalar tensors, or None for no loss.
            reduce: Function that sums numbers over the processes.

        Returns:
            A scalar tensor in float64 on the host. Waits for the device.
        """
        losses = [float(part.detach()) for part in parts if part is not None]
        values = reduce(self.spread(losses, self._micro_batches))
        total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
        # The loss on each process has the factor that its gradient has, so it needs the same average and correction.
        total /= self._processes_per_data_rank * self._averaged
        return torch.tensor(total * self.correction, dtype=torch.float64)

    @property
    def next_guess(self) -> float:
        """Guess for the next step, which keeps fp16 gradients in range: the next power of two above this step's total.

        The guess is at least half of this step's guess. So varying totals do not overflow whenever they rise.
        """
        if self.needs_guess:
            return 0.0
        return (
            max(_round_up_to_power_of_two(self.total), self._guess / 2)
            if self.has_returned_weights and self.total
            else self._guess
        )


def _round_up_to_power_of_two(number: float) -> float:
    """Return the smallest power of two that is at least `number`."""
    return 2.0 ** math.ceil(math.log2(number))


def _make_mixed_weights_error() -> TrainingError:
    return TrainingError(
        "training_step returned a weight for one micro-batch of a step, and no weight for another micro-batch. "
        "Return (loss, weight) always or never."
    )
