"""The newest values of what a run has logged, for those who look at them: monitors, schedulers, the progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, final

from lumen.errors import ConfigError
from lumen.metrics.collector import StageMetrics
from lumen.metrics.torchmetrics_states import Gather
from lumen.run.loaders import Loaders
from lumen.run.scheduler_config import SchedulerConfig
from lumen.task.hooks import mentioned_in
from lumen.task.task_module import TaskModule


@final
class LoggedValues:
    """The values of epochs and evaluations, by name.

    Args:
        task: Its torchmetrics objects are computed.
        loaders: Open loaders of the run.

    Attributes:
        newest: The newest value of every name; after a resume those of the part before too.
        updated: Names whose value is new since the last boundary.
        logged: Names that have had a value since this part of the run began.
        predictions: What `predict_step` returned, one list per loader.
        keeps_predictions: Keep the predictions of this process, and gather them; else hooks alone see them.
        are_shown: The progress bar shows those of an evaluation at its end.
        batch_indices: Indices in the data set of the samples of a prediction's batch in progress; None: unknown.
        has_ended_epoch: A training epoch has ended since this part of the run began.
        has_validated: A validation has ended since then.
    """

    def __init__(self, task: TaskModule, loaders: Loaders) -> None:
        self._task, self._loaders = task, loaders
        self._of_stages: dict[str, StageMetrics] = {}
        self._published: StageMetrics
        self._of_single_steps = set[str]()  # that a scheduler has looked at
        self.newest: dict[str, float] = {}
        self.updated, self.logged = set[str](), set[str]()
        self.predictions: list[list[Any]] = []
        self.keeps_predictions = self.are_shown = True
        self.batch_indices: list[int] | None = None
        self.has_ended_epoch = self.has_validated = False

    def choose(self, *, keeps_predictions: bool, are_shown: bool) -> None:
        """Choose what is kept and shown of an evaluation; see the attributes."""
        self.keeps_predictions, self.are_shown = keeps_predictions, are_shown

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
        """Keep what `predict_step` returned for the batches of one loader."""
        self.predictions.append(outputs)

    def publish(self, stage: str, metrics: StageMetrics, gather: Gather | None) -> dict[str, float]:
        """Compute the values of an epoch or evaluation, and keep them. Collective: every rank must call this."""
        values = metrics.epoch_values(self._task, gather)
        self._of_stages[stage] = self._published = metrics
        self.newest.update(values)
        self.updated.update(values)
        self.logged.update(values)
        return values

    def by_loader(self) -> list[dict[str, float]]:
        """The newest values, one dictionary for each loader of the evaluation that was published last."""
        loaders = self._published.loaders()
        return [
            {name: value for name, value in self.newest.items() if {"", suffix} & {*loaders[name]}}
            for suffix in self._loaders.suffixes()
        ]

    def forks(self, train: StageMetrics) -> dict[str, tuple[str, str]]:
        """For each name with values of steps and of epochs, what these are called.

        Args:
            train: What the training epoch in progress has logged.
        """
        found = chain.from_iterable(each.published().items() for each in (*self._of_stages.values(), train))
        return {name: (names[0], names[1]) for name, names in found if len(names) > 1}

    def unlogged(self, train: StageMetrics) -> set[str]:
        """The names whose values no logger is given; see `forks`."""
        stages = (*self._of_stages.values(), train)
        return {
            name for each in stages for names in each.published(lambda of: not of.logger).values() for name in names
        }

    @property
    def options(self) -> dict[str, Any]:
        """How names were logged in each stage, for checkpoints: what `forks` and `unlogged` need to know."""
        return {stage: metrics.options() for stage, metrics in self._of_stages.items()}

    def restore(self, newest: dict[str, float], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the newest values of a checkpoint, and its `options`."""
        self.newest = newest
        self._of_stages = {stage: StageMetrics.of_options(each) for stage, each in options.items()}

    def forget(self) -> None:
        """Those of a sanity check are nobody's."""
        for values in (self.newest, self.updated, self.logged, self._of_stages):
            values.clear()

    def show_step(self, scheduler: SchedulerConfig, values: dict[str, float]) -> None:
        """Show a scheduler what the step in progress has logged."""
        self._of_single_steps.update(values)
        scheduler.take(values)

    @property
    def yet_to_log(self) -> list[str]:
        """What logs and has not had its turn since this part of the run began: its first epoch, a validation.

        If the list is empty, a name that has no value now never has one.
        """
        validates = self._loaders.evaluation and not self.has_validated
        return ["epoch"] * (not self.has_ended_epoch) + ["validation"] * bool(validates)

    def require(self, who: str, monitor: str) -> None:
        """Refuse a monitor that has no value although everything that logs has had its turn since the run went on.

        Raises:
            ConfigError: It was never logged; names what was.
        """
        if monitor in self.logged or self.yet_to_log:
            return
        since = " since the run went on" if monitor in self.newest else ""
        empty = "".join(f"But {why}. " for why in self._loaders.empty)
        said = self._only_in_steps(monitor) or (
            f"was never logged{since}; logged so far: {', '.join(sorted(self.logged)) or 'nothing'}. {empty}Use one "
            "of these or log it, once an epoch or in validation." + self._elsewhere(monitor)
        )
        raise ConfigError(f"{who}: the monitor {monitor!r} {said}")

    def _elsewhere(self, monitor: str) -> str:
        """Where else a task logs it, in words."""
        found = [name for stage in ("test", "predict") for name in mentioned_in(self._task, stage, monitor)]
        places = " and ".join(found)
        return f" {places} of {type(self._task).__name__} may log it, which fit does not call." if places else ""

    def move(self, scheduler: SchedulerConfig) -> None:
        """Move a schedule by one.

        Raises:
            ConfigError: It is strict about a monitor that has no value.
        """
        name, never = scheduler.monitor, not scheduler.known or not self.yet_to_log
        known = self.logged | self._of_single_steps
        if name is not None and scheduler.strict and never and name not in known:
            said = self._only_in_steps(name) or (
                f"has no value of an epoch or a validation; there are: {', '.join(sorted(known)) or 'none'}. Log it so "
                "(on_epoch=True), set a frequency at which it has one, or set strict: false." + self._elsewhere(name)
            )
            raise ConfigError(f"lr_scheduler: the monitor {name!r} {said}")
        scheduler.step()

    def _only_in_steps(self, name: str) -> str:
        """What is said of a monitor that has values of single steps only, each of one batch; "" of any other."""
        epoch = next((found[name] for each in self._of_stages.values() if name in (found := each.of_steps())), None)
        if epoch is None:
            return ""
        if epoch in self.logged:
            return f"has values of single steps only, each of one batch; the one of an epoch is {epoch!r}. Write that."
        return (
            f"is logged per step only, and a step's value is that of one batch. Write self.log({name!r}, ..., "
            f"on_step=False, on_epoch=True); or on_epoch=True alone, and {epoch!r} as the monitor."
        )
