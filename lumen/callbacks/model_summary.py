"""Table of a model's modules and parameters."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lumen import console as terminal
from lumen.callbacks.base import Callback
from lumen.callbacks.display import format_number
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.metrics.torchmetrics_states import find_metrics

if TYPE_CHECKING:
    from rich.table import Table

    from lumen.callbacks.callback_trainer import CallbackTrainer
    from lumen.task.task_module import TaskModule


class Row(NamedTuple):
    """Numbers of one module, including its submodules; a tied parameter counts once in each row.

    Attributes:
        name: Dotted path; "" is the model itself.
        type: Name of the class; "Parameter" for a parameter that the model holds directly.
        trainable: Number of elements of the parameters that require gradients.
        frozen: Number of elements of the other parameters.
    """

    name: str
    type: str
    trainable: int
    frozen: int

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return self.trainable + self.frozen


@final
class Summary(list[Row]):
    """Rows of a model; the first row is the model itself, with the totals. `str()` gives the printed table."""

    def __init__(self, model: nn.Module, rows: Iterable[Row]) -> None:
        super().__init__(rows)
        self._model = model

    @property
    def total_parameters(self) -> int:
        """Number of elements of all parameters."""
        return self[0].parameters

    @property
    def trainable_parameters(self) -> int:
        """Number of elements of the parameters that require gradients."""
        return self[0].trainable

    @property
    def model_size(self) -> float:
        """Megabytes (10^6 bytes) of the parameters."""
        return sum(_count_elements(each) * each.dtype.itemsize for each in self._model.parameters()) / 1e6

    @property
    def layer_names(self) -> list[str]:
        """Names of the listed modules."""
        return [row.name for row in self[1:]]

    @property
    def layer_types(self) -> list[str]:
        """Class names of the listed modules."""
        return [row.type for row in self[1:]]

    @property
    def param_nums(self) -> list[int]:
        """Numbers of parameter elements of the listed modules."""
        return [row.parameters for row in self[1:]]

    def __str__(self) -> str:
        """Return the table and a line of totals."""
        table = terminal.render_table(_make_table(self[1:], plain=True)) if self[1:] else ""
        return table + _format_totals(self._model, self[0])


@final
class ModelSummary(Callback):
    """Callback that prints a table of the model when `fit` begins, and logs the totals to `run.log`.

    With `log_level="WARNING"` or higher the callback prints nothing.

    Args:
        max_depth: Levels of modules to list; 0: the totals only; -1: all.
    """

    @check_arguments
    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ConfigError(f"ModelSummary: max_depth must be at least -1 (all levels), found {max_depth}.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Print the table."""
        if not (trainer.is_global_zero and _log.isEnabledFor(logging.INFO)):
            return
        (total, *rows), console = summarize(task, self.max_depth), terminal.console
        if rows and console.is_terminal:
            console.print(_make_table(rows, plain=False), highlight=False)
        elif rows:
            print(terminal.render_table(_make_table(rows, plain=True)), end="", file=console.file, flush=True)
        _log.info("%s", _format_totals(task, total))


def summarize(model: nn.Module, max_depth: int = 1) -> Summary:
    """Count the parameters of a model and of its modules; `print(lumen.summarize(model))` shows them.

    Args:
        model: Any module, sharded or not.
        max_depth: Levels of modules below it to list; -1: all.

    Returns:
        First the model itself with the totals; then, in order of definition, its direct parameters and its modules.
        Modules without parameters that are or contain torchmetrics objects are omitted.
    """
    direct = [_make_row(name, "Parameter", [parameter]) for name, parameter in model.named_parameters(recurse=False)]
    modules = [
        _make_row(name, type(module).__name__, module.parameters())
        for name, module in model.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth) and not _is_metric(module)
    ]
    total = _make_row("", type(model).__name__, model.parameters())
    return Summary(model, [total, *direct, *modules] if max_depth else [total])


def _is_metric(module: nn.Module) -> bool:
    """Return True if a module has no parameters but contains torchmetrics objects."""
    return not any(True for _ in module.parameters()) and bool(find_metrics(module))


def _make_row(name: str, kind: str, parameters: Iterable[nn.Parameter]) -> Row:
    counts = {True: 0, False: 0}
    for parameter in parameters:
        counts[parameter.requires_grad] += _count_elements(parameter)
    return Row(name, kind, counts[True], counts[False])


def _make_table(rows: list[Row], *, plain: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=None if plain else box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("name", overflow="fold")
    table.add_column("type", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("trainable", justify="right", no_wrap=True)
    for row in rows:
        share = f"{100 * row.trainable / row.parameters:.3g} %" if row.parameters else ""
        style = "dim" if row.trainable == 0 else ""
        table.add_row(row.name, row.type, _format_count(row.parameters), share, style=style)
    return table


def _format_totals(model: nn.Module, total: Row) -> str:
    """Return one line with the number of parameters and the sizes of parameters and buffers."""
    every = sum(_count_elements(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = f", {_format_count(every - total.parameters)} more tied to these" if every > total.parameters else ""
    buffers = list(model.buffers())
    return (
        f"{total.type}: {_format_count(total.parameters)} parameters ({_format_count(total.trainable)} trainable, "
        f"{_format_count(total.frozen)} frozen{tied}), {_format_size(model.parameters())}"
        f"{f'; buffers {_format_size(buffers)}' if buffers else ''}"
    )


def _format_size(tensors: Iterable[torch.Tensor]) -> str:
    """Format megabytes (10^6 bytes) and dtypes, the largest share first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += _count_elements(tensor) * tensor.dtype.itemsize
    mb = sizes.total() / 1e6
    dtypes = ", ".join(dtype for dtype, _ in sizes.most_common())
    return f"{'< 0.01' if mb < 0.01 else format_number(mb, 3)} MB {dtypes}".rstrip()


def _count_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements; 0 for a parameter of a lazy module before its first batch."""
    return 0 if is_lazy(tensor) else tensor.numel()


def _format_count(count: int) -> str:
    """Format a count in few digits: 954, 12.3 k, 0.81 M, 7.24 B."""
    if count < 1000:
        return str(count)
    if count < 100_000:
        return f"{count / 1e3:.3g} k"
    return f"{count / 1e6:.3g} M" if count < 999_500_000 else f"{count / 1e9:.4g} B"
