"""Lumen: a training library for PyTorch that never changes what is computed."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
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
        DeviceStatsMonitor,
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        PredictionWriter,
        ProgressBar,
        RayTrainReportCallback,
        Report,
        SpikeDetection,
        ThroughputMonitor,
        Timer,
    )
    from lumen.callbacks.model_summary import summarize
    from lumen.checkpoint import Weights
    from lumen.cli.command_line import CLI
    from lumen.cli.runs.records import runs
    from lumen.data.combined import CombinedLoader
    from lumen.data.nested import move_data_to_device
    from lumen.distributed.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_only, rank_zero_warn
    from lumen.errors import LumenError
    from lumen.loggers import AimLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from lumen.precision import Precision
    from lumen.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, SimpleProfiler, TorchProfiler
    from lumen.random import isolate_rng, seed_everything
    from lumen.run.goodput import goodput
    from lumen.run.gradients import grad_norm
    from lumen.strategies import SingleDevice, Strategy
    from lumen.strategies.ddp import DDP
    from lumen.strategies.fsdp import FSDP
    from lumen.task.data_module import DataModule
    from lumen.task.task_module import TaskModule
    from lumen.task.teacher import Teacher
    from lumen.trainer.trainer import Trainer
    from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder, Tuner

_HOME = {
    "AdvancedProfiler": "lumen.profilers",
    "AimLogger": "lumen.loggers",
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
    "DeviceStatsMonitor": "lumen.callbacks",
    "EMA": "lumen.callbacks",
    "EarlyStopping": "lumen.callbacks",
    "FSDP": "lumen.strategies.fsdp",
    "GradientAccumulationScheduler": "lumen.callbacks",
    "LambdaCallback": "lumen.callbacks",
    "LearningRateFinder": "lumen.trainer.tuner",
    "LearningRateMonitor": "lumen.callbacks",
    "Logger": "lumen.loggers",
    "LumenError": "lumen.errors",
    "MLFlowLogger": "lumen.loggers",
    "ModelCheckpoint": "lumen.callbacks",
    "ModelPruning": "lumen.callbacks",
    "ModelSummary": "lumen.callbacks",
    "OnExceptionCheckpoint": "lumen.callbacks",
    "PassThroughProfiler": "lumen.profilers",
    "Precision": "lumen.precision",
    "PredictionWriter": "lumen.callbacks",
    "Profiler": "lumen.profilers",
    "ProgressBar": "lumen.callbacks",
    "RayTrainReportCallback": "lumen.callbacks",
    "Report": "lumen.callbacks",
    "SWA": "lumen.callbacks",
    "SimpleProfiler": "lumen.profilers",
    "SingleDevice": "lumen.strategies",
    "SpikeDetection": "lumen.callbacks",
    "Strategy": "lumen.strategies",
    "TaskModule": "lumen.task.task_module",
    "Teacher": "lumen.task.teacher",
    "TensorBoardLogger": "lumen.loggers",
    "ThroughputMonitor": "lumen.callbacks",
    "Timer": "lumen.callbacks",
    "TorchProfiler": "lumen.profilers",
    "Trainer": "lumen.trainer.trainer",
    "Tuner": "lumen.trainer.tuner",
    "WandbLogger": "lumen.loggers",
    "Weights": "lumen.checkpoint",
    "goodput": "lumen.run.goodput",
    "grad_norm": "lumen.run.gradients",
    "isolate_rng": "lumen.random",
    "move_data_to_device": "lumen.data.nested",
    "rank_zero_debug": "lumen.distributed.rank_zero",
    "rank_zero_info": "lumen.distributed.rank_zero",
    "rank_zero_only": "lumen.distributed.rank_zero",
    "rank_zero_warn": "lumen.distributed.rank_zero",
    "runs": "lumen.cli.runs.records",
    "seed_everything": "lumen.random",
    "summarize": "lumen.callbacks.model_summary",
}
__all__ = [
    "CLI",
    "DDP",
    "EMA",
    "FSDP",
    "SWA",
    "AdvancedProfiler",
    "AimLogger",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "CSVLogger",
    "Callback",
    "CombinedLoader",
    "DataModule",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "Logger",
    "LumenError",
    "MLFlowLogger",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PassThroughProfiler",
    "Precision",
    "PredictionWriter",
    "Profiler",
    "ProgressBar",
    "RayTrainReportCallback",
    "Report",
    "SimpleProfiler",
    "SingleDevice",
    "SpikeDetection",
    "Strategy",
    "TaskModule",
    "Teacher",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TorchProfiler",
    "Trainer",
    "Tuner",
    "WandbLogger",
    "Weights",
    "goodput",
    "grad_norm",
    "isolate_rng",
    "move_data_to_device",
    "rank_zero_debug",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "runs",
    "seed_everything",
    "summarize",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule when it is first used, so that `lumen --help` need not wait for torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'lumen' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
