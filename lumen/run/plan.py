"""`Plan`, the limits and intervals of a run, with its parsing from user settings; and `Progress`, its counters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, final

from lumen.data.adapter import LoaderAdapter, Position
from lumen.data.windows import AccumulationWindow
from lumen.errors import ConfigError
from lumen.errors.arguments import check_at_least

Duration = str | timedelta | dict[str, float]


@final
@dataclass
class Plan:
    """Limits and intervals of a run, in resolved units.

    Attributes:
        max_steps: Optimizer steps; None: no limit.
        max_epochs: Epochs; None: no limit.
        max_time_s: Seconds; None: no limit.
        min_steps: Steps before anything but a limit may stop the run.
        min_epochs: Epochs before anything but a limit may stop the run.
        clip_norm: Largest gradient norm; None: no clipping by norm.
        clip_value: Largest gradient element; None: no clipping by value.
        val_every_n_steps: Validate after every n-th step of the run.
        val_every_epoch_fraction: Validate after this fraction of an epoch, (0, 1].
        val_every_s: Validate after this many seconds.
        val_every_n_epochs: Validate in every n-th epoch only.
        sanity_batches: Number of validation batches before training; negative: all.
        limits: Count or fraction of the batches per stage ("train", "validate", "test", "predict"); None: all.
        log_every_n_steps: Steps between two logged steps.
        inference_mode: True to evaluate in `torch.inference_mode`, False to evaluate in `torch.no_grad`.
        accumulate: Micro-batches of a step in each process, by the first epoch with this number; in order of epochs,
            from epoch 0.
        global_batch_size: Samples of a step, instead of `accumulate`; None to use `accumulate`.
        same_batches: True if every epoch repeats the batches of the first.
        halve_on_oom: True to compute a batch that does not fit into memory in halves, in training and evaluations.
        reload_every_n_epochs: Number of epochs after which the loaders are requested again; 0: never.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    max_time_s: float | None = None
    min_steps: int = 0
    min_epochs: int = 0
    clip_norm: float | None = None
    clip_value: float | None = None
    val_every_n_steps: int | None = None
    val_every_epoch_fraction: float | None = 1.0
    val_every_s: float | None = None
    val_every_n_epochs: int = 1
    sanity_batches: int = 2
    limits: dict[str, int | float | None] = field(default_factory=dict)
    log_every_n_steps: int = 50
    inference_mode: bool = True
    halve_on_oom: bool = False
    accumulate: Mapping[int, int] = field(default_factory=lambda: {0: 1})
    global_batch_size: int | None = None
    same_batches: bool = False
    reload_every_n_epochs: int = 0

    def with_overfitting(self, batches: int | float) -> Plan:
        """Return the plan for a count or fraction of the batches, the same batches in every epoch."""
        limit = parse_batch_limit("overfit_batches", batches)
        return replace(self, same_batches=True, limits=self.limits | {"train": limit, "validate": limit})

    def as_fast_dev_run(self, batches: int) -> Plan:
        """Return the plan of `fast_dev_run`: one epoch with a few batches per stage."""
        return replace(
            self, max_steps=batches, max_epochs=1, max_time_s=None, sanity_batches=0,
            limits=dict.fromkeys(self.limits, batches), val_every_n_steps=None, val_every_s=None,
            val_every_epoch_fraction=1.0, val_every_n_epochs=1,
        )  # fmt: skip

    @property
    def has_accumulation(self) -> bool:
        """True if some epoch has steps of several micro-batches in each process."""
        return max(self.accumulate.values()) > 1

    def get_accumulation(self, epoch: int) -> int:
        """Return the micro-batches of a step in each process, in an epoch counted from 0."""
        return self.accumulate[max(begin for begin in self.accumulate if begin <= epoch)]

    def get_limit(self, stage: str, adapter: LoaderAdapter) -> int | None:
        """Return the limit of a loader's batches in a stage; None for no limit.

        Raises:
            ConfigError: The limit is a fraction, and the loader has no length or the fraction leaves no batch.
        """
        if stage == "sanity":
            full_limit, sanity_limit = self.get_limit("validate", adapter), self.sanity_batches
            return (
                full_limit
                if sanity_limit < 0
                else sanity_limit
                if full_limit is None
                else min(sanity_limit, full_limit)
            )
        limit = self.limits.get(stage)
        if not isinstance(limit, float):
            return limit
        if limit == 1.0:
            return None
        name = "overfit_batches" if self.same_batches else f"limit_{'val' if stage == 'validate' else stage}_batches"
        if adapter.length is None:
            raise ConfigError(f"{name}: {limit} is a fraction, but the loader has no length. Give a number of batches.")
        batches = int(adapter.length * limit + 1e-9)  # 0.29 * 100 is a little less than 29
        if limit and adapter.length and batches == 0:
            raise ConfigError(
                f"{name}: {limit} of {adapter.length} batches is less than one. Give a larger fraction or a count."
            )
        return batches

    def check_validation(self, adapter: LoaderAdapter) -> None:
        """Check `val_check_interval` against the training loader.

        Raises:
            ConfigError: The interval is a fraction of an epoch, and the loader has no length.
        """
        if self.val_every_epoch_fraction not in (None, 1.0) and self.count_batches("train", adapter) is None:
            raise ConfigError(
                f"val_check_interval: {self.val_every_epoch_fraction} is a fraction of an epoch, but the loader has no "
                "length. Give a number of optimizer steps, or set limit_train_batches to a number."
            )

    def count_batches(self, stage: str, adapter: LoaderAdapter) -> int | None:
        """Return the number of a loader's batches that a stage uses; None if it is unknown."""
        limit = self.get_limit(stage, adapter)
        return limit if adapter.length is None else adapter.length if limit is None else min(limit, adapter.length)

    def count_total_steps(self, lengths: EpochLengths | None) -> int:
        """Return the optimizer steps of the whole run.

        Args:
            lengths: Steps of the epochs; None if they are unknown.

        Raises:
            ConfigError: The run has neither `max_steps` nor `max_epochs` with known lengths.
        """
        by_epochs = None if lengths is None or self.max_epochs is None else lengths.count_steps_before(self.max_epochs)
        totals = [total for total in (self.max_steps, by_epochs) if total is not None]
        if not totals:
            raise ConfigError("the number of optimizer steps is unknown: set max_steps.")
        return min(totals)


