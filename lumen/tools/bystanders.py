"""Callbacks that a tool leaves out when it trains a task again: the same is computed without them."""

from lumen.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    ThroughputMonitor,
)
from lumen.integrations.ray import RayTrainReportCallback
from lumen.tools.report.callback import Report

BYSTANDERS = (
    BasePredictionWriter, DeviceStatsMonitor, ModelCheckpoint, ModelSummary, OnExceptionCheckpoint, ProgressBar,
    RayTrainReportCallback, Report, ThroughputMonitor,
)  # fmt: skip
