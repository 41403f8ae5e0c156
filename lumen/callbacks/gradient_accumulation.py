"""Steps that grow, or shrink, from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import final

from lumen.callbacks.base import Callback
from lumen.errors import ConfigError
from lumen.errors.arguments import checked
from lumen.run.plan import Plan, accumulation, by_epoch

_NAME = "GradientAccumulationScheduler: scheduling"


@final
class GradientAccumulationScheduler(Callback):
    """Says of how many micro-batches the optimizer steps of each epoch are: `Trainer(accumulate_grad_batches=...)`.

    Args:
        scheduling: Micro-batches of a step in each process, by the epoch from which on there are so many, counted from
            0: `{0: 1, 4: 8}`. Before the first epoch that is named it is one.

    Raises:
        ConfigError: An epoch is negative, a number less than 1, or there is none.
    """

    @checked
    def __init__(self, scheduling: dict[int, int]) -> None:
        accumulation(_NAME, scheduling)
        self.scheduling = scheduling


def scheduled(plan: Plan, callbacks: Iterable[Callback], replaced: Iterable[Callback] = ()) -> Plan:
    """The plan with the steps that a callback asks for.

    Args:
        plan: What the run does when, by the trainer's arguments.
        callbacks: All that take part.
        replaced: Those in whose place others have come, whose steps the plan may have.

    Raises:
        ConfigError: Two say how large a step is: the trainer's arguments and a callback, or two callbacks.
    """
    given = [each.scheduling for each in callbacks if isinstance(each, GradientAccumulationScheduler)]
    if not given:
        return plan
    if any(isinstance(each, GradientAccumulationScheduler) for each in replaced):
        plan = replace(plan, accumulate={0: 1})
    if len(given) > 1:
        raise ConfigError("callbacks: there are two GradientAccumulationSchedulers. Leave one out.")
    accumulate = accumulation(_NAME, given[0])
    if plan.global_batch_size is not None:
        raise ConfigError(
            f"global_batch_size: {plan.global_batch_size} and GradientAccumulationScheduler({given[0]}) both say how "
            "large a step is. Leave one out."
        )
    if plan.accumulate not in ({0: 1}, accumulate):
        raise ConfigError(
            f"accumulate_grad_batches: {by_epoch(plan.accumulate)} and GradientAccumulationScheduler({given[0]}) both "
            "say how large a step is. Leave one out."
        )
    return replace(plan, accumulate=accumulate)
