"""Callbacks: code that runs at fixed places of any task's run, such as saving checkpoints and showing progress."""

from lumen.callbacks.base import Callback as Callback, attach_callbacks as attach_callbacks
from lumen.callbacks.defaults import (
    as_callback_list as as_callback_list,
    check_loggers as check_loggers,
    choose_callbacks as choose_callbacks,
    get_checkpoint_callbacks as get_checkpoint_callbacks,
    merge_callbacks as merge_callbacks,
)
from lumen.callbacks.early_stopping import EarlyStopping as EarlyStopping
from lumen.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning, BaseFinetuning as BaseFinetuning
from lumen.callbacks.gradient_accumulation import (
    GradientAccumulationScheduler as GradientAccumulationScheduler,
    apply_accumulation_schedule as apply_accumulation_schedule,
)
from lumen.callbacks.lambda_callback import LambdaCallback as LambdaCallback
from lumen.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from lumen.callbacks.model_summary import ModelSummary as ModelSummary
from lumen.callbacks.monitors import (
    DeviceStatsMonitor as DeviceStatsMonitor,
    LearningRateMonitor as LearningRateMonitor,
    ThroughputMonitor as ThroughputMonitor,
)
from lumen.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from lumen.callbacks.parameter_average import EMA as EMA, SWA as SWA
from lumen.callbacks.prediction_writer import (
    BasePredictionWriter as BasePredictionWriter,
    PredictionWriter as PredictionWriter,
)
from lumen.callbacks.progress_bar import ProgressBar as ProgressBar
from lumen.callbacks.spike_detection import SpikeDetection as SpikeDetection
from lumen.callbacks.timer import Timer as Timer
