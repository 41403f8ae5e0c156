"""What a step is called with: those of its batch, its number and its loader's that its signature has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import takewhile
from operator import itemgetter
from typing import Any, Self, final

from lumen.errors import ConfigError, TrainingError
from lumen.task.hooks import NOT_CALLED

#: Arguments of a step that Lightning 1 gave it, with what to write instead.
NOT_GIVEN: Mapping[str, str] = {
    "optimizer_idx": "A step is called once for all optimizers: with several set automatic_optimization = False and "
    "take them from self.optimizers(); several that step together are one lumen.optim.MultiOptimizer.",
    "hiddens": NOT_CALLED["task"]["tbptt_split_batch"],
}


def step_arguments(
    step: Callable[..., Any], *, several: bool = False
) -> Callable[[tuple[Any, int, int]], tuple[Any, ...]]:
    """A function that picks from (batch, batch_idx, dataloader_idx) the arguments that a step's signature asks for.

    Args:
        step: The task's method; a decorator that keeps its signature (`functools.wraps`) is looked through.
        several: Several loaders are read one after the other. Only then `*args`, or a third argument with a default and
            another name than `dataloader_idx`, gets the loader's index.

    Raises:
        ConfigError: The signature asks for anything else.
    """
    names = ("batch", "batch_idx", "dataloader_idx")
    if "dataloader_iter" in (taken := list(inspect.signature(step).parameters)):
        if len(taken) > 1:
            raise ConfigError(f"{step.__qualname__}{inspect.signature(step)}: dataloader_iter is given alone.")
        return lambda given: (OneBatch(given),)
    parameters = list(inspect.signature(step).parameters.values())
    if gone := [parameter.name for parameter in parameters if parameter.name in NOT_GIVEN]:
        raise ConfigError(
            f"{getattr(step, '__qualname__', step)}{inspect.signature(step)}: {gone[0]} is not given. "
            f"{NOT_GIVEN[gone[0]]}"
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = max(sum(p.default is p.empty for p in positional), 3 if several else 2)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        chosen = list(range(given))
    else:
        asked = takewhile(lambda each: each[0] < given or each[1].name in names, enumerate(positional))
        chosen = [names.index(p.name) if p.name in names[1:] else place for place, p in asked]
    if not chosen or max(chosen) > 2 or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ConfigError(
            f"{getattr(step, '__qualname__', step)}{inspect.signature(step)}: a step takes (batch), (batch, batch_idx) "
            "or (batch, batch_idx, dataloader_idx); or (dataloader_iter) alone."
        )
    first = chosen[0]
    follow_each_other = chosen == list(range(first, first + len(chosen)))
    return itemgetter(slice(first, first + len(chosen))) if follow_each_other else itemgetter(*chosen)


@final
class OneBatch:
    """What a step that asks for a `dataloader_iter` is given: it iterates over its one batch.

    Args:
        given: The batch on the device, its number, and that of its loader.
    """

    def __init__(self, given: tuple[Any, int, int]) -> None:
        self._given: tuple[Any, int, int] | None = given

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        """The batch, its number, and that of its loader.

        Raises:
            TrainingError: It was asked for once more.
        """
        given, self._given = self._given, None
        if given is None:
            raise TrainingError(
                "a step took two batches of its dataloader_iter, but each call has one. Take several together by "
                "accumulate_grad_batches, or give the loader larger batches."
            )
        return given
