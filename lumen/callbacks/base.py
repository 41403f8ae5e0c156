"""`Callback`: code that a run calls at the places listed in the docstring of the class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

from lumen.errors.arguments import LightningAttributeErrors
from lumen.errors.renamed import RenamedMembers

if TYPE_CHECKING:
    import torch

    from lumen.task.running_trainer import AnyTrainer
    from lumen.task.task_module import TaskModule


_TASKS: dict[int, TaskModule] = {}  # task of the run in progress by id of its callback, which may have no hash


@contextmanager
def attach_callbacks(callbacks: Iterable[Callback], task: TaskModule) -> Iterator[None]:
    """Let `log` and `log_dict` of callbacks log for a task within the context. A copy of a callback has no task."""
    before = dict(_TASKS)
    _TASKS.update({id(each): task for each in callbacks})
    try:
        yield
    finally:
        _TASKS.clear()
        _TASKS.update(before)


@final
class _TaskMethod:
    """Method of the task of the run in progress, for callbacks."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, callback: Callback | None, owner: type) -> Any:
        if callback is None:
            return self
        if id(callback) not in _TASKS:
            raise AttributeError(
                f"{owner.__name__}.{self._name} was called outside of a run. Call it in a hook that the trainer calls, "
                f"or call task.{self._name}."
            )
        return getattr(_TASKS[id(callback)], self._name)


#: New names of members, by the names of earlier versions.
_RENAMED = {
    "around_validation": "validation_context",
    "evaluated_state": "evaluated_state_key",
    "reads_step_loss": "needs_step_loss",
    "stops_at_steps": "may_stop_at_steps",
}


