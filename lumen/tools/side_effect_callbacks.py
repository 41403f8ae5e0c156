"""Callbacks that do not change the computation. A tool leaves them out when it trains a task again."""

from lumen import callbacks
from lumen.integrations.ray import RayTrainReportCallback
from lumen.tools.report.callback import Report

SIDE_EFFECT_CALLBACKS = (
    callbacks.BasePredictionWriter, callbacks.DeviceStatsMonitor, callbacks.ModelCheckpoint, callbacks.ModelSummary,
    callbacks.OnExceptionCheckpoint, callbacks.ProgressBar, callbacks.ThroughputMonitor, RayTrainReportCallback, Report,
)  # fmt: skip
