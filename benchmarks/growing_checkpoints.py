"""Costs of checkpoints by the number of tensors, checkpoints and chunks, in CPU seconds."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lumen
from benchmarks.growing_records import seconds
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.save.writer import write_checkpoint
from lumen.cli import main

_WIDTH = 8  # numbers in a parameter
_OF_KEPT = 300  # tensors in each of many checkpoints
_CHECKPOINTS = Path("run/checkpoints")


class ManyTensors(lumen.TaskModule):
    """Task of small parameters with Adam, which saves four tensors per parameter."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((_WIDTH,), 0.1)) for _ in range(tensors))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return a loss that depends on every parameter, for a batch of shape (1, 1)."""
        return torch.stack(tuple(self.weights)).sum() * batch[0].mean()

    def configure_optimizers(self) -> Optimizer:
        """Return Adam, which has two tensors and a count for each parameter."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Saving(lumen.Callback):
    """Callback that saves after some steps, and measures the time of each save."""

    def __init__(self, steps: Sequence[int], clock: Callable[[], float], *, asynchronous: bool = False) -> None:
        self.steps, self.clock, self.asynchronous = steps, clock, asynchronous
        self.took_s: list[float] = []

    def on_step_checkpoint(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
        """Save after the requested steps."""
        if trainer.global_step in self.steps:
            assert trainer.run_directory is not None
            path = trainer.run_directory / "checkpoints" / f"step-{trainer.global_step:08d}"
            info = {"best": None, "monitor": None, "finished": False}
            began_s = self.clock()
            trainer.run.saves.save(path, info, asynchronous=self.asynchronous)
            self.took_s.append(self.clock() - began_s)

    def on_train_batch_start(self, trainer: lumen.Trainer, task: lumen.TaskModule, batch: Any, batch_idx: int) -> None:
        """Wait for the previous save."""
        trainer.run.saves.wait()


class Clock(lumen.Callback):
    """Callback that records the end time of the newest step."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def on_train_batch_end(
        self, trainer: lumen.Trainer, task: lumen.TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the time."""
        self.at_s = time.process_time()


def _fit(task: ManyTensors, steps: int, *callbacks: lumen.Callback, **options: Any) -> None:
    saver = lumen.ModelCheckpoint(every_n_train_steps=0, keep_last=-1, at_end=False, asynchronous=False)
    lumen.Trainer(
        max_steps=steps, default_root_dir=".", name="run", callbacks=[*callbacks, saver], seed=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, log_level="ERROR", **options,
    ).fit(task, DataLoader(TensorDataset(torch.ones(64, 1)), 1))  # fmt: skip


# ---------------------------------------------------------------------- by the number of tensors


def save_at_once(tensors: int) -> float:
    """Return the time of the second synchronous save of a run."""
    saving = Saving((2, 3), time.process_time)
    _fit(ManyTensors(tensors), 3, saving)
    return saving.took_s[-1]


def save_beside(tensors: int) -> float:
    """Return the time that training waits for an asynchronous save."""
    saving = Saving((2, 3), time.thread_time, asynchronous=True)
    _fit(ManyTensors(tensors), 4, saving)
    return saving.took_s[-1]


def _built(tensors: int) -> tuple[ManyTensors, Optimizer]:
    task = ManyTensors(tensors)
    return task, task.configure_optimizers()


def _step(task: ManyTensors, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    task.training_step([torch.ones(1, 1)]).backward()
    optimizer.step()


def _save(task: ManyTensors, optimizer: Optimizer) -> None:
    with open("x.tmp", "wb") as file:
        torch.save({"model": task.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename("x.tmp", "x.pt")


def save_by_hand(tensors: int) -> float:
    """Return the time of `torch.save` for both state dictionaries, with sync and rename."""
    task, optimizer = _built(tensors)
    _step(task, optimizer)
    return seconds(lambda: _save(task, optimizer))


def resume(tensors: int) -> float:
    """Return the time from `Trainer.fit` to the end of the first step of a resumed run."""
    _fit(ManyTensors(tensors), 1, Saving((1,), time.process_time))
    return _resume(tensors)


def _resume(tensors: int) -> float:
    task, clock = ManyTensors(tensors), Clock()
    began_s = time.process_time()
    _fit(task, 2000, clock, lumen.LambdaCallback(on_train_batch_end=_stop), resume="auto")
    return clock.at_s - began_s


def _stop(trainer: lumen.Trainer, *_: Any) -> None:
    trainer.should_stop = True


def resume_by_hand(tensors: int) -> float:
    """Return the time of `torch.load`, both `load_state_dict`, and a step."""
    task, optimizer = _built(tensors)
    _step(task, optimizer)
    _save(task, optimizer)
    task, optimizer = _built(tensors)

    def go_on() -> None:
        saved = torch.load("x.pt", weights_only=True)
        task.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        _step(task, optimizer)

    return seconds(go_on)


# ---------------------------------------------------------------------- by the number of checkpoints


def _keep(checkpoints: int) -> None:
    """Create checkpoints that share their files."""
    _fit(ManyTensors(_OF_KEPT), 1, Saving((1,), time.process_time))
    newest = _CHECKPOINTS / f"step-{checkpoints:08d}"
    os.rename(_CHECKPOINTS / "step-00000001", newest)
    for step in range(1, checkpoints):
        shutil.copytree(newest, _CHECKPOINTS / f"step-{step:08d}", copy_function=os.link)


def resume_among(checkpoints: int) -> float:
    """Return the time from `Trainer.fit` to the end of the first step, with many checkpoints of 300 tensors."""
    _keep(checkpoints)
    return _resume(_OF_KEPT)


def list_runs(checkpoints: int) -> float:
    """Return the time of `lumen runs --json`."""
    _keep(checkpoints)
    with contextlib.redirect_stdout(io.StringIO()):
        return seconds(lambda: main(["runs", ".", "--json"]))


# ---------------------------------------------------------------------- by the number of chunks


def open_chunks(chunks: int) -> float:
    """Return the time to read the manifest of a tensor with many chunks, one column each."""
    _write_chunks(Path("step-1"), chunks)

    def look() -> None:
        with contextlib.suppress(lumen.LumenError):  # its files are not there
            Checkpoint.open(Path("step-1"), verify="sizes")

    return seconds(look)


def _write_chunks(path: Path, chunks: int) -> None:
    write_checkpoint(path, {"model": {"w": torch.ones(1)}}, {}, info={})
    text = (path / "manifest.json").read_text()
    manifest = json.loads(text)
    del manifest["digest"]
    names = [f"model/{number:05d}-00000.safetensors" for number in range(chunks)]
    manifest["files"] |= {name: {"bytes": 8, "sha256": ""} for name in names}
    columns = [[name, [0, number], [1, 1]] for number, name in enumerate(names)]
    random.Random(0).shuffle(columns)
    manifest["sections"]["model"]["w"] = {"dtype": "float32", "shape": [1, chunks], "chunks": columns}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (path / "manifest.json").write_text(json.dumps(manifest | {"digest": hashlib.sha256(text.encode()).hexdigest()}))
