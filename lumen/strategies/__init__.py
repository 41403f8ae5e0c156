"""Strategies: on which devices the task lies, and how its processes communicate."""

from lumen.strategies.factory import make_strategy
from lumen.strategies.single import SingleDevice
from lumen.strategies.strategy import Strategy, by_data_rank, check_data_ranks, gather_values, sync_buffers

__all__ = [
    "SingleDevice", "Strategy", "by_data_rank", "check_data_ranks", "gather_values", "make_strategy", "sync_buffers",
]  # fmt: skip
