"""Loggers: records of a run's metrics, hyperparameters, images and text."""

from lumen.loggers.base import Logger as Logger
from lumen.loggers.csv import CSVLogger as CSVLogger
from lumen.loggers.factory import (
    DEFAULT_ROOT as DEFAULT_ROOT,
    LoggerName as LoggerName,
    add_csv_logger as add_csv_logger,
    as_loggers as as_loggers,
    choose_place as choose_place,
    takes_epoch as takes_epoch,
)
