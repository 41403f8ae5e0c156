"""Which names of a Python file are Lightning's, and what each is called in Lumen."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import NamedTuple, final

import lumen
from lumen.errors.lightning_names import INSTEAD_OF_CLASSES, LIGHTNINGS, RENAMED

_MODULES = (
    "accelerators apply_func argparse base batch_size_finder callback callbacks checkpoint cli combined_loader "
    "comet compile core csv_logs data datamodule demos device_stats_monitor distributed early_stopping enums "
    "environments exceptions fabric finetuning gpu_stats_monitor gradient_accumulation_scheduler grads hooks "
    "imports io lambda_function layer_sync lightning logger loggers loops lr_finder lr_monitor memory metrics "
    "migration mlflow model_checkpoint model_helpers model_summary module neptune on_exception_checkpoint "
    "overrides parsing plugins precision prediction_writer profiler profilers progress progress_bar pruning "
    "pytorch rank_zero rich_model_summary rich_progress saving seed states stochastic_weight_avg strategies "
    "tensorboard testing throughput timer tqdm_progress trainer training_type tuner types utilities wandb "
    "warnings weight_averaging "
)
#: Modules of Lightning's, of any version, below its packages.
MODULES = frozenset(_MODULES.split())
#: Types and functions that have a counterpart outside of Lumen's public classes, by their full names.
ELSEWHERE: Mapping[str, str] = {
    "ArgsType": "typing.Any",
    "EVAL_DATALOADERS": "typing.Any",
    "LRScheduler": "torch.optim.lr_scheduler.LRScheduler",
    "LRSchedulerTypeUnion": "torch.optim.lr_scheduler.LRScheduler",
    "LightningArgumentParser": "lumen.cli.options.OptionParser",
    "LightningEnum": "enum.StrEnum",
    "MisconfigurationException": "lumen.errors.ConfigError",
    "OptimizerConfig": "typing.Any",
    "OptimizerLRScheduler": "typing.Any",
    "OptimizerLRSchedulerConfig": "typing.Any",
    "STEP_OUTPUT": "typing.Any",
    "SaveConfigCallback": "lumen.cli.outputs.SaveConfig",
    "TRAIN_DATALOADERS": "typing.Any",
}


@final
class New(NamedTuple):
    """What a name of Lightning's is called now.

    Attributes:
        module: Where it is imported from.
        name: The last part of its full name.
    """

    module: str
    name: str


def short_name(full: str) -> str:
    """The last part of a full name."""
    return full.rpartition(".")[2]


def is_module(full: str) -> bool:
    """Whether a full name of Lightning's is that of a package or a module."""
    return full in LIGHTNINGS or short_name(full) in MODULES


def new_name(full: str) -> New | None:
    """What a class or function of Lightning's is called now; None: Lumen has no counterpart."""
    short = short_name(full)
    if short == "__version__":
        return New("lumen", short)
    if full.split(".")[1:2] == ["fabric"] or full.startswith("lightning_fabric."):
        return New("lumen", short) if short == "seed_everything" else None
    if short in lumen.__all__:
        return New("lumen", short)
    to = RENAMED.get(short) or ELSEWHERE.get(short)
    if to is None:
        return None
    module, _, name = to.rpartition(".")
    return None if module == "lumen" and name not in lumen.__all__ else New(module, name)


def instead_of(full: str) -> str:
    """What to write in place of a name that has no counterpart, as a sentence."""
    short = short_name(full)
    if full.split(".")[1:2] == ["fabric"] or short == "Fabric" or full.startswith("lightning_fabric"):
        return "Lumen has no Fabric: write the loop as training_step of a TaskModule."
    return INSTEAD_OF_CLASSES.get(short) or _FUNCTIONS.get(short) or f"Lumen has no {short}."


_LOGGING = "Write logging.getLogger(__name__): what it is told is shown once, by the first process."
_FUNCTIONS: Mapping[str, str] = {
    "AttributeDict": "Write a dictionary, or types.SimpleNamespace.",
    "LRSchedulerCallable": "Write Callable[[Optimizer], LRScheduler].",
    "OptimizerCallable": "Write Callable[[Iterable], Optimizer].",
    "find_shared_parameters": "Write parameters(remove_duplicate=False).",
    "measure_flops": "Use torch.utils.flop_counter.FlopCounterMode, or ThroughputMonitor(measure_flops=True).",
    "rank_zero_deprecation": _LOGGING,
}


@final
class Binding(NamedTuple):
    """A name that an import gives to something of Lightning's.

    Attributes:
        local: The name in the file.
        full: The full name of what it stands for.
        alias: Where that is written.
        statement: The import that has the alias.
    """

    local: str
    full: str
    alias: ast.alias
    statement: ast.Import | ast.ImportFrom


@final
class Names:
    """The names of Lightning's in a file, and all others that are bound in it.

    Args:
        tree: The syntax tree of the file.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.bindings: dict[str, Binding] = {}
        self.every: list[Binding] = []
        self.stars: list[ast.ImportFrom] = []
        self.others: dict[str, str] = {}
        self.bound: set[str] = set()
        for node in ast.walk(tree):
            self._note(node)
        functions = (
            each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        #: Names of Lightning's that functions give to something else, so that a use of them may mean either.
        self.unclear = {_stored(node) for function in functions for node in ast.walk(function)} & {*self.bindings}
        #: Names that the file gives to something else too, as where an import fails.
        self.assigned = {_stored(node) for node in ast.walk(tree)} - self.unclear

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                full = alias.name if alias.asname else package
                self._bind(alias.asname or package, full, alias, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" and (node.module or "").split(".")[0] in LIGHTNINGS and not node.level:
                    self.stars.append(node)
                self._bind(
                    alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}", alias, node
                )
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
        elif isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self.bound.add(node.name)

    def _bind(self, local: str, full: str, alias: ast.alias, statement: ast.Import | ast.ImportFrom) -> None:
        if full.split(".")[0] in LIGHTNINGS:
            if alias.name != "*":
                self.every.append(Binding(local, full, alias, statement))
                self.bindings[local] = self.every[-1]
        else:
            self.bound.add(local)
            self.others[local] = full

    def full(self, node: ast.AST) -> str | None:
        """The full name of Lightning's, or of something else that is imported, that a name in the file stands for."""
        if isinstance(node, ast.Attribute):
            owner = self.full(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if not isinstance(node, ast.Name) or node.id in self.unclear:
            return None
        return self.bindings[node.id].full if node.id in self.bindings else self.others.get(node.id)

    def of_lightning(self, node: ast.AST) -> str | None:
        """The full name of Lightning's that a name in the file stands for."""
        full = self.full(node)
        return full if full is not None and full.split(".")[0] in LIGHTNINGS else None

    def root(self, node: ast.AST) -> Binding | None:
        """The import by which a name in the file is Lightning's."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self.bindings.get(node.id) if isinstance(node, ast.Name) and node.id not in self.unclear else None


def _stored(node: ast.AST) -> str:
    """Return the name that a node gives to something, or an empty text."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""
