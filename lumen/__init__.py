"""Lumen: a training library for PyTorch that never changes what is computed."""

from __future__ import annotations

import gc
import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lumen.version import __version__ as __version__

if "LUMEN_LAUNCHER" in os.environ:  # from here on the launcher shows what ends this process
    import_module("lumen.distributed.worker").attach()

if TYPE_CHECKING:
    from lumen.callbacks import (
        EMA as EMA,
        SWA as SWA,
        BackboneFinetuning as BackboneFinetuning,
        BaseFinetuning as BaseFinetuning,
        BasePredictionWriter as BasePredictionWriter,
        Callback as Callback,
        DeviceStatsMonitor as DeviceStatsMonitor,
        EarlyStopping as EarlyStopping,
        GradientAccumulationScheduler as GradientAccumulationScheduler,
        LambdaCallback as LambdaCallback,
        LearningRateMonitor as LearningRateMonitor,
        ModelCheckpoint as ModelCheckpoint,
        ModelSummary as ModelSummary,
        OnExceptionCheckpoint as OnExceptionCheckpoint,
        PredictionWriter as PredictionWriter,
        ProgressBar as ProgressBar,
        SpikeDetection as SpikeDetection,
        ThroughputMonitor as ThroughputMonitor,
        Timer as Timer,
    )
    from lumen.callbacks.model_summary import summarize as summarize
    from lumen.checkpoint import Weights as Weights
    from lumen.cli.command_line import CLI as CLI
    from lumen.data.combined import CombinedLoader as CombinedLoader
    from lumen.data.nested import move_data_to_device as move_data_to_device
    from lumen.distributed.rank_zero import (
        rank_zero_debug as rank_zero_debug,
        rank_zero_info as rank_zero_info,
        rank_zero_only as rank_zero_only,
        rank_zero_warn as rank_zero_warn,
    )
    from lumen.errors import LumenError as LumenError
    from lumen.integrations.aim import AimLogger as AimLogger
    from lumen.integrations.mlflow import MLFlowLogger as MLFlowLogger
    from lumen.integrations.ray import RayTrainReportCallback as RayTrainReportCallback
    from lumen.integrations.tensorboard import TensorBoardLogger as TensorBoardLogger
    from lumen.integrations.wandb import WandbLogger as WandbLogger
    from lumen.loggers import CSVLogger as CSVLogger, Logger as Logger
    from lumen.precision import Precision as Precision
    from lumen.profilers import (
        AdvancedProfiler as AdvancedProfiler,
        PassThroughProfiler as PassThroughProfiler,
        Profiler as Profiler,
        SimpleProfiler as SimpleProfiler,
        TorchProfiler as TorchProfiler,
    )
    from lumen.random import isolate_rng as isolate_rng, seed_everything as seed_everything
    from lumen.run.goodput import goodput as goodput
    from lumen.run.gradients import grad_norm as grad_norm
    from lumen.strategies import SingleDevice as SingleDevice, Strategy as Strategy
    from lumen.strategies.ddp import DDP as DDP
    from lumen.strategies.fsdp import FSDP as FSDP
    from lumen.task.data_module import DataModule as DataModule
    from lumen.task.task_module import TaskModule as TaskModule
    from lumen.task.teacher import Teacher as Teacher
    from lumen.tools.report.callback import Report as Report
    from lumen.tools.runs.records import runs as runs
    from lumen.trainer.trainer import Trainer as Trainer
    from lumen.trainer.tuner import (
        BatchSizeFinder as BatchSizeFinder,
        LearningRateFinder as LearningRateFinder,
        Tuner as Tuner,
    )


_HOME = {
    name: home
    for home, names in {
        "lumen.callbacks": (
            "BackboneFinetuning BaseFinetuning BasePredictionWriter Callback DeviceStatsMonitor EMA "
            "EarlyStopping GradientAccumulationScheduler LambdaCallback LearningRateMonitor ModelCheckpoint "
            "ModelSummary OnExceptionCheckpoint PredictionWriter ProgressBar SWA SpikeDetection ThroughputMonitor Timer"
        ),
        "lumen.callbacks.model_summary": "summarize",
        "lumen.checkpoint": "Weights",
        "lumen.cli.command_line": "CLI",
        "lumen.data.combined": "CombinedLoader",
        "lumen.data.nested": "move_data_to_device",
        "lumen.distributed.rank_zero": "rank_zero_debug rank_zero_info rank_zero_only rank_zero_warn",
        "lumen.errors": "LumenError",
        "lumen.integrations.aim": "AimLogger",
        "lumen.integrations.mlflow": "MLFlowLogger",
        "lumen.integrations.ray": "RayTrainReportCallback",
        "lumen.integrations.tensorboard": "TensorBoardLogger",
        "lumen.integrations.wandb": "WandbLogger",
        "lumen.loggers": "CSVLogger Logger",
        "lumen.precision": "Precision",
        "lumen.profilers": "AdvancedProfiler PassThroughProfiler Profiler SimpleProfiler TorchProfiler",
        "lumen.random": "isolate_rng seed_everything",
        "lumen.run.goodput": "goodput",
        "lumen.run.gradients": "grad_norm",
        "lumen.strategies": "SingleDevice Strategy",
        "lumen.strategies.ddp": "DDP",
        "lumen.strategies.fsdp": "FSDP",
        "lumen.task.data_module": "DataModule",
        "lumen.task.task_module": "TaskModule",
        "lumen.task.teacher": "Teacher",
        "lumen.tools.report.callback": "Report",
        "lumen.tools.runs.records": "runs",
        "lumen.trainer.trainer": "Trainer",
        "lumen.trainer.tuner": "BatchSizeFinder LearningRateFinder Tuner",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule when it is first used, so that `lumen --help` need not wait for torch."""
    if name in _HOME:
        collects = gc.isenabled()
        gc.disable()  # one full collection among all of torch's objects takes as long as the import
        try:
            return getattr(import_module(_HOME[name]), name)
        finally:
            if collects:
                gc.enable()
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    from lumen.errors.lightning_names import INSTEAD_OF_CLASSES

    instead = f". {INSTEAD_OF_CLASSES[name]}" if name in INSTEAD_OF_CLASSES else ""
    raise AttributeError(f"module 'lumen' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return __all__
