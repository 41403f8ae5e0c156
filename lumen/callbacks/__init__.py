"""Callbacks: code that runs beside any task, such as saving checkpoints and showing progress."""

from lumen.callbacks.base import Callback
from lumen.callbacks.defaults import BYSTANDERS, choose_callbacks, joined, listed, savers_of
from lumen.callbacks.early_stopping import EarlyStopping
from lumen.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from lumen.callbacks.gradient_accumulation import GradientAccumulationScheduler, scheduled
from lumen.callbacks.lambda_callback import LambdaCallback
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.callbacks.model_summary import ModelSummary
from lumen.callbacks.monitors import DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor
from lumen.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lumen.callbacks.parameter_average import EMA, SWA
from lumen.callbacks.prediction_writer import BasePredictionWriter, PredictionWriter
from lumen.callbacks.progress_bar import ProgressBar
from lumen.callbacks.pruning import ModelPruning
from lumen.callbacks.reports import RayTrainReportCallback, Report
from lumen.callbacks.spike_detection import SpikeDetection
from lumen.callbacks.timer import Timer

__all__ = [
    "BYSTANDERS",
    "EMA",
    "SWA",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RayTrainReportCallback",
    "Report",
    "SpikeDetection",
    "ThroughputMonitor",
    "Timer",
    "choose_callbacks",
    "joined",
    "listed",
    "savers_of",
    "scheduled",
]
