"""The public names of Lumen and where they are: for type checkers, and for `__init__.py`, which imports lazily."""

from typing import Any

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
from lumen.cli.outputs import SaveConfigCallback as SaveConfigCallback
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
from lumen.strategies.mesh import Mesh as Mesh
from lumen.task.attention import attention as attention, position_ids as position_ids
from lumen.task.chunked_loss import chunked_cross_entropy as chunked_cross_entropy
from lumen.task.data_module import DataModule as DataModule
from lumen.task.hyperparameters import HyperparametersMixin as HyperparametersMixin
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
from lumen.version import __version__ as __version__

__all__: list[str]
_HOME: dict[str, str]

def __getattr__(name: str) -> Any: ...
