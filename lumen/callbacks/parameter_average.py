"""Averages of parameters, EMA and SWA: Lumen evaluates and saves them, and leaves them in the task after `fit`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, final

import torch
from torch.optim import Optimizer

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.console import logger as _log
from lumen.data.nested import fill_tensor
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.strategies import sync_buffers
from lumen.task.task_module import TaskModule
from lumen.task.teacher import Averages, Place, find_places


class ParameterAverage(Callback, ABC):
    """Base class of callbacks that average parameters; a subclass says when the average begins and moves.

    Args:
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`; copy other buffers.
    """

    may_stop_at_steps = False

    def __init__(self, *, use_buffers: bool) -> None:
        self.use_buffers = use_buffers
        self._average: dict[str, torch.Tensor] = {}  # empty until the average begins
        self._updates = 0  # number of updates of the average
        self._places: dict[str, Place] = {}  # places of the averaged parameters and buffers
        self._averages = Averages({}, {})
        self._parameters: dict[str, torch.Tensor] = {}  # swapped-out parameters whose average has a different dtype
        self._is_swapped = False  # True during a validation, while the average replaces the parameters

    @property
    def average(self) -> Mapping[str, torch.Tensor]:
        """Averages by name of parameter and buffer, sharded under FSDP. Empty before the average begins."""
        return self._average

    @property
    def evaluated_state_key(self) -> str | None:
        """Key of the averages in `state_dict`, or None before the average begins."""
        return "average" if self._average else None

    def _get_average_to_save(self) -> dict[str, torch.Tensor]:
        if self._is_swapped:
            raise ConfigError(
                f"save_checkpoint: during a validation {type(self).__name__} replaces the parameters by their "
                "average. Save in on_train_epoch_end or on_step_checkpoint, after the validation."
            )
        return self._average

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Remove the average of an earlier `fit`."""
        if stage != "fit":
            return
        averages = [type(each).__name__ for each in trainer.callbacks if isinstance(each, ParameterAverage)]
        if len(averages) > 1:
            raise ConfigError(
                f"callbacks: {' and '.join(averages)} both average the parameters, but a run supports one average. "
                "Remove one of the callbacks."
            )
        self.load_state_dict({"average": {}, "updates": 0, "seen": 0, "epoch": None, "rates": []})

    def on_fit_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Begin the average, or move the averages of the checkpoint to the devices of their parameters."""
        if self._average:
            self._find_tensors(task)
        else:
            self._reset_average(trainer, task)

    def on_train_epoch_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Find the parameters and buffers again, because hooks may have replaced some."""
        if self._average:
            self._find_tensors(task)

    def _reset_average(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Prepare for a new run."""

    @abstractmethod
    def update(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Update the average if it is due.

        Lumen calls this before the average is evaluated, and before something other than training changes the
        parameters.
        """

    def _copy_parameters(self, task: TaskModule) -> None:
        """Begin the average with the present parameters."""
        found = find_places(task, buffers=self.use_buffers, persistent=True)
        self._average = {name: held[key].detach().clone() for name, (held, key) in found.items()}
        self._find_tensors(task)

    def _find_tensors(self, task: TaskModule) -> None:
        """Find the places of all parameters and of persistent buffers."""
        self._places = find_places(task, buffers=self.use_buffers, persistent=True)
        if differing := self._places.keys() ^ self._average.keys():
            raise ConfigError(
                f"{type(self).__name__}: the model and the average have different tensors: "
                f"{', '.join(sorted(differing)[:8])}. Resume with the model and the use_buffers of the original run. "
                "Add layers in configure_model, before the average begins."
            )
        for name, tensor in self._iterate_tensors():
            exact = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
            self._average[name] = self._average[name].to(tensor.device, exact)  # 16-bit averages would lose small moves
        self._averages = Averages({name: (self._average, name) for name in self._average}, self._places)

    def _iterate_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the averaged parameters and buffers by name."""
        return ((name, held[key]) for name, (held, key) in self._places.items())

    @contextmanager
    def validation_context(self, trainer: CallbackTrainer, task: TaskModule) -> Iterator[None]:
        """Replace the parameters by the average during a validation."""
        self.update(trainer, task)
        if self._average:
            self._find_tensors(task)
        self._swap_average()
        self._is_swapped = True
        try:
            if self._average:
                sync_buffers(trainer.strategy, task)  # Each rank has averaged its own buffers.
            yield
        finally:
            self._swap_average()
            self._is_swapped = False

    @torch.no_grad()
    def _swap_average(self) -> None:
        """Exchange the averages, if there are any, with the parameters and buffers."""
        for name, tensor in self._iterate_tensors() if self._average else ():
            average, before = self._average[name], tensor.detach().clone()
            fill_tensor(tensor, self._parameters.pop(name, average))
            if average.dtype == before.dtype:
                average.copy_(before)
            elif not self._is_swapped:
                self._parameters[name] = before  # The tensor cannot hold all digits of the average, so keep both.

    @torch.no_grad()
    def on_train_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Copy the average into the task, if there is one."""
        if not self._updates:
            _log.warning(
                "%s: the run ended before the average began, so the task keeps its parameters", type(self).__name__
            )
            return
        self._find_tensors(task)
        for name, tensor in self._iterate_tensors():
            fill_tensor(tensor, self._average[name])
        sync_buffers(trainer.strategy, task)


@final
class EMA(ParameterAverage):
    """Callback that keeps and evaluates an exponential moving average (EMA) of the parameters.

    After an update, `average = decay * average + (1 - decay) * parameter` (Polyak and Juditsky, Acceleration of
    Stochastic Approximation by Averaging, 1992, with exponential weights). The average begins as a copy of the
    parameters when training begins. An update that is skipped by fp16 or by a callback does not move the average.
    Validations in `fit` evaluate the average, so monitors, the best checkpoint and early stopping use its values;
    training continues with the parameters. After `fit`, the task holds the average.

    Checkpoints contain both: a run resumes exactly, under any strategy. Everything that loads weights (`ckpt_path`,
    `load_from_checkpoint`, `init_from`, `lumen export`) gets the average; with `average="parameters"` it gets the
    parameters. Under FSDP each process keeps the average of its shards.

    Args:
        decay: Share of the average that is kept, in [0, 1).
        update_every_n_steps: Steps between two updates of the average, at least 1.
        update_starting_at_step: The average copies the parameters until this step is done; None: moves from the first
            step on.
        update_starting_at_epoch: The average copies the parameters until this many epochs are done; None: moves from
            the first epoch on.
        warmup: Use smaller first decays: `(1 + n) / (10 + n)` in the n-th update of the average, if that is less.
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`, such as those of
            BatchNorm; copy other buffers. False: the average uses the buffers of the model.

    Raises:
        ConfigError: A value is out of range.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "device": "Leave it out: the average is on the devices of the parameters, sharded under FSDP.",
        "avg_fn": "Leave it out: decay and warmup define the average. For a different average write a callback.",
        "multi_avg_fn": "Leave it out: decay and warmup define the average. For a different average write a callback.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[None, ...]]] = {
        "device": (None,), "avg_fn": (None,), "multi_avg_fn": (None,),
    }  # fmt: skip

    @check_arguments
    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        *,
        warmup: bool = False,
        use_buffers: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, found {decay:g}.")
        check_at_least(1, update_every_n_steps=update_every_n_steps)
        super().__init__(use_buffers=use_buffers)
        self.decay, self.warmup, self.update_every_n_steps = decay, warmup, update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of their updates."""
        return {"average": self._get_average_to_save(), "seen": self._seen, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages of a checkpoint."""
        self._average, self._seen, self._updates = state["average"], state["seen"], state["updates"]

    def _reset_average(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        self._copy_parameters(task)
        self._seen = trainer.global_step  # the newest step that `update` has handled

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Move the average after an update, unless a validation of this step has moved it."""
        self.update(trainer, task)

    def update(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Move the average if it is due and the parameters were updated since the last call."""
        if trainer.global_step == self._seen:
            return
        self._seen = step = trainer.global_step
        begins_at, epoch = self.update_starting_at_step or 0, self.update_starting_at_epoch or 0
        if step <= begins_at or trainer.progress.epochs_begun <= epoch:
            self._averages.update_averages(0.0)
        elif step % self.update_every_n_steps == 0:
            decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
            self._updates += 1
            self._averages.update_averages(decay)


@final
class SWA(ParameterAverage):
    """Callback for stochastic weight averaging (SWA): the mean of the parameters at the ends of the last epochs.

    From `swa_epoch_start` on, each epoch is trained at one learning rate. The rate moves from its previous value to
    `swa_lrs` within `annealing_epochs` epochs, whatever schedules set. At the end of each epoch the parameters enter
    the mean (Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, 2018). Running
    statistics, such as those of BatchNorm, are averaged too, so they need no extra pass over the data. Once there is a
    mean, validations in `fit` evaluate it; training continues with the parameters. After `fit`, the task holds the
    mean.

    Checkpoints contain both: a run resumes exactly, under any strategy. Everything that loads weights (`ckpt_path`,
    `load_from_checkpoint`, `init_from`, `lumen export`) gets the mean; with `average="parameters"` it gets the
    parameters. If a run ends in the middle of an epoch, this epoch does not enter the mean.

    Args:
        swa_lrs: The final learning rate, > 0: one for all parameter groups, or a list with one for each.
        swa_epoch_start: The first epoch, from 0, whose end counts; below 1.0 a share of `max_epochs`.
        annealing_epochs: Epochs from the previous rate to `swa_lrs`; 0: at once.
        annealing_strategy: Shape of the annealing: "cos" or "linear".
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`; copy other buffers.
            False: the mean uses the buffers of the model.

    Raises:
        ConfigError: A value is out of range; a share is given, but the run has no `max_epochs`; or the number of rates
            differs from the number of parameter groups.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "device": "Leave it out: the mean is on the devices of the parameters, sharded under FSDP.",
        "avg_fn": "Leave it out: SWA is the plain mean. For a decay use lumen.EMA.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[str | None, ...]]] = {"device": (None, "cpu"), "avg_fn": (None,)}

    @check_arguments
    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        *,
        use_buffers: bool = True,
    ) -> None:
        super().__init__(use_buffers=use_buffers)
        check_at_least(0, swa_epoch_start=swa_epoch_start, annealing_epochs=annealing_epochs)
        if isinstance(swa_epoch_start, float) and swa_epoch_start >= 1 and not swa_epoch_start.is_integer():
            raise ConfigError(f"SWA: swa_epoch_start is a share below 1 or a whole epoch, found {swa_epoch_start:g}.")
        if min(swa_lrs if isinstance(swa_lrs, list) else [swa_lrs], default=0.0) <= 0:
            raise ConfigError(f"SWA: swa_lrs must be above 0, found {swa_lrs}.")
        self.swa_lrs, self.swa_epoch_start = swa_lrs, swa_epoch_start
        self.annealing_epochs, self.annealing_strategy = annealing_epochs, annealing_strategy
        self._rates: list[float] = []  # rates of the groups before annealing
        self._epoch: int | None = None  # the last averaged epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the mean, the number of its epochs, and the rates before annealing."""
        return {
            "average": self._get_average_to_save(), "updates": self._updates, "epoch": self._epoch,
            "rates": self._rates,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the mean of a checkpoint."""
        self._average, self._updates = state["average"], state["updates"]
        self._epoch, self._rates = state["epoch"], state["rates"]

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Compute the first averaged epoch, and check the number of rates."""
        start = self.swa_epoch_start
        if isinstance(start, float) and start < 1:
            if trainer.max_epochs is None or trainer.max_epochs < 0:
                raise ConfigError(
                    f"SWA: swa_epoch_start={start:g} is a share of max_epochs, which this run does not have. Set "
                    "swa_epoch_start to an epoch."
                )
            start = trainer.max_epochs * start
        self._first = int(start + 1e-9)  # the first averaged epoch; 0.29 * 100 is less than 29
        self._find_final_rates(len(_get_param_groups(trainer)))

    def on_before_zero_grad(self, trainer: CallbackTrainer, task: TaskModule, optimizer: Optimizer) -> None:
        """Set the rates of the step, whatever a schedule has set."""
        if (passed := trainer.current_epoch - self._first) < 0:
            return
        groups = _get_param_groups(trainer)
        self._rates += [float(group["lr"]) for group in groups[len(self._rates) :]]  # Hooks may add groups.
        done = min(1.0, passed / self.annealing_epochs) if self.annealing_epochs else 1.0
        share = (1.0 - math.cos(math.pi * done)) / 2.0 if self.annealing_strategy == "cos" else done
        for group, before, after in zip(groups, self._rates, self._find_final_rates(len(groups)), strict=True):
            group["lr"] = after * share + before * (1.0 - share)

    def _find_final_rates(self, groups: int) -> list[float]:
        """Return the final rate of each group."""
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * groups
        if len(rates) != groups:
            raise ConfigError(
                f"SWA: swa_lrs has {len(rates)} rates, but there are {groups} parameter groups. Give one rate for "
                "each group."
            )
        return rates

    def on_train_epoch_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Add the parameters to the mean, unless the validation at the end of the epoch has added them."""
        self.update(trainer, task)

    def update(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Add the parameters to the mean, once per epoch, when all batches of the epoch are done."""
        epoch = trainer.current_epoch
        if not trainer.is_epoch_end or epoch < self._first or epoch == self._epoch:
            return
        self._epoch = epoch
        if self._average:
            self._averages.update_averages(self._updates / (self._updates + 1))
        else:
            self._copy_parameters(task)
        self._updates += 1


def _get_param_groups(trainer: CallbackTrainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
