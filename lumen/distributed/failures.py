"""Makes the error of one process the error of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lumen import errors
from lumen.errors import ProcessLost

T = TypeVar("T")
Failure = tuple[str, str]


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of a function and None, or None and the exception that it raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def failure_of(caught: Exception | None) -> Failure | None:
    """Class name and message of an exception, to be sent to other ranks: the exception itself may not be picklable."""
    return None if caught is None else (type(caught).__name__, str(caught))


def raise_first(failures: Sequence[Failure | None], caught: Exception | None) -> None:
    """Raise the error of the first rank that failed, if any; an error of Lumen's has the same class on every rank.

    Args:
        failures: What `failure_of` returned on each rank, in rank order.
        caught: The exception of this rank, or None.
    """
    for rank, failed in enumerate(failures):
        if failed is not None:
            mine = failure_of(caught)
            if caught is not None and (failed == mine or not (_is_ours(failed) or _is_ours(mine))):
                raise caught
            raise told(rank, failed) from caught


def _is_ours(failure: Failure | None) -> bool:
    return failure is not None and hasattr(errors, failure[0])


def told(rank: int, failed: Failure) -> Exception:
    """The error to raise here for one of another rank, of which only class name and message are known."""
    name, message = failed
    kind = getattr(errors, name, None)
    return kind(message) if kind else ProcessLost(f"rank {rank} failed: {name}: {message}")
