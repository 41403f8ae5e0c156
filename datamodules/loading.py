"""Base class of the example data modules, with the options of their loaders."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import lumen


class Loading(lumen.DataModule):
    """Data module with options for its loaders, which do not change the data.

    Args:
        num_workers: Number of processes that load data.
        pin_memory: True to load into pinned memory, from which an accelerator copies while it computes. No effect
            without an accelerator.
        persistent_workers: True to keep the workers from one epoch to the next; needs `num_workers`.
        prefetch_factor: Number of batches that each worker loads ahead, or None for torch's default.
    """

    def __init__(
        self,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
    ):
        super().__init__()
        self.loading = {
            "num_workers": num_workers,
            "pin_memory": pin_memory and torch.accelerator.is_available(),
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
        }

    def loader(self, data: Dataset, batch_size: int, **options: Any) -> DataLoader:
        """Return a loader of a dataset, with further options of `torch.utils.data.DataLoader`."""
        return DataLoader(data, batch_size, **self.loading, **options)
