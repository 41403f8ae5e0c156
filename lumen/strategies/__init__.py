"""Strategies: where the task lies and how processes agree."""

from lumen.strategies.base import Strategy
from lumen.strategies.single import SingleDevice, make_strategy

__all__ = ["SingleDevice", "Strategy", "make_strategy"]
