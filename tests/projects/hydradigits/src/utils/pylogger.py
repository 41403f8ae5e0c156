import logging
from typing import Any
from collections.abc import Mapping

from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_only


class RankedLogger(logging.LoggerAdapter):
    """Logger whose messages begin with the rank."""

    def __init__(
        self, name: str = __name__, rank_zero_only: bool = False, extra: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(logger=logging.getLogger(name), extra=extra)
        self.rank_zero_only = rank_zero_only

    def log(self, level: int, msg: str, *args: Any, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        msg, kwargs = self.process(msg, kwargs)
        current_rank = getattr(rank_zero_only, "rank", None)
        if current_rank is None:
            raise RuntimeError("The `rank_zero_only.rank` needs to be set before use")
        if current_rank == 0 or not self.rank_zero_only:
            self.logger.log(level, rank_prefixed_message(msg, current_rank), *args, **kwargs)
