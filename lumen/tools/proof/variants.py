"""Variants of a run to compare, and the trainer arguments that each variant changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lumen.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, Timer
from lumen.cli.config_layers import as_list
from lumen.data.iterable_style import has_capability
from lumen.data.nested import map_leaves
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.tools.side_effect_callbacks import SIDE_EFFECT_CALLBACKS
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

NAME = "run"
#: Callbacks that do not affect the computation, or would end or change a variant.
_LEFT_OUT = (*SIDE_EFFECT_CALLBACKS, BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, Timer)
Moment = Literal["training", "validation", "save"]
Name = Literal["single", "ddp", "fsdp", "mesh"]
MOMENTS: tuple[Moment, ...] = ("training", "validation", "save")
STRATEGIES: tuple[Name, ...] = ("ddp", "fsdp")


@final
@dataclass(frozen=True)
class VariantSize:
    """Numbers of steps and batches of each variant, and its limits.

    Attributes:
        steps: Number of optimizer steps.
        accumulate: Number of micro-batches of a step on one process; an even number.
        epoch_steps: Number of optimizer steps in an epoch.
        val_batches: Number of batches of a validation, odd, so that two processes have unequal shares.
        save_every: Steps between two checkpoints, and between two validations.
        seed: The seed of every variant.
        limit_s: Time limit in seconds, after which a variant counts as hung.
        threads: Number of torch threads in each process.
        accelerator: The trainer's accelerator.
    """

    steps: int = 5
    accumulate: int = 2
    epoch_steps: int = 3
    val_batches: int = 3
    save_every: int = 2
    seed: int = 0
    limit_s: float = 300.0
    threads: int = 1
    accelerator: str = "auto"


@final
@dataclass(frozen=True)
class Variant:
    """Variant of a run.

    Attributes:
        name: Name of the variant's folder, and of the run in a certificate.
        world: Number of processes.
        strategy: Name of the strategy: single, ddp, fsdp, or mesh, which cuts layers over all processes.
        exact: True for the user's precision and bitwise comparison. False for float64, in which the order of sums
            changes only the last of 16 digits.
        joins: True to join two batches into each micro-batch, with half as many micro-batches in a step.
        workers: Number of workers of the training loader, or None for the user's number.
        kill: The moment at which the process kills itself, or None.
        resume: The trainer's `resume`: auto or a checkpoint, or None.
        evaluates: True to evaluate the checkpoint of `resume` instead of training.
        compiles: True to compile the task with torch.compile.
        fresh: True to start a new interpreter, with a different hash seed for strings, and to record calls that may
            give different values in each run.
    """

    name: str
    world: int = 1
    strategy: Name = "single"
    exact: bool = False
    joins: bool = False
    workers: int | None = None
    kill: Moment | None = None
    resume: str | None = None
    evaluates: bool = False
    compiles: bool = False
    fresh: bool = False

    @property
    def data_world(self) -> int:
        """Number of processes that read different batches."""
        return 1 if self.strategy == "mesh" else self.world

    def get_changes(
        self, size: VariantSize, folder: Path, arguments: dict[str, Any], precision: str | None
    ) -> dict[str, Any]:
        """Return the trainer arguments that the variant changes.

        Args:
            size: Numbers of steps and batches.
            folder: The directory that the variant may write to.
            arguments: The user's arguments of the trainer.
            precision: The precision of variants that are not exact, or None for the user's.
        """
        accumulate = size.accumulate // (2 if self.joins else 1) // self.data_world
        changed: dict[str, Any] = {
            **dict.fromkeys(("max_epochs", "max_time", "devices", "num_nodes", "global_batch_size", "profiler"), None),
            **dict.fromkeys(("min_steps", "min_epochs", "num_sanity_val_steps", "overfit_batches", "max_restarts"), 0),
            **dict.fromkeys(("fast_dev_run", "detect_anomaly", "sync_batchnorm", "enable_progress_bar"), False),
            **dict.fromkeys(("resume_parts", "grace_s", "gc_every_n_steps"), None),
            "max_steps": size.steps,
            "accumulate_grad_batches": accumulate,
            "limit_train_batches": size.epoch_steps * accumulate * self.data_world,
            "limit_val_batches": size.val_batches,
            "val_check_interval": size.save_every,
            "check_val_every_n_epoch": 1,
            "log_every_n_steps": 1,
            "strategy": self._choose_strategy(arguments.get("strategy")),
            "accelerator": size.accelerator,
            "compile": (arguments.get("compile") or True) if self.compiles else False,
            "default_root_dir": folder,
            "name": NAME,
            "resume": self.resume,
            "enable_checkpointing": not self.evaluates,
            "enable_model_summary": False,
            "log_level": "WARNING",
        }
        if not self.exact and precision is not None:
            changed["precision"] = precision
        if arguments.get("init_from") is not None and self.resume is not None:
            changed["init_from"] = None
        return changed

    def _choose_strategy(self, given: Any) -> Any:
        """Return the strategy; a strategy object of this kind keeps the user's settings."""
        is_kind = not isinstance(given, str) and type(given).__name__.lower() == self.strategy
        if self.strategy != "mesh":
            return given if is_kind else self.strategy
        from lumen.strategies.mesh import Mesh  # slow to import, and most tasks have no plan

        return (given if is_kind else Mesh()).resize(tensor=self.world)

    def choose_callbacks(self, arguments: Any, size: VariantSize) -> list[Callback]:
        """Return the user's callbacks except those in `_LEFT_OUT`, and a callback that saves checkpoints."""
        kept = [each for each in as_list(arguments) if not isinstance(each, _LEFT_OUT)]
        if self.evaluates:
            return kept
        saves = ModelCheckpoint(every_n_train_steps=size.save_every, keep_last=-1, asynchronous=False)
        return [*kept, saves]

    def adapt_loaders(self, task: TaskModule, data: DataModule | None) -> None:
        """Change workers and batch size of the training loaders of the data module or task."""
        if self.workers is None and not self.joins:
            return
        owner: Any = data if data is not None else task
        made_by_user = owner.train_dataloader
        owner.train_dataloader = lambda: map_leaves(made_by_user(), self._adapt_loader)

    def _adapt_loader(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        if self.joins and loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
            loader = _double_batch_size(loader)
        # Workers would have an untrained copy of the model.
        if self.workers is not None and not has_capability(loader, "follows_training"):
            loader.num_workers = self.workers
            loader.prefetch_factor = 2 if self.workers else None
            if not self.workers:
                loader.__dict__["persistent_workers"] = False
        return loader


def _double_batch_size(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader with batches of twice the size."""
    sampler: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return type(loader)(
        loader.dataset, 2 * int(loader.batch_size or 1), num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        drop_last=loader.drop_last, generator=loader.generator, worker_init_fn=loader.worker_init_fn, **sampler,
    )  # fmt: skip