class Callback(RenamedMembers, LightningAttributeErrors, renamed=_RENAMED):
    """Base class of callbacks. Subclass it and define the hooks you need; an undefined hook costs no time.

    The task has the same hooks, without the arguments `trainer` and `task`. A hook may omit its last arguments:
    `on_train_batch_end(self, outputs)` of a task, or `*_` of a callback.

    The map below lists all calls in order; a test compares it with the calls of real runs. The parentheses after a name
    say who defines the hook. Without parentheses, Lumen calls the callbacks in their order, then the task. `(data)` is
    the data module, or the task if the run has no data module. Transfer hooks are the task's too where the data module
    lacks them.

        fit:
            configure_callbacks (task)                  # its callbacks join those of the trainer
            prepare_data (data module, task)            # on one process of each node
            setup (data module, callbacks, task)
            configure_model (task)                      # once per task object; then the parameters are loaded
            if resumed:
                on_load_checkpoint (task)
                load_state_dict (data module)
                on_load_checkpoint (callbacks)
            configure_optimizers (task)
            if resumed:
                load_state_dict (callbacks)
            train_dataloader (data)                     # again before every reload_dataloaders_every_n_epochs-th epoch
            val_dataloader (data)                       # likewise
            on_fit_start
            if new:
                on_sanity_check_start
                validation
                on_sanity_check_end
            on_train_start
            if saving:
                checkpoint                              # a trial that writes nothing
            for each epoch:
                if beginning:                           # not if a checkpoint resumes in the middle of the epoch
                    on_train_epoch_start
                for each step:
                    for each micro-batch:
                        on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer (data)
                        on_train_batch_start            # -1 ends the epoch here
                        if first:
                            on_before_zero_grad         # last chance to read the gradients of the previous step
                            if automatic:
                                optimizer_zero_grad (task)
                        training_step (task)
                        if manual:                      # calls of training_step: here one manual_backward and one step
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
                                lr_scheduler_step (task)    # for schedules with interval "step"
                        on_train_batch_end
                    if validating:
                        on_validation_model_zero_grad (task)    # only if overridden; otherwise gradients are kept
                        validation
                    if inside the epoch:
                        boundary
                on_train_epoch_end                      # also if the run ends inside the epoch, after a boundary
                if complete:
                    if automatic:
                        lr_scheduler_step (task)        # for schedules with interval "epoch"
                    boundary
            on_train_end
            on_fit_end
            teardown (data module, callbacks, task)     # always; after an exception, on_exception comes first

        boundary:
            on_step_end
            on_step_checkpoint (callbacks)
            if saving:
                checkpoint                              # by ModelCheckpoint, which runs after the other callbacks
            on_step_checkpoint (task)

        checkpoint:
            state_dict (callbacks, data module)
            on_save_checkpoint

        validation:                                     # test and prediction are alike, with their own names
            on_validation_model_eval (task)             # puts the modules into eval mode
            on_validation_start
            on_validation_epoch_start
            for each batch:
                on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer (data)
                on_validation_batch_start
                validation_step (task)
                on_validation_batch_end
            on_validation_epoch_end
            on_validation_end
            on_validation_model_train (task)            # only if overridden; otherwise Lumen restores the modes

        validate:                                       # test and predict are alike
            configure_callbacks (task)
            prepare_data (data module, task)
            setup (data module, callbacks, task)
            configure_model (task)
            val_dataloader (data)
            validation
            teardown (data module, callbacks, task)

    A **boundary** is the end of a step: after its update and its validation, and for the last step of an epoch after
    the end of the epoch. Callbacks act on the complete step in `on_step_end`. Lumen then decides if the run ends here.
    Callbacks save checkpoints in `on_step_checkpoint`. Lumen also calls `on_step_checkpoint` if the run is asked to
    stop in the middle of a step's validation. With manual optimization each micro-batch is a step. An optimizer with a
    closure repeats the calls from `on_before_backward` to the clipping.
    """

    #: True if the hooks between the last backward and the end of a step (`on_after_backward`,
    #: `on_before_optimizer_step`, `on_train_batch_end`, `on_step_end`) may set `trainer.should_stop`. The processes
    #: then agree at the end of each step, which costs one message. Set False in a callback that never stops a run.
    may_stop_at_steps: bool = True
    #: True if this callback calls `trainer.step_loss()`. Lumen then keeps the parts of each step's loss.
    needs_step_loss: bool = False

    #: `self.log` and `self.log_dict` in a hook are the methods of the task.
    log, log_dict = _TaskMethod(), _TaskMethod()

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints; a resumed run finds the state by this name.

        The order of the callbacks may change between runs. Callbacks of one class that have a state need different
        keys. If the state is only valid for some settings, include these settings in the key:
        `self._generate_state_key(decay=self.decay)`.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **settings: Any) -> str:
        """Return a `state_key` made of the class name and some settings."""
        return f"{type(self).__qualname__}{settings!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors to save in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, under any strategy and with any number of processes.

        Under FSDP, a tensor that was sharded when it was saved is returned sharded over the present processes. A tensor
        of an unsharded run is sharded too if it belongs to a parameter: it has the parameter's shape and its name as
        key, as in `{name: average for name, average in ...}`. All other tensors are returned unsharded, on the CPU.
        Keep tensors that belong to parameters in such dictionaries, not in lists.
        """

    @property
    def evaluated_state_key(self) -> str | None:
        """Key in `state_dict` of the tensors, by parameter name, that `validation_context` swaps in for the parameters.

        Everything that loads weights from a checkpoint then gets these tensors. None: validations evaluate the
        parameters.
        """
        return None

    def on_save_checkpoint(self, trainer: AnyTrainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint. Lumen also calls this once when training begins, as a trial.

        The dictionary belongs to this callback only. It lacks the keys that Lightning stores there (`state_dict`,
        `epoch`). Reading such a key raises an error that says where its value is.
        """

    def on_load_checkpoint(self, trainer: AnyTrainer, task: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added. The model is loaded; the optimizers are not built yet.

        Lumen calls `load_state_dict` later, after building the optimizers. Its docstring says how tensors are returned
        under FSDP.
        """

    def validation_context(self, trainer: AnyTrainer, task: TaskModule) -> AbstractContextManager[Any]:
        """Return the context of each validation in `fit`, entered before `on_validation_start`.

        The context is exited however the validation ends, so a callback may replace parameters for its duration. No
        gradients are computed inside. Every rank enters the context; under FSDP each rank holds its shards.
        """
        return nullcontext()

    def setup(self, trainer: AnyTrainer, task: TaskModule, stage: str) -> None:
        """Prepare for a stage: "fit", "validate", "test" or "predict"."""

    def on_fit_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when `fit` begins; the optimizers exist and a resumed state is loaded."""

    def on_sanity_check_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the sanity check begins."""

    def on_sanity_check_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the sanity check ends."""

    def on_train_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when training begins, after the sanity check."""

    def on_train_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when an epoch begins."""

    def on_train_batch_start(self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int) -> int | None:
        """Run before a micro-batch; return -1 to end the epoch here."""

    def on_before_zero_grad(self, trainer: AnyTrainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Run before the gradients of the previous step are cleared."""

    def on_before_backward(self, trainer: AnyTrainer, task: TaskModule, loss: torch.Tensor) -> None:
        """Run before the backward of one micro-batch."""

    def on_after_backward(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run after the backward of one micro-batch; gradients are partial sums."""

    def on_before_optimizer_step(self, trainer: AnyTrainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Run before an update; gradients are complete and unscaled, not yet clipped."""

    def on_train_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after a micro-batch, and after the update if it was the last of its step; gradients can still be read."""

    def on_validation_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a validation begins."""

    def on_validation_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the validation data begins."""

    def on_validation_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a validation batch."""

    def on_validation_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a validation batch."""

    def on_validation_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the validation data ends; values logged here join the values of the validation."""

    def on_validation_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a validation ends."""

    def on_train_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when an epoch ends, after its validation."""

    def on_step_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a step is complete; changes made here are part of the step. Set `trainer.should_stop` here."""

    def on_step_checkpoint(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run after all callbacks have acted on a complete step: `trainer.save_checkpoint` is exact here."""

    def on_train_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when training ends."""

    def on_fit_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when `fit` ends."""

    def on_test_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a test begins."""

    def on_test_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the test data begins."""

    def on_test_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a test batch."""

    def on_test_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a test batch."""

    def on_test_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the test data ends."""

    def on_test_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a test ends."""

    def on_predict_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a prediction begins."""

    def on_predict_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the prediction data begins."""

    def on_predict_batch_start(
        self, trainer: AnyTrainer, task: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: AnyTrainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after a prediction batch."""

    def on_predict_epoch_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when the pass over the prediction data ends."""

    def on_predict_end(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Run when a prediction ends."""

    def on_exception(self, trainer: AnyTrainer, task: TaskModule, exception: BaseException) -> None:
        """Run when the run ends with an error or a stop request."""

    def teardown(self, trainer: AnyTrainer, task: TaskModule, stage: str) -> None:
        """Clean up after a stage."""
