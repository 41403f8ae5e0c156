"""The newest logged values of a run, for monitors, schedulers and the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, final

import torch

from lumen.errors import ConfigError
from lumen.metrics.collector import StageMetrics
from lumen.metrics.step_values import is_for_loggers, is_for_progress_bar
from lumen.metrics.torchmetrics_states import Gather
from lumen.run.loaders import Loaders
from lumen.run.scheduler_config import SchedulerConfig
from lumen.task.hooks import find_methods_mentioning
from lumen.task.task_module import TaskModule


@final
class LoggedValues:
    """The values of epochs and evaluations, by name.

    Args:
        task: The task, whose torchmetrics objects are computed.
        loaders: Open loaders of the run.

    Attributes:
        newest: The newest value of every name, in a resumed run also from the parts before.
        updated: Names whose value is new since the end of the last step.
        logged: Names that have had a value since this part of the run began.
        predictions: Outputs of `predict_step`, one list per loader.
        keeps_predictions: True to keep and gather the predictions; False if only hooks see them.
        should_show: True if the progress bar shows the values of an evaluation at its end.
        batch_indices: Data set indices of the samples in the prediction batch in progress; None if unknown.
        has_ended_epoch: True if a training epoch has ended since this part of the run began.
        has_validated: True if a validation has ended since this part of the run began.
    """

    def __init__(self, task: TaskModule, loaders: Loaders) -> None:
        self._task, self._loaders = task, loaders
        self._stage_metrics: dict[str, StageMetrics] = {}
        self._published: StageMetrics
        self._step_only_names = set[str]()  # names of single steps that a scheduler has read
        self.newest: dict[str, float] = {}
        self.updated, self.logged = set[str](), set[str]()
        self.predictions: list[list[Any]] = []
        self.keeps_predictions = self.should_show = True
        self.batch_indices: list[int] | None = None
        self.has_ended_epoch = self.has_validated = False

    def configure_evaluation(self, *, keeps_predictions: bool, are_shown: bool) -> None:
        """Set `keeps_predictions` and `should_show` for an evaluation."""
        self.keeps_predictions, self.should_show = keeps_predictions, are_shown

    def note_epoch(self) -> None:
        """Note that a training epoch has ended."""
        self.has_ended_epoch = True

    def note_validation(self) -> None:
        """Note that a validation is complete."""
        self.has_validated = True

    def note_batch(self, indices: list[int] | None) -> None:
        """Note the indices in the data set of the samples of a prediction's batch."""
        self.batch_indices = indices

    def keep_predictions(self, outputs: list[Any]) -> None:
        """Keep the outputs of `predict_step` for the batches of one loader."""
        self.predictions.append(outputs)

    def publish_values(self, stage: str, metrics: StageMetrics, gather: Gather | None) -> dict[str, float]:
        """Compute the values of an epoch or evaluation, and keep them. Collective: every rank must call this."""
        values = metrics.compute_epoch_values(self._task, gather)
        self._stage_metrics[stage] = self._published = metrics
        self.newest.update(values)
        self.updated.update(values)
        self.logged.update(values)
        return values

    def list_by_loader(self) -> list[dict[str, float]]:
        """Return the newest values, in one dictionary for each loader of the last published evaluation."""
        loaders = self._published.map_loader_suffixes()
        return [
            {name: value for name, value in self.newest.items() if {"", suffix} & {*loaders[name]}}
            for suffix in self._loaders.list_suffixes()
        ]

    def get_forked_names(self, train: StageMetrics) -> dict[str, tuple[str, str]]:
        """Return the step name and the epoch name of each logged name that has both, such as `x_step` and `x_epoch`.

        Args:
            train: Collector of the training epoch in progress.
        """
        found = chain.from_iterable(
            each.map_published_names().items() for each in (*self._stage_metrics.values(), train)
        )
        return {name: (names[0], names[1]) for name, names in found if len(names) > 1}

    def get_evaluation_steps(self, running: StageMetrics | None) -> dict[str, float | torch.Tensor]:
        """Return the values for loggers of the newest batch of each evaluation, by published name.

        Args:
            running: Collector of the evaluation in progress, or None.
        """
        found: dict[str, float | torch.Tensor] = {}
        for each in (*(of for stage, of in self._stage_metrics.items() if stage != "fit"), running or StageMetrics()):
            found.update(each.compute_step_values(is_for_loggers, has_earlier=True))
        return found

    def get_progress_bar_values(self) -> dict[str, float]:
        """Return the newest values of epochs and evaluations that were logged with `prog_bar=True`."""
        names = chain.from_iterable(each.list_epoch_names(is_for_progress_bar) for each in self._stage_metrics.values())
        return {name: self.newest[name] for name in names if name in self.newest}

    def get_unlogged_names(self, train: StageMetrics) -> set[str]:
        """Return the names whose values no logger gets.

        Args:
            train: Collector of the training epoch in progress.
        """
        stages = (*self._stage_metrics.values(), train)
        return {
            name
            for each in stages
            for names in each.map_published_names(lambda of: not of.logger).values()
            for name in names
        }

    @property
    def options(self) -> dict[str, Any]:
        """Options of logged names by stage, for checkpoints, `get_forked_names` and `get_unlogged_names`."""
        return {stage: metrics.get_options() for stage, metrics in self._stage_metrics.items()}

    def restore(self, newest: dict[str, float], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the newest values of a checkpoint, and its `options`."""
        self.newest = newest
        self._stage_metrics = {stage: StageMetrics.from_options(each) for stage, each in options.items()}

    def discard_newest(self) -> None:
        """Drop all values, after a sanity check."""
        for values in (self.newest, self.updated, self.logged, self._stage_metrics):
            values.clear()

    def show_step(self, scheduler: SchedulerConfig, values: dict[str, float]) -> None:
        """Pass the values of the step in progress to a scheduler."""
        self._step_only_names.update(values)
        scheduler.store_monitor_value(values)

    @property
    def pending_stages(self) -> list[str]:
        """Stages that have not ended since this part of the run began: "epoch", "validation".

        If the list is empty, a name without a value now will never have a value.
        """
        validates = self._loaders.evaluation and not self.has_validated
        return ["epoch"] * (not self.has_ended_epoch) + ["validation"] * bool(validates)

    def check_monitor(self, who: str, monitor: str) -> None:
        """Refuse a monitor without a value once an epoch and a validation have ended in this part of the run.

        Raises:
            ConfigError: The monitor was never logged. The message lists the logged names.
        """
        if monitor in self.logged or self.pending_stages:
            return
        since = " since the run resumed" if monitor in self.newest else ""
        empty = "".join(f"But {why}. " for why in self._loaders.empty_stages)
        problem = self._describe_unusable(monitor) or (
            f"was never logged{since}; logged so far: {', '.join(sorted(self.logged)) or 'nothing'}. {empty}Use one "
            f"of these names, or log {monitor!r} once an epoch or in validation." + self._describe_other_places(monitor)
        )
        raise ConfigError(f"{who}: the monitor {monitor!r} {problem}")

    def _describe_other_places(self, monitor: str) -> str:
        """Return a sentence on other stages of the task that may log a name; "" if there are none."""
        found = [name for stage in ("test", "predict") for name in find_methods_mentioning(self._task, stage, monitor)]
        places = " and ".join(found)
        return f" {places} of {type(self._task).__name__} may log it, but fit does not call {places}." if places else ""

    def step_scheduler(self, scheduler: SchedulerConfig) -> None:
        """Step a scheduler.

        Raises:
            ConfigError: The scheduler is strict, and its monitor has no value.
        """
        name, never = scheduler.monitor, not scheduler.has_value or not self.pending_stages
        known = self.logged | self._step_only_names
        if name is not None and scheduler.strict and never and name not in known:
            problem = self._describe_unusable(name) or (
                f"has no value of an epoch or a validation; logged names: {', '.join(sorted(known)) or 'none'}. Log it "
                "with on_epoch=True, set a frequency at which it has a value, or set strict: false."
                + self._describe_other_places(name)
            )
            raise ConfigError(f"lr_scheduler: the monitor {name!r} {problem}")
        scheduler.step()

    def _describe_unusable(self, name: str) -> str:
        """Return advice for a monitor that is a counter, or has only values of single steps; "" for another monitor."""
        if name in ("step", "epoch"):
            return (
                f"is a counter, not a logged value. To end training after N {name}s, write Trainer(max_{name}s=N). A "
                f"scheduler that moves each {name} needs no monitor."
            )
        epoch = next(
            (found[name] for each in self._stage_metrics.values() if name in (found := each.map_step_names())), None
        )
        if epoch is None:
            return ""
        if epoch in self.logged:
            return f"has values of single steps only. Use {epoch!r} as the monitor, which has the values of epochs."
        return (
            f"has values of single steps only. Write self.log({name!r}, ..., on_step=False, on_epoch=True); or write "
            f"on_epoch=True alone, and use {epoch!r} as the monitor."
        )
