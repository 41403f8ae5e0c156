"""Helpers for asynchronous saves."""

import os
import threading
import time

import torch
from torch import nn

import lumen
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer


class Moving(Regression):
    """Task of which all saved state changes in each step: parameters, Adam's state, buffers, a list, a metric."""

    def __init__(self, **options):
        super().__init__(dropout=0.2, **options)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.register_buffer("inputs_seen", torch.zeros(FEATURES, 300).T)
        self.history = {"losses": [], "sums": torch.zeros(2)}

    def forward(self, inputs):
        self.inputs_seen += inputs.sum(0)
        return super().forward(self.norm(inputs))

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.history["losses"].append(loss.item())
        self.history["sums"] += loss.item()
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history


class SlowDisk:
    """Disk on which the first fsync of a thread, except the main one, waits for an event."""

    def __init__(self, monkeypatch):
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.threads = set()
        real = os.fsync

        def fsync(descriptor):
            self.threads.add(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.goes_on.wait(100)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    @property
    def is_left_to_a_thread(self):
        return self.threads - {threading.main_thread()} != set()


class CallAtSteps(lumen.Callback):
    """Callback that calls a function at the end of given steps, before the checkpoint is saved."""

    def __init__(self, **actions):
        self.actions = {int(step[4:]): action for step, action in actions.items()}

    def on_step_end(self, trainer, task):
        if action := self.actions.get(trainer.global_step):
            action(trainer)


def make_saver(**options):
    return lumen.ModelCheckpoint(
        **({"every_n_epochs": 0, "every_n_train_steps": 4, "at_end": False, "asynchronous": True} | options)
    )


def fit(tmp_path, callbacks, task=None, **options):
    trainer = quiet_trainer(tmp_path, **({"max_epochs": 3, "callbacks": callbacks, "log_every_n_steps": 1} | options))
    trainer.fit(task or Moving(), loader(40), val_dataloaders=loader(20, shuffle=False))
    return trainer


def get_checkpoint_folder(tmp_path):
    return tmp_path / "runs/run/checkpoints"


def list_checkpoints(tmp_path):
    return sorted(path.name for path in get_checkpoint_folder(tmp_path).iterdir())


def read_files(checkpoint):
    return {path.relative_to(checkpoint): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


class Large(Regression):
    """Task of 18 MiB with Adam's state."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1536, 1024))

    def forward(self, inputs):
        return super().forward(inputs) + 0.0 * self.table[0, 0]


def wait_until_announced(trainer):
    """Wait until the save is over, so that the end of the next step finds it."""
    deadline_s = time.monotonic() + 60
    while not trainer.run.ending.vote.local_save_ended:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Watched(lumen.Callback):
    """Callback that lets each save end before the end of the next step."""

    last_step = 0

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.last_step = trainer.global_step
        if trainer.run.saves.path is not None:
            wait_until_announced(trainer)


def block_path_with_file(tmp_path, trainer):
    get_checkpoint_folder(tmp_path).rename(tmp_path / "moved")
    get_checkpoint_folder(tmp_path).write_text("in the way")


def free_parameters(trainer):
    for parameter in trainer.run.task.parameters():
        parameter.untyped_storage().resize_(0)
