"""Functions for rank 0 only, called from code that runs on all ranks, also outside of runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, final

import torch.distributed as dist

from lumen.console import logger, print_values
from lumen.distributed.cluster_environment import find_cluster_process
from lumen.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


@final
class RankZeroOnly:
    """Decorator `@rank_zero_only`: only rank 0 calls the function; other ranks return None, or the default.

    The rank is looked up at each call, so that a function can be decorated before the processes start. Other ranks do
    not wait for rank 0. If other ranks need the result, call `trainer.strategy.barrier()` afterwards.

    Attributes:
        rank: Rank of this process in the run, from 0.
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
        """Rank of this process, from the process group or else from the environment."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else find_cluster_process().rank

    @rank.setter
    def rank(self, value: int) -> None:
        if value != self.rank:
            raise ConfigError(
                f"rank_zero_only.rank cannot be set to {value}: this process has rank {self.rank}. Remove the "
                "assignment."
            )


rank_zero_only = RankZeroOnly()


def rank_zero_info(message: Any, *args: Any, **options: Any) -> None:
    """Log a message on rank 0: within a run to Lumen's log and `run.log`; otherwise to the terminal.

    Args:
        message: A text with placeholders for `args`, such as %s, as in `logging`.
        args: Values for the placeholders of the text.
        options: Keyword arguments of `logging.Logger.info`.
    """
    if rank_zero_only.rank != 0:
        return
    has_handlers = any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    if has_handlers or logger.isEnabledFor(logging.INFO):
        logger.info(message, *args, **options)
    else:
        print_values(str(message) % args if args else message)


def rank_zero_debug(message: Any, *args: Any, **options: Any) -> None:
    """Log a message on rank 0 at level DEBUG, which `Trainer(log_level="DEBUG")` shows."""
    if rank_zero_only.rank == 0:
        logger.debug(message, *args, **options)


def rank_zero_warn(message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn on rank 0, as `warnings.warn` does.

    Args:
        message: The text of the warning, or the warning itself.
        category: Class of the warning.
        stacklevel: Number of stack frames up to the line that the warning names; 2: the caller's line.
    """
    if rank_zero_only.rank == 0:
        warnings.warn(message, category, stacklevel=stacklevel)
