"""What every data module here lets a config say about its loaders."""

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import lumen


class Loading(lumen.DataModule):
    """A data module whose loaders load as the config says; what is loaded is the same.

    Args:
        num_workers: Processes that load data.
        pin_memory: Load into memory that an accelerator copies from while it computes; without effect where there is
            none.
        persistent_workers: Keep these processes from one epoch to the next; needs `num_workers`.
        prefetch_factor: Batches that each of them loads ahead; None: torch's choice.
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
        """A loader of a data set; further options are those of `torch.utils.data.DataLoader`."""
        return DataLoader(data, batch_size, **self.loading, **options)
