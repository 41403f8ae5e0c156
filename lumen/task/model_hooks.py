"""The hooks of a task: methods that a run calls, in the order that `Callback` tells."""

from __future__ import annotations

from typing import Any

import torch


class ModelHooks:
    """Hooks that a task may define; those that are not of its modes exist on callbacks too.

    There they have `trainer` and `task` before their arguments.
    """

    def setup(self, stage: str) -> None:
        """Prepare for a stage: "fit", "validate", "test" or "predict"."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Get back what `on_save_checkpoint` added: parameters are loaded, the optimizers are not built."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors of the task's own to a checkpoint; also called once when training begins."""

    def on_fit_start(self) -> None:
        """`fit` begins; optimizers exist, a resumed state is loaded."""

    def on_sanity_check_start(self) -> None:
        """The sanity check begins."""

    def on_sanity_check_end(self) -> None:
        """The sanity check ends."""

    def on_train_start(self) -> None:
        """Training begins, after the sanity check."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Before a micro-batch; -1 ends the epoch here."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the gradients of the last step are dropped; with manual optimization, once before each step."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Before backward of one micro-batch."""

    def on_after_backward(self) -> None:
        """After backward of one micro-batch; gradients are partial sums."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a micro-batch, and after the update if it was a step's last; gradients can still be read.

        `outputs` is what `training_step` returned, its tensors without their graph.
        """

    def on_validation_start(self) -> None:
        """A validation begins."""

    def on_validation_epoch_start(self) -> None:
        """The pass over the validation data begins."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_validation_epoch_end(self) -> None:
        """The pass over the validation data ends; what is logged here joins its values."""

    def on_validation_end(self) -> None:
        """A validation ends."""

    def on_train_epoch_end(self) -> None:
        """An epoch ends, after its validation."""

    def on_step_end(self) -> None:
        """A step is complete: after its validation, and after the epoch's end if it was the epoch's last."""

    def on_step_checkpoint(self) -> None:
        """Callbacks have saved what they save of a complete step."""

    def on_train_end(self) -> None:
        """Training ends."""

    def on_fit_end(self) -> None:
        """`fit` ends."""

    def on_test_start(self) -> None:
        """A test begins."""

    def on_test_epoch_start(self) -> None:
        """The pass over the test data begins."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_test_epoch_end(self) -> None:
        """The pass over the test data ends."""

    def on_test_end(self) -> None:
        """A test ends."""

    def on_predict_start(self) -> None:
        """A prediction begins."""

    def on_predict_epoch_start(self) -> None:
        """The pass over the prediction data begins."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """The pass over the prediction data ends."""

    def on_predict_end(self) -> None:
        """A prediction ends."""

    def on_exception(self, exception: BaseException) -> None:
        """The run ends with an error or a stop request."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def on_validation_model_zero_grad(self) -> None:
        """A validation in training is due; called if it is overridden, else gradients stay till the next step."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Put the task into eval mode for a validation; what is overridden says itself which modules are."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Put the task into train mode after a validation.

        Called if it is overridden; what it leaves then stays. Else each module is put back into the mode that it had.
        """
        self.train()  # type: ignore[attr-defined]

    def on_test_model_eval(self) -> None:
        """As `on_validation_model_eval`, for a test."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """As `on_validation_model_train`, after a test."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_model_eval(self) -> None:
        """As `on_validation_model_eval`, for a prediction."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None:
        """As `on_validation_model_train`, after a prediction."""
        self.train()  # type: ignore[attr-defined]
