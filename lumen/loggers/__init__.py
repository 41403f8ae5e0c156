"""Loggers: where a run's numbers go."""

from lumen.loggers.base import Logger
from lumen.loggers.csv import CSVLogger

__all__ = ["CSVLogger", "Logger"]
