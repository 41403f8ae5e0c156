"""Callbacks: code that runs beside any task."""

from lumen.callbacks.base import Callback
from lumen.callbacks.early_stopping import EarlyStopping
from lumen.callbacks.lr_monitor import LearningRateMonitor
from lumen.callbacks.model_checkpoint import ModelCheckpoint
from lumen.callbacks.model_summary import ModelSummary
from lumen.callbacks.progress_bar import ProgressBar
from lumen.callbacks.system_monitor import SystemMonitor

__all__ = [
    "Callback",
    "EarlyStopping",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "SystemMonitor",
]
