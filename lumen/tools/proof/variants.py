"""Which runs prove what: the variants, and what of the trainer's arguments each of them changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lumen.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, Timer
from lumen.cli.config_layers import as_list
from lumen.data.iterable_style import declares
from lumen.data.nested import convert
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.tools.bystanders import BYSTANDERS
from lumen.trainer.tuner import BatchSizeFinder, LearningRateFinder

NAME = "run"
#: What has no part in what is computed, or would end or change the run that proves it.
_LEFT_OUT = (*BYSTANDERS, BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, Timer)
Moment = Literal["training", "validation", "save"]
Name = Literal["single", "ddp", "fsdp"]
MOMENTS: tuple[Moment, ...] = ("training", "validation", "save")
STRATEGIES: tuple[Name, ...] = ("ddp", "fsdp")


@final
@dataclass(frozen=True)
class Size:
    """How much each variant does.

    Attributes:
        steps: How many optimizer steps are made.
        accumulate: Micro-batches of a step on one process; even.
        epoch_steps: How many of them an epoch has.
        val_batches: Batches of a validation; an uneven number, so that two processes have unequal shares.
        save_every: Steps between two checkpoints, and between two validations.
        seed: The seed of every variant.
        limit_s: Seconds after which a variant hangs.
        threads: Of torch, in each process.
        accelerator: Where they run.
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
    """One run.

    Attributes:
        name: Of its folder, and in a certificate.
        world: Number of processes.
        strategy: single, ddp or fsdp.
        exact: In the user's own precision, for bits; else in float64, where the order of sums changes no more than
            the last digits of 16.
        joins: Micro-batches of two batches each, half as many in a step.
        workers: Of the training loader; None: as the user has it.
        kill: When the process kills itself.
        resume: What it goes on from: auto, or a checkpoint.
        evaluates: It evaluates, at the checkpoint of `resume`.
        compiles: The task is compiled by torch.compile.
        fresh: By an interpreter of its own, which hashes strings another way.
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

    def changes(self, size: Size, folder: Path, given: dict[str, Any], precision: str | None) -> dict[str, Any]:
        """The trainer's arguments, of those that the settings have.

        Args:
            size: How much it does.
            folder: Where it may write.
            given: The arguments that the user has chosen.
            precision: Of variants that are not exact; None: the user's.
        """
        accumulate = size.accumulate // (2 if self.joins else 1) // self.world
        own = given.get("strategy")  # an object of this kind keeps the settings that the user has given it
        is_kind = not isinstance(own, str) and type(own).__name__.lower() == self.strategy
        changed: dict[str, Any] = {
            **dict.fromkeys(("max_epochs", "max_time", "devices", "num_nodes", "global_batch_size", "profiler"), None),
            **dict.fromkeys(("min_steps", "min_epochs", "num_sanity_val_steps", "overfit_batches", "max_restarts"), 0),
            **dict.fromkeys(("fast_dev_run", "detect_anomaly", "sync_batchnorm", "enable_progress_bar"), False),
            **dict.fromkeys(("resume_parts", "grace_s", "gc_every_n_steps"), None),
            "max_steps": size.steps,
            "accumulate_grad_batches": accumulate,
            "limit_train_batches": size.epoch_steps * accumulate * self.world,
            "limit_val_batches": size.val_batches,
            "val_check_interval": size.save_every,
            "check_val_every_n_epoch": 1,
            "log_every_n_steps": 1,
            "strategy": own if is_kind else self.strategy,
            "accelerator": size.accelerator,
            "compile": (given.get("compile") or True) if self.compiles else False,
            "default_root_dir": folder,
            "name": NAME,
            "resume": self.resume,
            "enable_checkpointing": not self.evaluates,
            "enable_model_summary": False,
            "log_level": "WARNING",
        }
        if not self.exact and precision is not None:
            changed["precision"] = precision
        if given.get("init_from") is not None and self.resume is not None:
            changed["init_from"] = None
        return changed

    def callbacks(self, given: Any, size: Size) -> list[Callback]:
        """The user's callbacks, without those that would end, change or show the run."""
        kept = [each for each in as_list(given) if not isinstance(each, _LEFT_OUT)]
        if self.evaluates:
            return kept
        saves = ModelCheckpoint(every_n_train_steps=size.save_every, keep_last=-1, asynchronous=False)
        return [*kept, saves]

    def adapt(self, task: TaskModule, data: DataModule | None) -> None:
        """Change the training loaders, wherever they come from."""
        if self.workers is None and not self.joins:
            return
        owner: Any = data if data is not None else task
        made_by_user = owner.train_dataloader
        owner.train_dataloader = lambda: convert(made_by_user(), self._adapted)

    def _adapted(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader):
            return loader
        if self.joins and loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler:
            loader = _joined(loader)
        # Workers would have a copy of the model that is never trained.
        if self.workers is not None and not declares(loader, "follows_training"):
            loader.num_workers = self.workers
            loader.prefetch_factor = 2 if self.workers else None
            if not self.workers:
                loader.__dict__["persistent_workers"] = False
        return loader


def _joined(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader with batches of twice the size."""
    sampler: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return type(loader)(
        loader.dataset, 2 * int(loader.batch_size or 1), num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        drop_last=loader.drop_last, generator=loader.generator, worker_init_fn=loader.worker_init_fn, **sampler,
    )  # fmt: skip
