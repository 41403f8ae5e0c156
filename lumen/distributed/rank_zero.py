"""What only the first process does: for code that runs on all of them, also before and beside runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, final

import torch.distributed as dist

from lumen.console import logger, print_values
from lumen.distributed.cluster_environment import find
from lumen.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


@final
class RankZeroOnly:
    """`@rank_zero_only`: a function that only the first process runs; elsewhere it returns None, or the default.

    Which process this is is looked up at each call, so a function may be decorated before anything has started. Nothing
    waits: where the others need what it did, call `trainer.strategy.barrier()` after it.

    Attributes:
        rank: Number of this process in the run, from 0.
    """

    __name__ = "rank_zero_only"

    def __call__(self, function: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
        """Decorate a function."""

        @wraps(function)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero

    @property
    def rank(self) -> int:
        """Number of this process, as a process group or else the environment tells."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else find().rank

    @rank.setter
    def rank(self, value: int) -> None:
        if value != self.rank:
            raise ConfigError(
                f"rank_zero_only.rank cannot be set to {value}: this is process {self.rank}, as it found."
            )


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: Any, *args: Any, **options: Any) -> None:
    """Say something once: within a run where Lumen's own messages go, `run.log` too; elsewhere in the terminal.

    Args:
        message: A text, in which `args` take the place of %s and the like, as in `logging`.
        args: Values that take the places in the text.
        options: Keyword arguments of `logging.Logger.info`.
    """
    if rank_zero_only.rank != 0:
        return
    listened = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    if listened or logger.isEnabledFor(logging.INFO):
        logger.info(message, *args, **options)
    else:
        print_values(str(message) % args if args else message)


def rank_zero_debug(message: Any, *args: Any, **options: Any) -> None:
    """The same at level DEBUG, which is seen with `Trainer(log_level="DEBUG")`."""
    if rank_zero_only.rank == 0:
        logger.debug(message, *args, **options)


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn once, as `warnings.warn`.

    Args:
        message: The text of the warning, or the warning itself.
        category: Kind of the warning.
        stacklevel: Whose line the warning names; 2: the caller's.
    """
    if rank_zero_only.rank == 0:
        warnings.warn(message, category, stacklevel=stacklevel)
