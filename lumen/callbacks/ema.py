"""An exponential moving average of the parameters, which is evaluated, saved and exported in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from lumen.callbacks.parameter_average import ParameterAverage
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


@final
class EMA(ParameterAverage):
    """Keeps an exponential moving average of the parameters, and evaluates it.

    After an update `average = decay * average + (1 - decay) * parameter` (Polyak and Juditsky, Acceleration of
    Stochastic Approximation by Averaging, 1992, with exponential weights). It begins as the parameters are when
    training does. An update that fp16 or a callback has left out does not move it. Validations in `fit` are of the
    average, so monitors, the best checkpoint and early stopping are too; training goes on with the parameters. When
    `fit` is over, the task holds the average.

    Checkpoints hold both: a run resumes exactly, under any strategy. Whatever asks for weights (`ckpt_path`,
    `load_from_checkpoint`, `init_from`, `lumen export`) gets the average, with `average="parameters"` the parameters.
    Under FSDP each process keeps the average of its shards.

    Args:
        decay: Share of the average that is kept, in [0, 1).
        update_every_n_steps: Steps between two updates of the average, at least 1.
        update_starting_at_step: Until this step is done the average follows the parameters; None: from the first on.
        update_starting_at_epoch: The same, counted in epochs; None: from the first on.
        warmup: The first decays are smaller: `(1 + n) / (10 + n)` in the n-th update of the average, if that is less.
        use_buffers: Average running statistics too, the floating-point buffers named `running_*`, such as BatchNorm's;
            copy other buffers. False: the average has the buffers of the model.

    Raises:
        ConfigError: A value is out of range.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "device": "Leave it out: the average lies where the parameters do, under FSDP in shards.",
        "avg_fn": "Leave it out: decay and warmup say how; another average is a callback of your own.",
        "multi_avg_fn": "Leave it out: decay and warmup say how; another average is a callback of your own.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[None, ...]]] = {
        "device": (None,), "avg_fn": (None,), "multi_avg_fn": (None,),
    }  # fmt: skip

    @checked
    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        warmup: bool = False,
        use_buffers: bool = True,
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"EMA: decay must be at least 0 and less than 1, found {decay:g}.")
        at_least(1, update_every_n_steps=update_every_n_steps)
        super().__init__(use_buffers)
        self.decay, self.warmup = decay, warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._seen = 0  # the newest step that was looked at

    def state_dict(self) -> dict[str, Any]:
        """The averages, and how often they have moved."""
        return {"average": self._average_to_save(), "seen": self._seen, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the averages of a checkpoint."""
        self._average, self._seen, self._updates = state["average"], state["seen"], state["updates"]

    def _begin(self, trainer: Trainer, task: TaskModule) -> None:
        self._copy(task)
        self._seen = trainer.global_step

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average after an update, unless a validation of this step has."""
        self.update(trainer, task)

    def update(self, trainer: Trainer, task: TaskModule) -> None:
        """Move the average if there was an update since it was looked at, and it is due."""
        if trainer.global_step == self._seen:
            return
        self._seen = step = trainer.global_step
        begins_at, epoch = self.update_starting_at_step or 0, self.update_starting_at_epoch or 0
        if step <= begins_at or trainer.progress.epochs_begun <= epoch:
            self._averages.move(0.0)
        elif step % self.update_every_n_steps == 0:
            decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
            self._updates += 1
            self._averages.move(decay)
