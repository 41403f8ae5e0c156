"""The mean of the parameters over the last epochs, trained at a rate of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from lumen.callbacks.parameter_average import ParameterAverage
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class SWA(ParameterAverage):
    """Stochastic weight averaging: the mean of what the parameters are at the ends of the last epochs.

    From `swa_epoch_start` on, each epoch is trained at one learning rate, which goes from what it was to `swa_lrs`
    in `annealing_epochs` epochs, whatever schedules say; at its end the parameters enter the mean (Izmailov et al.,
    Averaging Weights Leads to Wider Optima and Better Generalization, 2018). Running statistics, such as those of
    BatchNorm, are averaged too, so no pass over the data is needed for them. Once there is a mean, validations in
    `fit` are of it; training goes on with the parameters. When `fit` is over, the task holds the mean.

    Checkpoints hold both: a run resumes exactly, under any strategy. Whatever asks for weights (`ckpt_path`,
    `load_from_checkpoint`, `init_from`, `lumen export`) gets the mean, with `average="parameters"` the parameters. The
    epoch in whose middle a run ends is not in the mean.

    Args:
        swa_lrs: The learning rate in the end, > 0: of all parameter groups, or of each.
        swa_epoch_start: The first epoch, from 0, whose end counts; below 1.0 a share of `max_epochs`.
        annealing_epochs: Epochs from the rate before to `swa_lrs`; 0: at once.
        annealing_strategy: How the rate goes there: "cos", or "linear".
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`; copy other buffers.
            False: the mean has the buffers of the model.

    Raises:
        ConfigError: A value is out of range; a share is given, and the run has no `max_epochs`; the optimizer has
            another number of parameter groups.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "device": "Leave it out: the mean lies where the parameters do, under FSDP in shards.",
        "avg_fn": "Leave it out: SWA is the mean; lumen.EMA is one with a decay.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[str | None, ...]]] = {"device": (None, "cpu"), "avg_fn": (None,)}

    @checked
    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        use_buffers: bool = True,
    ) -> None:
        super().__init__(use_buffers)
        at_least(0, swa_epoch_start=swa_epoch_start, annealing_epochs=annealing_epochs)
        if isinstance(swa_epoch_start, float) and swa_epoch_start >= 1 and not swa_epoch_start.is_integer():
            raise ConfigError(f"SWA: swa_epoch_start is a share below 1 or a whole epoch, found {swa_epoch_start:g}.")
        if min(swa_lrs if isinstance(swa_lrs, list) else [swa_lrs], default=0.0) <= 0:
            raise ConfigError(f"SWA: swa_lrs must be above 0, found {swa_lrs}.")
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self._first = 0  # epoch that is averaged
        self._rates: list[float] = []  # of the groups, before they are annealed

    def state_dict(self) -> dict[str, Any]:
        """The mean, of how many epochs it is, and where the rates came from."""
        return {"average": self._average_to_save(), "updates": self._updates, "rates": self._rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the mean of a checkpoint."""
        self._average, self._updates, self._rates = state["average"], state["updates"], state["rates"]

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Find the first epoch, and a rate for each group."""
        start = self.swa_epoch_start
        if isinstance(start, float) and start < 1:
            if trainer.max_epochs is None or trainer.max_epochs < 0:
                raise ConfigError(
                    f"SWA: swa_epoch_start={start:g} is a share of max_epochs, which this run does not have. Name the "
                    "epoch."
                )
            start = trainer.max_epochs * start
        self._first = int(start)
        self._ends(len(_groups(trainer)))

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Set the rates of the step, whatever a schedule has set."""
        if (passed := trainer.current_epoch - self._first) < 0:
            return
        groups = _groups(trainer)
        self._rates += [float(group["lr"]) for group in groups[len(self._rates) :]]  # hooks may add some
        done = min(1.0, passed / self.annealing_epochs) if self.annealing_epochs else 1.0
        share = (1.0 - math.cos(math.pi * done)) / 2.0 if self.annealing_strategy == "cos" else done
        for group, before, after in zip(groups, self._rates, self._ends(len(groups)), strict=True):
            group["lr"] = after * share + before * (1.0 - share)

    def _ends(self, groups: int) -> list[float]:
        """The rates in the end, of each group."""
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * groups
        if len(rates) != groups:
            raise ConfigError(f"SWA: swa_lrs has {len(rates)} rates, and there are {groups} parameter groups.")
        return rates

    def on_train_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Take the parameters into the mean, unless the validation at the end of the epoch has."""
        self.update(trainer, task)

    def update(self, trainer: Trainer, task: TaskModule) -> None:
        """Take the parameters into the mean, once, when all batches of an epoch are done."""
        if not trainer.is_epoch_end or trainer.current_epoch - self._first < self._updates:
            return
        if self._average:
            self._averages.move(self._updates / (self._updates + 1))
        else:
            self._copy(task)
        self._updates += 1


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
