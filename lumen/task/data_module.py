"""DataModule: where the data comes from, apart from the task that uses it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lumen.data.nested import move
from lumen.task.hyperparameters import HasHyperparameters

if TYPE_CHECKING:
    from lumen.task.running_trainer import AnyTrainer, AttachedRun

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class Attached:
    """Mixin: the run that a task or data module is attached to while it lasts."""

    _run: AttachedRun | None = None
    _trainer: AnyTrainer | None = None

    def _attach(self, run: AttachedRun | None, trainer: AnyTrainer | None) -> None:
        """Let the object know its run, and the trainer that has opened the run."""
        self._run, self._trainer = run, trainer

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run out of copies, and of what is sent to workers."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_run", "_trainer")}


class DataHooks:
    """Where batches come from and how they reach the device: the part that tasks and data modules share."""

    #: False: `prepare_data` is called on the first node alone, whose files all nodes see.
    prepare_data_per_node = True
    #: Accepted for users of Lightning: a process may always be without a batch.
    allow_zero_length_dataloader_with_multiple_devices = False

    def prepare_data(self) -> None:
        """Download and unpack, once per node; keep no state here."""

    def train_dataloader(self) -> Any:
        """The training loader."""

    def val_dataloader(self) -> Any:
        """One validation loader or a list."""

    def test_dataloader(self) -> Any:
        """One test loader or a list."""

    def predict_dataloader(self) -> Any:
        """One prediction loader or a list."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is copied to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch to the device. Default: every tensor in it."""
        return move(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device: augmentation there is keyed like dropout."""
        return batch


class DataModule(HasHyperparameters, DataHooks, Attached):
    """Loaders for training, validation, test and prediction.

    Return ordinary `torch.utils.data.DataLoader`s. Lumen keeps their data set, collate function, workers and pinning,
    and decides which sample comes when; `shuffle=True` means an order that is a pure function of (seed, epoch).
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
        """A data module of data sets that there are already: that of the training is shuffled.

        Args:
            train_dataset: A data set, or several in a list or dictionary; likewise the others.
            val_dataset: None: there is no such loader; likewise the others.
            test_dataset: None: `test` has no data.
            predict_dataset: None: `predict` has no data.
            batch_size: Samples of a batch in each process; given to the class too, if that takes it.
            num_workers: Processes that load each of them; given to the class too, if that takes it.
            options: Arguments of the class.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        taken = inspect.signature(cls).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        made = cls(**{name: size for name, size in sizes.items() if takes_all or name in taken}, **options)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for stage, dataset in datasets.items():
            if dataset is not None:
                setattr(made, f"{stage}_dataloader", partial(_loaders, dataset, shuffle=stage == "train", **sizes))
        return made

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PurePath,
        map_location: Any = None,
        hparams_file: None = None,
        weights_only: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """Build the data module from the hyperparameters of a checkpoint, and give it the state that it had.

        Args:
            checkpoint_path: A checkpoint directory, or a run directory (its newest valid checkpoint), or a URL of one.
            map_location: Accepted for users of Lightning; its state lies on the CPU.
            hparams_file: Not here: give what a checkpoint does not have as `overrides`.
            weights_only: Accepted for users of Lightning; nothing is ever unpickled.
            overrides: Constructor arguments that replace saved ones.

        Raises:
            ConfigError: A file of hyperparameters is given.
            CheckpointDamaged: Bytes of the checkpoint are missing or changed.
            CheckpointMismatch: The class cannot be built so.
        """
        return cls._built_from(checkpoint_path, hparams_file, overrides=overrides)

    def __str__(self) -> str:
        """One line for each kind of loader: how many samples it has, in batches of how many."""
        return "\n".join([type(self).__name__, *(f"  {name}: {_described(self, name)}" for name in LOADERS)])

    @property
    def trainer(self) -> AnyTrainer | None:
        """The trainer of the run; None before the first one."""
        return self._trainer

    def setup(self, stage: str) -> None:
        """Build data sets for a stage: "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors to keep in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def _loaders(dataset: Any, *, shuffle: bool, batch_size: int, num_workers: int) -> Any:
    """The loader of a data set, or those of several in a list or dictionary."""
    sizes = {"batch_size": batch_size, "num_workers": num_workers}
    if isinstance(dataset, Mapping):
        return {name: _loaders(each, shuffle=shuffle, **sizes) for name, each in dataset.items()}
    if isinstance(dataset, (list, tuple)) and any(isinstance(each, Dataset) for each in dataset):
        return [_loaders(each, shuffle=shuffle, **sizes) for each in dataset]
    shuffle = shuffle and not isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset, batch_size, shuffle, num_workers=num_workers, pin_memory=torch.accelerator.is_available()
    )


def _described(owner: DataModule, method: str) -> str:
    """A loader of a data module in words, or those of several."""
    try:
        return _in_words(getattr(owner, method)())
    except Exception as error:
        return f"not there yet ({type(error).__name__}: {error})"


def _in_words(loader: Any) -> str:
    if loader is None:
        return "none"
    if isinstance(loader, Mapping):
        return ", ".join(f"{name}: {_in_words(each)}" for name, each in loader.items())
    if isinstance(loader, (list, tuple)):
        return "; ".join(map(_in_words, loader))
    dataset = getattr(loader, "dataset", loader)
    many = f"{len(dataset)} samples" if hasattr(dataset, "__len__") else f"a {type(dataset).__name__} without a length"
    size = getattr(loader, "batch_size", None)
    return many if size is None else f"{many} in batches of {size}"
