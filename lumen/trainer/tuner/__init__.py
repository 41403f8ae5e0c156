"""Searches before a training: the learning rate, and the batch size that fits into memory."""

from lumen.trainer.tuner.finders import BatchSizeFinder as BatchSizeFinder, LearningRateFinder as LearningRateFinder
from lumen.trainer.tuner.tuner import Tuner as Tuner
