"""Callbacks that a tool leaves out when it trains a task again: the same is computed without them."""

from lumen import callbacks
from lumen.integrations.ray import RayTrainReportCallback
from lumen.tools.report.callback import Report

BYSTANDERS = (
    callbacks.BasePredictionWriter, callbacks.DeviceStatsMonitor, callbacks.ModelCheckpoint, callbacks.ModelSummary,
    callbacks.OnExceptionCheckpoint, callbacks.ProgressBar, callbacks.ThroughputMonitor, RayTrainReportCallback, Report,
)  # fmt: skip