@final
class EpochLengths:
    """Numbers of optimizer steps in the epochs of a run.

    Args:
        steps: Steps of an epoch, by the first epoch with this number; in order of epochs, from epoch 0.
    """

    def __init__(self, steps: Mapping[int, int]) -> None:
        self._steps = steps

    def count_steps_before(self, epoch: int) -> int:
        """Return the number of steps in all epochs before an epoch."""
        spans = pairwise(min(begin, epoch) for begin in (*self._steps, epoch))
        return sum((end - begin) * steps for (begin, end), steps in zip(spans, self._steps.values(), strict=True))

    def get_length(self, epoch: int) -> int:
        """Return the number of steps in one epoch."""
        return self.count_steps_before(epoch + 1) - self.count_steps_before(epoch)

    def count_complete_epochs(self, steps: int) -> int:
        """Return the number of epochs that are complete after some steps, if every epoch has steps."""
        return bisect_right(range(1, steps + 1), steps, key=self.count_steps_before)


def parse_accumulation(name: str, value: int | Mapping[int, int]) -> dict[int, int]:
    """Parse `accumulate_grad_batches` into `Plan.accumulate`. Steps before the first named epoch have one micro-batch.

    Raises:
        ConfigError: An epoch is negative, a number is less than 1, or the mapping is empty.
    """
    value = value if isinstance(value, Mapping) else {0: value}
    if not value:
        raise ConfigError(
            f"{name}: the dictionary is empty. Write first epochs and numbers of micro-batches: {{0: 1, 4: 8}}."
        )
    for epoch, number in value.items():
        if type(epoch) is not int or epoch < 0:
            raise ConfigError(f"{name}: an epoch is an int of at least 0, found {epoch!r}.")
        check_at_least(1, **{name: number})
    found = {0: 1}
    for epoch in sorted(value):
        if value[epoch] != [*found.values()][-1]:
            found[epoch] = value[epoch]
    return found


def format_by_epoch(numbers: Mapping[int, int]) -> int | str:
    """Format numbers by epoch, such as `Plan.accumulate`, as a user writes them: one number, or a dictionary."""
    return numbers[0] if len(numbers) == 1 else str(dict(numbers))


def parse_count_limit(name: str, value: int | None) -> int | None:
    """Check a limit in steps or epochs, and return it; None for -1, which means no limit as in Lightning."""
    if value is not None and value < -1:
        raise ConfigError(f"{name}: must be at least 0 (or -1 for no limit), found {value}.")
    return None if value == -1 else value


def parse_batch_limit(name: str, value: int | float | None) -> int | float | None:
    """Check a limit of batches, a count or a fraction of at most 1.0, and return it."""
    if value is not None and (value < 0 or (isinstance(value, float) and value > 1.0)):
        raise ConfigError(f"{name}: expected a count >= 0 or a fraction of at most 1.0, found {value}.")
    return value


