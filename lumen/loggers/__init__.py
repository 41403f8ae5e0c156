"""Loggers: where a run's record goes."""

from lumen.loggers.base import Logger
from lumen.loggers.csv import CSVLogger
from lumen.loggers.factory import as_loggers, with_own_record
from lumen.loggers.tensorboard import TensorBoardLogger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger", "as_loggers", "with_own_record"]
