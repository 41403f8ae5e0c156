"""Callback: code that runs beside any task, at the places drawn below."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, final

if TYPE_CHECKING:
    import torch

    from lumen.task.running_trainer import AnyTrainer
    from lumen.task.task_module import TaskModule


@final
class _OfTask:
    """A method that a task has and a callback has not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, callback: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name}. Write task.{self._name}(...).")


class Callback:
    """Subclass it and define the hooks you need; a hook that nobody defines costs nothing.

    Every hook of a callback exists on the task too, without `trainer` and `task`. A hook may leave out the last of its
    arguments: `on_train_batch_end(self, outputs)` of a task, or `*_` of a callback. The map below is the order of all
    calls; a test follows it line by line and compares that with what was called. After a name stands whose it is;
    where nothing stands the callbacks have it, in their order, and then the task. What is `(data)` is the data
    module's, or the task's if there is none; the three hooks of transfers are the task's too where the data module
    lacks them.

        fit:
            configure_callbacks (task)                  # they join the trainer's, and have the hooks below
            prepare_data (data module, task)            # on one process of each node
            setup (data module, callbacks, task)
            configure_model (task)                      # once in the life of a task; then its parameters are loaded
            if resumed:
                on_load_checkpoint (task)
                load_state_dict (data module)
                on_load_checkpoint (callbacks)
            configure_optimizers (task)
            if resumed:
                load_state_dict (callbacks)
            train_dataloader (data)                     # again in every reload_dataloaders_every_n_epochs-th epoch,
            val_dataloader (data)                       #   before its start
            on_fit_start
            if new:
                on_sanity_check_start
                validation
                on_sanity_check_end
            on_train_start
            if saving:
                checkpoint                              # a trial, that writes nothing
            for each epoch:
                if beginning:                           # one that a checkpoint has left in its middle goes on
                    on_train_epoch_start
                for each step:
                    for each micro-batch:
                        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer (data)
                        on_train_batch_start            # -1 ends the epoch here
                        if first:
                            on_before_zero_grad         # before the forward: till here the last gradients can be read
                            if automatic:
                                optimizer_zero_grad (task)
                        training_step (task)
                        if manual:                      # what training_step calls: here manual_backward and step, once
                            on_before_backward
                            backward (task)
                            on_after_backward
                            on_before_optimizer_step
                        if automatic:
                            on_before_backward
                            backward (task)
                            on_after_backward
                            if last:
                                on_before_optimizer_step    # gradients are complete and unscaled, not clipped
                                configure_gradient_clipping, clip_gradients, optimizer_step (task)
                                lr_scheduler_step (task)    # of schedules that count steps
                        on_train_batch_end
                    if validating:
                        on_validation_model_zero_grad (task)    # if it is overridden; else gradients stay
                        validation
                    if inside the epoch:
                        boundary
                on_train_epoch_end                      # also where the run ends inside the epoch, after a boundary
                if complete:
                    if automatic:
                        lr_scheduler_step (task)        # of schedules that count epochs
                    boundary
            on_train_end
            on_fit_end
            teardown (data module, callbacks, task)     # whatever happens; where it fails, on_exception comes before

        boundary:
            on_step_end
            on_step_checkpoint (callbacks)
            if saving:
                checkpoint                              # by ModelCheckpoint, which comes after other callbacks
            on_step_checkpoint (task)

        checkpoint:
            state_dict (callbacks, data module)
            on_save_checkpoint

        validation:                                     # test and prediction likewise, with their own names
            on_validation_model_eval (task)             # puts its modules into eval mode
            on_validation_start
            on_validation_epoch_start
            for each batch:
                on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer (data)
                on_validation_batch_start
                validation_step (task)
                on_validation_batch_end
            on_validation_epoch_end
            on_validation_end
            on_validation_model_train (task)            # if it is overridden; else modes are as they were

        validate:                                       # so test and predict
            configure_callbacks (task)
            prepare_data (data module, task)
            setup (data module, callbacks, task)
            configure_model (task)
            val_dataloader (data)
            validation
            teardown (data module, callbacks, task)

    A **boundary** is the one moment of each step at which nothing is half done: after its update and its validation,
    and for an epoch's last step after that epoch's end. What acts there does so in `on_step_end`; whether the run ends
    here is decided then, and checkpoints are made in `on_step_checkpoint`, which is also called where a run is asked to
    leave in the middle of a step's validation. With manual optimization each micro-batch is a step. An optimizer with
    a closure repeats what lies between `on_before_backward` and the clipping.
    """

    #: Its hooks between the last backward of a step and the step's end (`on_after_backward`,
    #: `on_before_optimizer_step`, `on_train_batch_end`, `on_step_end`) may set `trainer.should_stop`. Where a callback
    #: has them, the processes agree at the end of each step, which costs a message; one that never stops says False.
    stops_at_steps: bool = True
    #: It asks for `trainer.step_loss()`: the parts of each step's loss are then kept for it.
    reads_step_loss: bool = False

    log, log_dict = _OfTask(), _OfTask()

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

    @property
    def evaluated_state(self) -> str | None:
        """Key of the tensors in `state_dict`, by name, that `around_validation` puts in the place of the parameters.

        A checkpoint is then read with these tensors, by all that ask for weights. None: validations evaluate the
        parameters.
        """
        return None

    def on_save_checkpoint(self, trainer: AnyTrainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint; also called once when training begins, as a trial.

        The dictionary is this callback's alone. It does not hold what Lightning keeps there (`state_dict`, `epoch`): to
        ask for that is an error that says where it is.
        """

    def on_load_checkpoint(self, trainer: AnyTrainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Get back what `on_save_checkpoint` added: the model is loaded, the optimizers are not built.

        `load_state_dict`, which says how tensors come back under FSDP, follows when they are.
        """

    def around_validation(self, trainer: AnyTrainer, task: TaskModule) -> AbstractContextManager[Any]:
        """The context of each validation in `fit`, from before `on_validation_start` on.

        It is left however the validation ends, so that a callback may put something in the task's place meanwhile. No
        gradients are made in it. Every rank enters it; under FSDP each holds its shards.
        """
        return nullcontext()

    def setup(self, trainer: AnyTrainer, task: TaskModule, stage: str) -> None:
        """Prepare for a stage: "fit", "validate", "test" or "predict"."""

    def on_fit_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """`fit` begins; optimizers exist, a resumed state is loaded."""

    def on_sanity_check_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The sanity check begins."""

    def on_sanity_check_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The sanity check ends."""

    def on_train_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Training begins, after the sanity check."""

    def on_train_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """An epoch begins."""

    def on_train_batch_start(self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch; -1 ends the epoch here."""

    def on_before_zero_grad(self, trainer: AnyTrainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of the last step are dropped."""

    def on_before_backward(self, trainer: AnyTrainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Before backward of one micro-batch."""

    def on_after_backward(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """After backward of one micro-batch; gradients are partial sums."""

    def on_before_optimizer_step(self, trainer: AnyTrainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    def on_train_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a micro-batch, and after the update if it was a step's last; gradients can still be read."""

    def on_validation_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A validation begins."""

    def on_validation_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the validation data begins."""

    def on_validation_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a validation batch."""

    def on_validation_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the validation data ends; what is logged here joins its values."""

    def on_validation_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A validation ends."""

    def on_train_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """An epoch ends, after its validation."""

    def on_step_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A step is complete, and what is changed here is a part of it; the place to set `trainer.should_stop`."""

    def on_step_checkpoint(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """All have acted on a complete step: `trainer.save_checkpoint` is exact here."""

    def on_train_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Training ends."""

    def on_fit_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """`fit` ends."""

    def on_test_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A test begins."""

    def on_test_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the test data begins."""

    def on_test_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a test batch."""

    def on_test_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a test batch."""

    def on_test_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the test data ends."""

    def on_test_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A test ends."""

    def on_predict_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A prediction begins."""

    def on_predict_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the prediction data begins."""

    def on_predict_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """After a prediction batch."""

    def on_predict_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """The pass over the prediction data ends."""

    def on_predict_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """A prediction ends."""

    def on_exception(self, trainer: AnyTrainer, task: TaskModule, exception: BaseException) -> None:
        """The run ends with an error or a stop request."""

    def teardown(self, trainer: AnyTrainer, task: TaskModule, stage: str) -> None:
        """Clean up after a stage."""
