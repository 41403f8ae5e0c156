"""How an error on one process becomes the error of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lumen import errors
from lumen.errors import ProcessLost

T = TypeVar("T")
Failure = tuple[str, str]


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a function returns, or the error that it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def failure_of(caught: Exception | None) -> Failure | None:
    """Name and message of an error, for others: what was raised may not travel."""
    return None if caught is None else (type(caught).__name__, str(caught))


def raise_first(failures: Sequence[Failure | None], caught: Exception | None) -> None:
    """Raise the error of the first rank that failed, the same on every rank if it is one of Lumen's.

    Args:
        failures: Of the ranks, in their order.
        caught: This rank's own error.
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
    """The error of a rank, of which the name and the message are known."""
    name, message = failed
    kind = getattr(errors, name, None)
    return kind(message) if kind else ProcessLost(f"rank {rank} failed: {name}: {message}")
