"""Number of micro-batches per step that changes from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.run.plan import Plan, format_by_epoch, parse_accumulation

_NAME = "GradientAccumulationScheduler: scheduling"


@final
class GradientAccumulationScheduler(Callback):
    """Callback that sets `accumulate_grad_batches` of the trainer by epoch.

    Args:
        scheduling: Micro-batches per step in each process, by the first epoch (from 0) in which the number applies:
            `{0: 1, 4: 8}`. The number is 1 before the first listed epoch.

    Raises:
        ConfigError: An epoch is negative, a number is less than 1, or the dictionary is empty.
    """

    @check_arguments
    def __init__(self, scheduling: dict[int, int]) -> None:
        parse_accumulation(_NAME, scheduling)
        self.scheduling = scheduling


def apply_accumulation_schedule(
    plan: Plan, callbacks: Iterable[Callback], replaced: Iterable[Callback] | None = None
) -> Plan:
    """Return the plan with the accumulation of a `GradientAccumulationScheduler`, if there is one.

    Args:
        plan: The run's plan according to the trainer's arguments.
        callbacks: All callbacks of the run.
        replaced: Replaced callbacks, if the plan may already have the accumulation of a callback; None: it has not.

    Raises:
        ConfigError: Two sources set the size of a step: the trainer's arguments and a callback, or two callbacks.
    """
    schedules = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if not schedules:
        return plan
    if any(isinstance(each, GradientAccumulationScheduler) for each in replaced or ()):
        plan = replace(plan, accumulate={0: 1})
    if len(schedules) > 1:
        raise ConfigError("callbacks: there are two GradientAccumulationSchedulers. Remove one of the two.")
    accumulate = parse_accumulation(_NAME, schedules[0])
    if plan.global_batch_size is not None:
        raise ConfigError(
            f"global_batch_size: {plan.global_batch_size} and GradientAccumulationScheduler({schedules[0]}) both set "
            "the size of a step. Remove one of the two."
        )
    if plan.accumulate != {0: 1} and (replaced is None or plan.accumulate != accumulate):
        raise ConfigError(
            f"accumulate_grad_batches: {format_by_epoch(plan.accumulate)} and "
            f"GradientAccumulationScheduler({schedules[0]}) both set the size of a step. Remove one of the two."
        )
    return replace(plan, accumulate=accumulate)
