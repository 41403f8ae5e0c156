"""Run whose last process makes no progress: `python -m tests.helpers.hanging_run '{"mode": "loop", ...}'`."""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import lumen
from tests.helpers.tasks import Regression

LIMIT_S, LONG_S = 3.0, 12.0
LATE = "a rank that is late in its groups"
AT_STEP = 3


def main(mode, devices, launched=False, max_restarts=0):
    """Train; `mode` is the behaviour of the last rank."""
    rank = int(os.environ.get("RANK", 0))
    (Path.cwd() / f"rank-{rank}-{os.getpid()}").touch()
    if mode == "absent" and rank == 1:
        sleeps_before_it_comes()
    limits = (
        {}
        if mode in (LATE, *UNMATCHED)
        else {
            "timeout_s": LONG_S if mode == "suspended" else LIMIT_S,
            "startup_timeout_s": 2 * LIMIT_S if mode in ("absent", "missing", "forked worker") else 60.0,
        }
    )
    strategy = lumen.DDP(**limits) if devices > 1 else lumen.SingleDevice(**limits)
    trainer = lumen.Trainer(
        max_steps=8, devices=devices, strategy=strategy, accelerator="cpu", name="run", enable_progress_bar=False,
        enable_model_summary=False, max_restarts=max_restarts,
        callbacks=[lumen.ThroughputMonitor(), *[lumen.ModelCheckpoint(every_n_train_steps=2)] * (max_restarts > 0)],
        log_every_n_steps=8,
    )  # fmt: skip
    if mode == "forked worker" and rank == devices - 1:
        hangs_in_each_fork()
    workers = 1 if "worker" in mode else 0
    data = DataLoader(Samples(mode), 2, num_workers=workers)
    trainer.fit(Task(mode, rank == devices - 1), data, data if "validation_step" in mode else None)
    print(f"done: {trainer.global_step} steps")


def sleeps_before_it_comes():
    time.sleep(1000)


def keeps_the_lock():
    """Wait for ever without letting another thread run Python."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def hangs_in_each_fork():
    """Make each fork hang before it runs Python, like a child that inherits a held lock."""
    libc = ctypes.CDLL(None)
    os.dup2(os.pipe()[0], 0)  # a pipe without a writer's data
    register = libc["__register_atfork"]  # pthread_atfork itself is in no shared library
    register(None, None, ctypes.cast(libc.getchar, ctypes.c_void_p), None)


class Samples(Dataset):
    def __init__(self, mode):
        self.mode = mode

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.mode == "worker" and index == 9:
            this_sample_sleeps()
        return torch.ones(6), torch.ones(1)


def this_sample_sleeps():
    time.sleep(1000)


def gather(task, value):
    parts = [torch.zeros_like(value) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(value, parts, dst=0)


def wait_for_what_was_begun(task, value):
    work = dist.all_reduce(value, async_op=True)
    work.wait()


#: Collectives of the user, by name.
COLLECTIVES = {
    "gather": gather,
    "all_reduce": lambda task, value: dist.all_reduce(value),
    "wait": wait_for_what_was_begun,
    "barrier": lambda task, value: dist.barrier(),
    "self.all_gather": lambda task, value: task.all_gather(value),
    "strategy.all_gather": lambda task, value: task.trainer.strategy.all_gather(float(value)),
}
#: Modes in which every second batch calls one of them, so that only rank 0 does.
STEPS = ("validation_step", "training_step")
UNMATCHED = [f"{name} in {step}" for number, name in enumerate(COLLECTIVES) for step in STEPS[:: (1, -1)[number % 2]]]


class Task(Regression):
    def __init__(self, mode, is_last):
        super().__init__()
        self.mode, self.is_last = mode, is_last

    def setup(self, stage):
        if self.mode == "missing" and self.is_last:
            time.sleep(1000)
        if self.mode == LATE:
            self.parts = [dist.new_group(ranks) for ranks in ([1, 2], [0, 2], [1, 2])][1:]

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == AT_STEP and self.is_last:
            if self.mode == "no folder":
                shutil.rmtree(self.trainer.processes.stacks._folder)
                this_loop_is_endless()
            if self.mode == "lock":
                keeps_the_lock()
            if self.mode == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.mode == "loop" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                this_loop_is_endless()
        if self.mode == "suspended" and self.trainer.global_step == AT_STEP:
            (Path.cwd() / f"waits-{self.trainer.global_rank}").touch()
            while not (Path.cwd() / "goes-on").exists():
                time.sleep(0.01)
        if self.mode == LATE and self.trainer.global_step == AT_STEP:
            time.sleep(2 * LIMIT_S * self.is_last)
            for part in self.parts:
                if dist.get_rank(part) >= 0:
                    dist.all_reduce(torch.ones(()), group=part)
        self.call_in("training_step", batch_idx)
        return super().training_step(batch)

    def validation_step(self, batch, batch_idx):
        self.call_in("validation_step", batch_idx)
        return super().validation_step(batch)

    def call_in(self, step, batch_idx):
        name, _, where = self.mode.partition(" in ")
        if where == step and batch_idx % 2 == 0:
            COLLECTIVES[name](self, torch.ones(()))


def this_loop_is_endless():
    while True:
        pass


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
