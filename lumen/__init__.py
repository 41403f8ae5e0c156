"""Lumen: a training library for PyTorch that never changes what is computed."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if "LUMEN_LAUNCHER" in os.environ:  # from here on the launcher shows what ends this process
    import_module("lumen.distributed.worker").attach()

if TYPE_CHECKING:
    from lumen.callbacks import (
        EMA,
        SWA,
        BackboneFinetuning,
        BaseFinetuning,
        BasePredictionWriter,
        Callback,
        EarlyStopping,
        LambdaCallback,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelSummary,
        OnExceptionCheckpoint,
        PredictionWriter,
        ProgressBar,
        SpikeDetection,
        ThroughputMonitor,
        Timer,
    )
    from lumen.checkpoint import Weights
    from lumen.cli.command_line import CLI
    from lumen.data.combined import CombinedLoader
    from lumen.errors import LumenError
    from lumen.loggers import CSVLogger, Logger, TensorBoardLogger
    from lumen.precision import Precision
    from lumen.profilers import Profiler, SimpleProfiler, TorchProfiler
    from lumen.random import seed_everything
    from lumen.strategies import SingleDevice, Strategy
    from lumen.strategies.ddp import DDP
    from lumen.strategies.fsdp import FSDP
    from lumen.task.data_module import DataModule
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer
    from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder, Tuner

_HOME = {
    "BackboneFinetuning": "lumen.callbacks",
    "BaseFinetuning": "lumen.callbacks",
    "BasePredictionWriter": "lumen.callbacks",
    "BatchSizeFinder": "lumen.trainer.tuner",
    "CLI": "lumen.cli.command_line",
    "CSVLogger": "lumen.loggers",
    "Callback": "lumen.callbacks",
    "CombinedLoader": "lumen.data.combined",
    "DDP": "lumen.strategies.ddp",
    "DataModule": "lumen.task.data_module",
    "EMA": "lumen.callbacks",
    "SWA": "lumen.callbacks",
    "EarlyStopping": "lumen.callbacks",
    "FSDP": "lumen.strategies.fsdp",
    "LambdaCallback": "lumen.callbacks",
    "LearningRateFinder": "lumen.trainer.tuner",
    "LearningRateMonitor": "lumen.callbacks",
    "Logger": "lumen.loggers",
    "LumenError": "lumen.errors",
    "ModelCheckpoint": "lumen.callbacks",
    "ModelSummary": "lumen.callbacks",
    "OnExceptionCheckpoint": "lumen.callbacks",
    "Precision": "lumen.precision",
    "PredictionWriter": "lumen.callbacks",
    "Profiler": "lumen.profilers",
    "ProgressBar": "lumen.callbacks",
    "SimpleProfiler": "lumen.profilers",
    "SingleDevice": "lumen.strategies",
    "SpikeDetection": "lumen.callbacks",
    "Strategy": "lumen.strategies",
    "TaskModule": "lumen.task.task_module",
    "TensorBoardLogger": "lumen.loggers",
    "ThroughputMonitor": "lumen.callbacks",
    "Timer": "lumen.callbacks",
    "TorchProfiler": "lumen.profilers",
    "Trainer": "lumen.trainer.trainer",
    "Tuner": "lumen.trainer.tuner",
    "Weights": "lumen.checkpoint",
    "seed_everything": "lumen.random",
}
__all__ = [
    "CLI",
    "DDP",
    "EMA",
    "FSDP",
    "SWA",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "CSVLogger",
    "Callback",
    "CombinedLoader",
    "DataModule",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "Logger",
    "LumenError",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "Precision",
    "PredictionWriter",
    "Profiler",
    "ProgressBar",
    "SimpleProfiler",
    "SingleDevice",
    "SpikeDetection",
    "Strategy",
    "TaskModule",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TorchProfiler",
    "Trainer",
    "Tuner",
    "Weights",
    "seed_everything",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `lumen --help` need not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'lumen' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
