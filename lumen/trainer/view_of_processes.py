"""What callbacks and tasks may read of the processes of a run and their devices."""

from __future__ import annotations

from typing import Any

import torch

from lumen import console
from lumen.distributed.processes import Processes
from lumen.trainer.view_base import ViewBase


class ViewOfProcesses(ViewBase):
    """Who takes part in a run, and where it computes."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products: autocast's, else that of the parameters."""
        device = self.strategy.device
        with self.run.precision.forward():
            if torch.is_autocast_enabled(device.type):
                return torch.get_autocast_dtype(device.type)
        return self.run.optim.parameters[0].dtype

    @property
    def processes(self) -> Processes:
        """Who takes part in the run, and what of plain data they tell each other."""
        return self.strategy.processes

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.processes.world_size

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return self.processes.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self.processes.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self.processes.node

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return self.processes.nodes

    @property
    def num_devices(self) -> int:
        """Devices of this node that the run uses; a process has one."""
        return self.processes.local_world_size

    @property
    def device_ids(self) -> list[int]:
        """Their numbers on this node."""
        return list(range(self.num_devices))

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print once, in the first process, above the progress bar."""
        if self.is_global_zero:
            console.print_values(*values, sep=sep, end=end)

    @property
    def is_global_zero(self) -> bool:
        """True in the process that writes logs."""
        return self.processes.is_global_zero
