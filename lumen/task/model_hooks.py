"""Hooks of a task: methods that a run calls, in the order of `Callback`'s docstring."""

from __future__ import annotations

from typing import Any

import torch


class ModelHooks:
    """Hooks that a task may define. Callbacks have the same hooks, except for hooks that set modes.

    The hooks of callbacks have two more arguments, `trainer` and `task`, at the front.
    """

    def setup(self, stage: str) -> None:
        """Prepare for a stage: "fit", "validate", "test" or "predict"."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added. The model is loaded; the optimizers are not built yet."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data and tensors to a checkpoint. Lumen also calls this once when training begins, as a trial."""

    def on_fit_start(self) -> None:
        """Run when `fit` begins; the optimizers exist and a resumed state is loaded."""

    def on_sanity_check_start(self) -> None:
        """Run when the sanity check begins."""

    def on_sanity_check_end(self) -> None:
        """Run when the sanity check ends."""

    def on_train_start(self) -> None:
        """Run when training begins, after the sanity check."""

    def on_train_epoch_start(self) -> None:
        """Run when an epoch begins."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Run before a micro-batch; return -1 to end the epoch here."""

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before the previous step's gradients are cleared; with manual optimization, once before each step."""

    def on_before_backward(self, loss: torch.Tensor) -> None:
        """Run before the backward of one micro-batch."""

    def on_after_backward(self) -> None:
        """Run after the backward of one micro-batch; gradients are partial sums."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run before an update; gradients are complete and unscaled, not yet clipped."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Run after a micro-batch, and after the update if it was the last of its step; gradients can still be read.

        `outputs` is the result of `training_step`; its tensors are detached.
        """

    def on_validation_start(self) -> None:
        """Run when a validation begins."""

    def on_validation_epoch_start(self) -> None:
        """Run when the pass over the validation data begins."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Run when the pass over the validation data ends; values logged here join the values of the validation."""

    def on_validation_end(self) -> None:
        """Run when a validation ends."""

    def on_train_epoch_end(self) -> None:
        """Run when an epoch ends, after its validation."""

    def on_step_end(self) -> None:
        """Run when a step is complete, after its validation; for an epoch's last step, after the end of the epoch."""

    def on_step_checkpoint(self) -> None:
        """Run after callbacks have saved their checkpoints of a complete step."""

    def on_train_end(self) -> None:
        """Run when training ends."""

    def on_fit_end(self) -> None:
        """Run when `fit` ends."""

    def on_test_start(self) -> None:
        """Run when a test begins."""

    def on_test_epoch_start(self) -> None:
        """Run when the pass over the test data begins."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a test batch."""

    def on_test_epoch_end(self) -> None:
        """Run when the pass over the test data ends."""

    def on_test_end(self) -> None:
        """Run when a test ends."""

    def on_predict_start(self) -> None:
        """Run when a prediction begins."""

    def on_predict_epoch_start(self) -> None:
        """Run when the pass over the prediction data begins."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after a prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Run when the pass over the prediction data ends."""

    def on_predict_end(self) -> None:
        """Run when a prediction ends."""

    def on_exception(self, exception: BaseException) -> None:
        """Run when the run ends with an error or a stop request."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def on_validation_model_zero_grad(self) -> None:
        """Run before a validation in training, only if overridden; otherwise gradients are kept until the next step."""
        self.zero_grad()  # type: ignore[attr-defined]

    def on_validation_model_eval(self) -> None:
        """Run before a validation to put the task into eval mode. An override chooses the modes of all modules."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Run after a validation, only if overridden, to put the task into train mode.

        Lumen then keeps the modes that the override sets. Otherwise Lumen restores the previous mode of each module.
        """
        self.train()  # type: ignore[attr-defined]

    def on_test_model_eval(self) -> None:
        """Run before a test to put the task into eval mode, like `on_validation_model_eval`."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Run after a test to put the task into train mode, like `on_validation_model_train`."""
        self.train()  # type: ignore[attr-defined]

    def on_predict_model_eval(self) -> None:
        """Run before a prediction to put the task into eval mode, like `on_validation_model_eval`."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None:
        """Run after a prediction to put the task into train mode, like `on_validation_model_train`."""
        self.train()  # type: ignore[attr-defined]
