"""After which steps of a run something happens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, final

from lumen.callbacks import ModelCheckpoint
from lumen.run.plan import EpochLengths, Plan


@final
class Course(NamedTuple):
    """How long a run is.

    Attributes:
        steps: All of them; None: nobody knows before its end.
        per_epoch: Of the first epoch; None: likewise.
        lengths: The steps of each epoch.
        done: Steps that were made before it goes on.
    """

    steps: int | None
    per_epoch: int | None
    lengths: EpochLengths | None
    done: int

    @property
    def epochs(self) -> float | None:
        """Epochs, the last one perhaps not whole."""
        return self.steps / self.per_epoch if self.steps and self.per_epoch else None

    def epoch_ends(self, every: int = 1) -> Sequence[int]:
        """The last steps of every so-manieth epoch, of those that end before the run does and are still to come."""
        lengths, length = self.lengths, self.per_epoch
        if lengths is None or not self.steps or not length:
            return []
        first, last = lengths.whole_epochs(self.done), lengths.whole_epochs(self.steps)
        epochs = range(first - first % every + every, last + 1, every)
        if lengths.until(last) == last * length:  # as many steps in each; there may be very many of them
            return range(epochs.start * length, epochs.stop * length, every * length)
        return [lengths.until(epoch) for epoch in epochs]


def validation_steps(plan: Plan, course: Course) -> Sequence[int] | None:
    """The steps after which there is a validation, of those to come; None: that is not known before."""
    if course.steps is None or plan.val_every_s is not None:
        return None
    if plan.val_every_n_steps is not None:
        found = _multiples(plan.val_every_n_steps, course)
        nth = plan.val_every_n_epochs
        if nth == 1:
            return found
        lengths = course.lengths
        return None if lengths is None else [at for at in found if (lengths.whole_epochs(at - 1) + 1) % nth == 0]
    if plan.val_every_epoch_fraction is None or course.lengths is None or not course.per_epoch:
        return None
    if plan.val_every_epoch_fraction == 1.0:
        return course.epoch_ends(plan.val_every_n_epochs)
    return _in_fractions(plan, course.steps, course.done, course.lengths)


def _in_fractions(plan: Plan, steps: int, done: int, lengths: EpochLengths) -> list[int]:
    fraction, found, epoch = plan.val_every_epoch_fraction or 1.0, list[int](), lengths.whole_epochs(done)
    while (begin := lengths.until(epoch)) < steps:
        for part in range(1, int(1 / fraction + 1e-9) + 1 if (epoch + 1) % plan.val_every_n_epochs == 0 else 0):
            at = begin + math.ceil(part * fraction * lengths.of(epoch) - 1e-9)
            if done < at <= steps and at not in found[-1:]:
                found.append(at)
        epoch += 1
    return found


def saving_steps(saver: ModelCheckpoint, course: Course) -> Sequence[int]:
    """The steps after which a checkpoint is sure to be saved, of those to come: not those of clocks and new bests."""
    if course.steps is None:
        return []
    by_steps: Sequence[int] = _multiples(saver.every_n_train_steps, course) if saver.every_n_train_steps else []
    by_epochs = course.epoch_ends(saver.every_n_epochs) if saver.every_n_epochs else []
    at_end = [course.steps] if saver.at_end else []
    alone = by_steps if not by_epochs else by_epochs if not by_steps else None
    if alone is not None and (not at_end or course.steps in alone):
        return alone  # which may be many
    return sorted({*by_steps, *by_epochs, *at_end})


def strip(moments: Sequence[int], course: Course, width: int) -> str:
    """A line as long as the run, with a mark where something happens.

    Args:
        moments: Steps, in their order.
        course: The run, whose length is known.
        width: Characters of the line.
    """
    ahead = (course.steps or 0) - course.done
    bounds = [course.done + ahead * place // width for place in range(width + 1)]
    counts = [bisect_right(moments, bound) for bound in bounds]
    return "".join("╵" if after > before else "·" for before, after in pairwise(counts))


def _multiples(every: int, course: Course) -> range:
    return range(course.done - course.done % every + every, (course.steps or 0) + 1, every)
