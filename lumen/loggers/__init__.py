"""Loggers: where a run's record goes."""

from lumen.loggers.aim import AimLogger as AimLogger
from lumen.loggers.base import Logger as Logger
from lumen.loggers.csv import CSVLogger as CSVLogger
from lumen.loggers.factory import (
    LoggerName as LoggerName,
    as_loggers as as_loggers,
    takes_epoch as takes_epoch,
    with_own_record as with_own_record,
)
from lumen.loggers.mlflow import MLFlowLogger as MLFlowLogger
from lumen.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from lumen.loggers.wandb import WandbLogger as WandbLogger
