"""Loggers: where a run's record goes."""

from lumen.loggers.aim import AimLogger
from lumen.loggers.base import Logger
from lumen.loggers.csv import CSVLogger
from lumen.loggers.factory import LoggerName, as_loggers, takes_epoch, with_own_record
from lumen.loggers.mlflow import MLFlowLogger
from lumen.loggers.tensorboard import TensorBoardLogger
from lumen.loggers.wandb import WandbLogger

__all__ = [
    "AimLogger",
    "CSVLogger",
    "Logger",
    "LoggerName",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "as_loggers",
    "takes_epoch",
    "with_own_record",
]
