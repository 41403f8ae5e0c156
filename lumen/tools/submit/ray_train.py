"""The driver of Ray Train, a Python program."""

from __future__ import annotations

from lumen.tools.submit.job import Job

_PROGRAM = '''\
"""Runs a command of Lumen on Ray."""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

DIRECTORY = {directory!r}  # every node must see it
COMMAND = {words!r}


def train():
    from lumen.cli import main

    os.chdir(DIRECTORY)
    if code := main(COMMAND):  # it has said why
        raise RuntimeError(f"lumen ended with exit code {{code}}")


if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers={workers}, {devices}),
        run_config=RunConfig(
            name={name!r}, storage_path=os.path.join(DIRECTORY, "ray"), failure_config=FailureConfig({restarts})
        ),
    ).fit()
'''


def text(job: Job) -> str:
    """The program: one worker of Ray per process, whose group Lumen finds."""
    devices = f"use_gpu={job.gpus_per_node > 0}"
    if job.gpu is not None:
        devices += f", accelerator_type={job.gpu!r}"
    return _PROGRAM.format(
        directory=job.directory,
        words=list(job.words),
        workers=job.nodes * job.processes_per_node,
        devices=devices,
        name=job.name,
        restarts=job.restarts,
    )
