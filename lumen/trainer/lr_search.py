"""Search for a learning rate: train with increasing rates, and find the steepest descent of the loss."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from lumen.callbacks import Callback
from lumen.errors import ConfigError
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

_SMOOTHING = 0.98
Mode = Literal["exponential", "linear"]


@final
class LearningRateCurve:
    """Result of a search for a learning rate.

    Attributes:
        mode: Growth of the rates: "exponential" or "linear".
        results: "lr": the rates; "loss": the smoothed loss at each rate, before its update. Both lists are equally
            long.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls fastest from one rate to the next.

        Args:
            skip_begin: Number of rates to ignore at the beginning.
            skip_end: Number of rates to ignore at the end.

        Returns:
            The rate, or None if the curve is too short or the loss never falls.
        """
        index = self._find_steepest(skip_begin, skip_end)
        return None if index is None else self.results["lr"][index]

    def _find_steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        losses = np.array(self.results["loss"])
        indices = np.arange(len(losses))[skip_begin : len(losses) - skip_end]
        indices = indices[np.isfinite(losses[indices])]
        if len(indices) < 2:
            return None
        slopes = np.gradient(losses[indices])
        return int(indices[slopes.argmin()]) if slopes.min() < 0 else None

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Draw the curve with matplotlib.

        Args:
            suggest: Mark the suggestion.
            show: Show all figures of pyplot.
            ax: The axes to draw into; None: the axes of a new figure.

        Returns:
            The matplotlib figure with the curve.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ConfigError("plot needs matplotlib, which is not installed: pip install matplotlib.") from error
        figure, ax = pyplot.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss, smoothed")
        if suggest and (index := self._find_steepest()) is not None:
            rate, loss = (self.results[name][index] for name in ("lr", "loss"))
            ax.plot(rate, loss, "o", color="red", label=f"steepest: {rate:.3g}")
            ax.legend()
        if show:
            pyplot.show()
        return figure

    def write(self, path: Path) -> None:
        """Write the curve as CSV, with the columns `lr` and `loss`."""
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(self.results)
            rows.writerows(zip(*self.results.values(), strict=True))


@final
class RisingRateCallback(Callback):
    """Callback that trains each step with the next larger rate, and records the smoothed loss.

    The rate is that of the first parameter group. Other groups keep the ratios that their rates have when training
    begins.

    Args:
        curve: The curve to which rates and losses are appended.
        rates: The rates of the steps.
        early_stop_threshold: Factor of the smallest loss so far at which the search stops; None: never.
    """

    may_stop_at_steps = False
    needs_step_loss = True

    def __init__(self, curve: LearningRateCurve, rates: list[float], early_stop_threshold: float | None) -> None:
        self._curve, self._rates, self._threshold = curve, rates, early_stop_threshold
        self._average, self._least = 0.0, math.inf
        self._ratios: list[float] = []
        self._is_first = self._is_over = False

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Remove the schedules, and compute the ratios of the groups' rates."""
        trainer.run.optim.drop_schedulers()
        rates = [group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups]
        self._ratios = [rate / rates[0] if rates[0] else 1.0 for rate in map(float, rates)]

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Any) -> None:
        """Note that a step begins."""
        self._is_first = True

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: Any) -> None:
        """Set the rate of the update, and record the loss before it."""
        step, (rates, losses) = trainer.global_step, self._curve.results.values()
        for group, ratio in zip(optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = self._rates[step] * ratio
        if not self._is_first or step < len(rates):  # repeated by a closure or by fp16
            return
        self._is_first = False
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * float(trainer.step_loss())
        smoothed = self._average / (1 - _SMOOTHING ** (step + 1))
        rates.append(self._rates[step])
        losses.append(smoothed)
        explodes = self._threshold is not None and step > 1 and smoothed > self._threshold * self._least
        self._is_over = explodes or not math.isfinite(smoothed)
        if smoothed < self._least or step == 1:
            self._least = smoothed

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Stop if the loss has exploded."""
        trainer.should_stop |= self._is_over


def make_rising_rates(min_lr: float, max_lr: float, steps: int, mode: Mode) -> list[float]:
    """Return the rates of a search, both ends included.

    Raises:
        ConfigError: The bounds, the number of steps or the mode is invalid.
    """
    if not 0 < min_lr < max_lr or steps < 2 or mode not in ("exponential", "linear"):
        raise ConfigError(
            f"lr_find: expected 0 < min_lr < max_lr, at least 2 steps and the mode exponential or linear, found "
            f"min_lr={min_lr}, max_lr={max_lr}, {steps} steps and {mode!r}."
        )
    parts = [step / (steps - 1) for step in range(steps)]
    if mode == "linear":
        return [min_lr + (max_lr - min_lr) * part for part in parts]
    return [min_lr * (max_lr / min_lr) ** part for part in parts]
