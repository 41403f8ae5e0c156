"""Strategies: where the task lies and how processes agree."""

from lumen.strategies.base import Strategy
from lumen.strategies.choice import make_strategy
from lumen.strategies.single import SingleDevice

__all__ = ["SingleDevice", "Strategy", "make_strategy"]
