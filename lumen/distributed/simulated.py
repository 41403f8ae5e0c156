"""Process groups whose other processes do not exist, to place a task as a run of several processes does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from lumen.distributed.processes import Processes


@contextmanager
def simulate_processes(processes: Processes) -> Iterator[None]:
    """Context in which this process is rank 0 of a run, and collectives return at once without communication.

    `Processes.connect` and device meshes open groups of torch's backend "fake". Gathered values are those of this
    process for every rank, and sums are not computed. Shapes and placements are those of rank 0 in the real run.

    Args:
        processes: The processes of the run, which are not started and not connected.
    """
    processes.close()
    dist.init_process_group("fake", rank=0, world_size=processes.world_size)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # a fake group never waits
            yield
    finally:
        processes.close()
        dist.destroy_process_group()
