"""`DataModule`: the loaders of training and evaluation, separate from the task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lumen.data.nested import move_batch
from lumen.task.hyperparameters import HyperparametersMixin, class_only_method

if TYPE_CHECKING:
    from lumen.task.running_trainer import AnyTrainer, AttachedRun

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class Attached:
    """Mixin of a task or data module that refers to its run while the run lasts."""

    _run: AttachedRun | None = None
    _trainer: AnyTrainer | None = None

    def _attach(self, run: AttachedRun | None, trainer: AnyTrainer | None) -> None:
        """Set the run, and the trainer that has opened the run."""
        self._run, self._trainer = run, trainer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the run, for copies and for workers."""
        # A module's own method leaves out its compiled call, which would compute with the weights of this module.
        state: Any = super().__getstate__() or {}
        return {name: value for name, value in state.items() if name not in ("_run", "_trainer")}


class DataHooks:
    """Loaders and batch transfer hooks, shared by tasks and data modules."""

    #: False: Lumen calls `prepare_data` on the first node only, for a file system that all nodes share.
    prepare_data_per_node = True
    #: Accepted for compatibility with Lightning: in Lumen a process may always have no batch.
    allow_zero_length_dataloader_with_multiple_devices = False

    def prepare_data(self) -> None:
        """Download and unpack data, once per node; keep no state here."""

    def train_dataloader(self) -> Any:
        """Return one training loader or several."""

    def val_dataloader(self) -> Any:
        """Return one validation loader or a list."""

    def test_dataloader(self) -> Any:
        """Return one test loader or a list."""

    def predict_dataloader(self) -> Any:
        """Return one prediction loader or a list."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is copied to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch to the device. Default: every tensor in it."""
        return move_batch(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device. Random augmentation here is reproducible, like dropout."""
        return batch


class DataModule(HyperparametersMixin, DataHooks, Attached):
    """Loaders for training, validation, test and prediction.

    Return ordinary `torch.utils.data.DataLoader`s. Lumen keeps their data set, collate function, workers and pinning,
    and chooses the order of samples. With `shuffle=True` the order depends only on (seed, epoch).
    """

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **options: Any,
    ) -> Self:
        """Create a data module from existing data sets; the training data is shuffled.

        Args:
            train_dataset: A data set, or several in a list or dictionary; None: no training loader.
            val_dataset: A data set, or several; None: no validation loader.
            test_dataset: A data set, or several; None: no test loader.
            predict_dataset: A data set, or several; None: no prediction loader.
            batch_size: Samples of a batch in each process; passed to the class too, if its constructor takes it.
            num_workers: Number of worker processes per loader; passed to the class too, if its constructor takes it.
            options: Arguments of the class.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        parameters = inspect.signature(cls).parameters
        has_kwargs = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        data = cls(**{name: size for name, size in sizes.items() if has_kwargs or name in parameters}, **options)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, dataset in datasets.items():
            if dataset is not None:
                setattr(data, f"{stage}_dataloader", partial(_make_loaders, dataset, shuffle=stage == "train", **sizes))
        return data

    @class_only_method
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PurePath,
        map_location: Any = None,
        hparams_file: None = None,
        weights_only: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """Build the data module from the hyperparameters of a checkpoint, and restore its state.

        Args:
            checkpoint_path: A checkpoint directory, or a run directory (its newest valid checkpoint), or a URL of one.
            map_location: Accepted for compatibility with Lightning; the state is on the CPU.
            hparams_file: Not supported: pass arguments that the checkpoint lacks as `overrides`.
            weights_only: Accepted for compatibility with Lightning; Lumen never unpickles a checkpoint.
            overrides: Constructor arguments that replace saved ones.

        Raises:
            ConfigError: `hparams_file` was given.
            CheckpointDamaged: Bytes of the checkpoint are missing or changed.
            CheckpointMismatch: The class cannot be built from the saved arguments.
        """
        return cls._build_from_checkpoint(checkpoint_path, hparams_file, overrides=overrides)

    def __str__(self) -> str:
        """Return one line per kind of loader, with its number of samples and batch size."""
        return "\n".join([type(self).__name__, *(f"  {name}: {_describe_loaders(self, name)}" for name in LOADERS)])

    @property
    def trainer(self) -> AnyTrainer | None:
        """Trainer of the run; None before the first run."""
        return self._trainer

    def setup(self, stage: str) -> None:
        """Build data sets for a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data and tensors to save in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""


def _make_loaders(dataset: Any, *, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    """Return the loader of a data set, or the loaders of several in a list or dictionary."""
    sizes = {"batch_size": batch_size, "num_workers": num_workers}
    if isinstance(dataset, Mapping):
        return {name: _make_loaders(each, shuffle=shuffle, **sizes) for name, each in dataset.items()}
    if isinstance(dataset, (list, tuple)) and any(isinstance(each, Dataset) for each in dataset):
        return [_make_loaders(each, shuffle=shuffle, **sizes) for each in dataset]
    shuffle = shuffle and not isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset, batch_size, shuffle, num_workers=num_workers, pin_memory=torch.accelerator.is_available()
    )


def _describe_loaders(owner: DataModule, method: str) -> str:
    """Describe the loaders of one method of a data module."""
    try:
        return _describe_loader(getattr(owner, method)())
    except Exception as error:
        return f"not available yet ({type(error).__name__}: {error})"


def _describe_loader(loader: Any) -> str:
    if loader is None:
        return "none"
    if isinstance(loader, Mapping):
        return ", ".join(f"{name}: {_describe_loader(each)}" for name, each in loader.items())
    if isinstance(loader, (list, tuple)):
        return "; ".join(map(_describe_loader, loader))
    dataset = getattr(loader, "dataset", loader)
    text = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else f"a {type(dataset).__name__} without a length"
    size = getattr(loader, "batch_size", None)
    return text if size is None else f"{text} in batches of {size}"
