"""Callback: code that runs beside any task, at the places drawn below."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer


class Callback:
    """Subclass it and define the hooks you need; a hook that nobody defines costs nothing.

    Every hook exists on the task too, without `trainer` and `task`; callbacks run first, in their order, then the
    task. The order, as a test records it:

        prepare_data                                    # the data module's, then the task's; likewise setup
        setup
        configure_model
        on_load_checkpoint                              # when resuming
        configure_optimizers
        on_fit_start
        on_sanity_check_start                           # when starting, not when resuming
            ... validation ...
        on_sanity_check_end
        on_train_start
        for each epoch:
            on_train_epoch_start
            for each optimizer step:
                for each micro-batch:
                    on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer
                    on_train_batch_start
                    on_before_zero_grad                 # first micro-batch of the step, before its forward, so that
                    training_step                       #   the last gradients can be read until here
                    on_before_backward
                    on_after_backward
                    on_before_optimizer_step            # last micro-batch: gradients complete, unscaled, not clipped
                    ... optimizer.step, schedulers ...
                    on_train_batch_end
                if a validation is due:
                    on_validation_start
                    on_validation_epoch_start
                    for each batch:
                        on_validation_batch_start
                        validation_step
                        on_validation_batch_end
                    on_validation_epoch_end
                    on_validation_end
                on_step_end, on_step_checkpoint            # not after an epoch's last step
            on_train_epoch_end
            ... epoch schedulers ...
            on_step_end, on_step_checkpoint
        on_train_end
        on_fit_end
        teardown

    `test` and `predict` follow the same pattern with their own names. A **boundary** is the one moment of each step at
    which nothing is half done: after its update and its validation, and for an epoch's last step after that epoch's
    end. What acts there does so in `on_step_end`; whether the run ends here is decided then, and checkpoints are made
    in `on_step_checkpoint`, which is also called where a run is asked to leave in the middle of a step's validation.
    """

    #: Its hooks between the last backward of a step and the step's end (`on_after_backward`,
    #: `on_before_optimizer_step`, `on_train_batch_end`, `on_step_end`) may set `trainer.should_stop`. Where a callback
    #: has them, the processes agree at the end of each step, which costs a message; one that never stops says False.
    stops_at_steps: bool = True

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints, by which a resumed run finds its owner in any order of a list.

        Several of one class that have a state must each have their own, and a state that means nothing under other
        settings needs one that names these: `self._generate_state_key(decay=self.decay)`.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **settings: Any) -> str:
        """A `state_key` from the class and some settings."""
        return f"{type(self).__qualname__}{settings!r}"

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, under any strategy and with any number of processes.

        Where FSDP cuts up the parameters, a tensor that was cut up when it was saved comes cut up over the processes of
        now. Of a run that cut up nothing, a tensor does so that says whose it is: it has the shape of a parameter and
        lies under its name, as in `{name: average for name, average in ...}`. Every other one comes whole, on the host;
        keep what belongs to parameters in such dictionaries, not in lists.
        """

    def on_save_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint; also called once when training begins, as a trial.

        The dictionary is this callback's alone. It does not hold what Lightning keeps there (`state_dict`, `epoch`): to
        ask for that is an error that says where it is.
        """

    def on_load_checkpoint(self, trainer: Trainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Get back what `on_save_checkpoint` added: the model is loaded, the optimizers are not built.

        `load_state_dict`, which says how tensors come back under FSDP, follows when they are.
        """

    def around_validation(self, trainer: Trainer, task: TaskModule) -> AbstractContextManager[Any]:
        """The context of each validation in `fit`, from before `on_validation_start` on.

        It is left however the validation ends, so that a callback may put something in the task's place meanwhile. No
        gradients are made in it. Every rank enters it; under FSDP each holds its shards.
        """
        return nullcontext()

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Prepare for a stage: "fit", "validate", "test" or "predict"."""

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """`fit` begins; optimizers exist, a resumed state is loaded."""

    def on_sanity_check_start(self, trainer: Trainer, task: TaskModule) -> None:
        """The sanity check begins."""

    def on_sanity_check_end(self, trainer: Trainer, task: TaskModule) -> None:
        """The sanity check ends."""

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Training begins, after the sanity check."""

    def on_train_epoch_start(self, trainer: Trainer, task: TaskModule) -> None:
        """An epoch begins."""

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch; -1 ends the epoch here."""

    def on_before_zero_grad(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of the last step are dropped."""

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Before backward of one micro-batch."""

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """After backward of one micro-batch; gradients are partial sums."""

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch, and after the update if it was a step's last; gradients can still be read."""

    def on_validation_start(self, trainer: Trainer, task: TaskModule) -> None:
        """A validation begins."""

    def on_validation_epoch_start(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the validation data begins."""

    def on_validation_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the validation data ends; what is logged here joins its values."""

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """A validation ends."""

    def on_train_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """An epoch ends, after its validation."""

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """A step is complete, and what is changed here is a part of it; the place to set `trainer.should_stop`."""

    def on_step_checkpoint(self, trainer: Trainer, task: TaskModule) -> None:
        """All have acted on a complete step: `trainer.save_checkpoint` is exact here."""

    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Training ends."""

    def on_fit_end(self, trainer: Trainer, task: TaskModule) -> None:
        """`fit` ends."""

    def on_test_start(self, trainer: Trainer, task: TaskModule) -> None:
        """A test begins."""

    def on_test_epoch_start(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the test data begins."""

    def on_test_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test batch."""

    def on_test_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the test data ends."""

    def on_test_end(self, trainer: Trainer, task: TaskModule) -> None:
        """A test ends."""

    def on_predict_start(self, trainer: Trainer, task: TaskModule) -> None:
        """A prediction begins."""

    def on_predict_epoch_start(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the prediction data begins."""

    def on_predict_batch_start(
        self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """The pass over the prediction data ends."""

    def on_predict_end(self, trainer: Trainer, task: TaskModule) -> None:
        """A prediction ends."""

    def on_exception(self, trainer: Trainer, task: TaskModule, exception: BaseException) -> None:
        """The run ends with an error or a stop request."""

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Clean up after a stage."""