def parse_duration_s(name: str, value: Duration) -> float:
    """Return a duration in seconds."""
    if isinstance(value, timedelta | dict):
        try:
            seconds = (value if isinstance(value, timedelta) else timedelta(**value)).total_seconds()
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"{name}: {value} is no duration: {error}. Write {{hours: 1, minutes: 30}}.") from None
        if seconds < 0:
            raise ConfigError(f"{name}: expected a duration of at least 0 seconds, found {seconds:g}.")
        return seconds
    parts = value.split(":") if isinstance(value, str) else []
    if not 2 <= len(parts) <= 4 or not all(part.isdigit() for part in parts):
        raise ConfigError(f'{name}: expected a duration "DD:HH:MM:SS", found {value!r}.')
    return float(sum(int(part) * unit for part, unit in zip(reversed(parts), (1, 60, 3600, 86400), strict=False)))


def parse_validation_interval(value: int | float | Duration) -> dict[str, Any]:
    """Parse `val_check_interval` into fields of a `Plan`: an int counts steps, a float is a fraction of an epoch."""
    if isinstance(value, (str, timedelta, dict)):
        return {"val_every_s": parse_duration_s("val_check_interval", value), "val_every_epoch_fraction": None}
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ConfigError(f"val_check_interval: a fraction of an epoch is in (0, 1], found {value}.")
        return {"val_every_epoch_fraction": value}
    if value < 1:
        raise ConfigError(f"val_check_interval: expected at least 1 optimizer step, found {value}.")
    return {"val_every_n_steps": value, "val_every_epoch_fraction": None}


_KINDS: dict[str, type] = {"int": Integral, "bool": bool, "float": Real, "Any": object, "list[list[int]]": list}


@final
@dataclass
class Progress:
    """Counters of a run, part of every checkpoint. A step is a completed optimizer update, everywhere.

    Attributes:
        step: Optimizer updates completed.
        epoch: Epochs completed so far.
        samples: Samples consumed of the epoch in progress: the position in its order.
        batches: Micro-batches consumed of the epoch in progress.
        micro_batches: Micro-batches consumed in the whole run, the key of random numbers such as dropout's.
        in_epoch: True if the epoch in progress has begun.
        validation_due: True if this step's validation is not complete.
        should_stop: True if a callback or the user asked the run to end, which it does after the minimum of steps and
            epochs.
        elapsed_s: Seconds of training, over all resumed parts.
        weight_guess: Guess of the sum of a step's weights; see `LossWeighting`.
        units: Weight of all updates: the tokens, boxes or samples learned from.
        loader: Position of the training loader, as reported by its adapter after the last step.
        fits: Samples of the largest part of a micro-batch that fits into memory; 0 if all have fitted. Processes agree
            on this number at the end of the step in which a part did not fit.
        left_out: Ranges (from, to) of the run's micro-batches. Steps whose first micro-batch is in one are left out.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    batches: int = 0
    micro_batches: int = 0
    in_epoch: bool = False
    validation_due: bool = False
    should_stop: bool = False
    elapsed_s: float = 0.0
    weight_guess: float = 0.0
    units: float = 0.0
    loader: Any = None
    fits: int = 0
    left_out: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the values, which may come from a checkpoint."""
        wrong = [each.name for each in fields(self) if not isinstance(getattr(self, each.name), _KINDS[str(each.type)])]
        if wrong or min(self.step, self.epoch, self.samples, self.batches, self.micro_batches, self.fits) < 0:
            raise ValueError(f"progress has values of a wrong type, or below 0: {', '.join(wrong)}")

    def copy_from(self, other: Progress) -> None:
        """Copy all counters of `other` into this object, which the parts of the run share."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    def count_window(self, window: AccumulationWindow, *, updated: bool) -> None:
        """Count one window, and a step only if the update was not skipped."""
        self.step += updated
        self.samples += window.samples
        self.batches += window.batches
        self.loader = window.state

    def begin_epoch(self) -> None:
        """Note that the epoch in progress has begun."""
        self.in_epoch = True

    def exclude_steps(self, ranges: list[list[int]]) -> None:
        """Set the ranges (from, to) of micro-batches to leave out."""
        self.left_out = ranges

    def return_before_epoch(self) -> None:
        """Go back to the beginning of the epoch in progress."""
        self.samples = self.batches = 0
        self.loader, self.in_epoch, self.validation_due = None, False, False

    def finish_epoch(self) -> None:
        """Count the epoch in progress as complete."""
        self.epoch += 1
        self.samples = self.batches = 0
        self.in_epoch = False

    @property
    def epochs_begun(self) -> int:
        """Number of the epoch in progress, counted from 1 for messages; between epochs that of the last one."""
        return self.epoch + self.in_epoch

    @property
    def position(self) -> Position:
        """Position in the epoch in progress."""
        return Position(self.samples, self.batches, self.loader)
