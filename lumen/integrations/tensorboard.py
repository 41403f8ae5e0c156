"""Logger for TensorBoard."""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn

from lumen.console import logger as _log
from lumen.data.nested import move_batch
from lumen.distributed.dtensor import is_sharded
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.errors.lightning_names import INSTEAD_IN_LOGGERS, NEUTRAL_IN_LOGGERS
from lumen.internals.masking import mask_secrets
from lumen.internals.optional_packages import import_optional
from lumen.loggers.base import (
    Array,
    DeferredWriter,
    RunDirectoryLogger,
    as_array,
    as_hyperparameters,
    as_image_array,
    explain_wrong_calls,
    flatten_entries,
)
from lumen.random import preserve_generators

_MIN_UNBINNED = 1e20  # The bins of TensorBoard's histograms end here.


@final
class TensorBoardLogger(RunDirectoryLogger):
    """Logger that writes event files into `tensorboard` in the run directory: `tensorboard --logdir runs` shows them.

    Metrics are float32 scalars over the step; timings and memory have names that begin with `system/`. A resumed run
    cuts the files back to its checkpoint and continues in a new file, which TensorBoard merges with the others. A
    server started earlier with `--load_fast=false` shows the removed values until it is restarted.

    `experiment` is a `torch.utils.tensorboard.SummaryWriter`.

    Args:
        save_dir: Parent of the run directory, if `Trainer(default_root_dir=...)` does not set it.
        name: Name of the run, if `Trainer(name=...)` does not set it; the names of further runs are `name-2`, ...
        version: Name of the run within the directory `name`; a number N means "version_N".
        log_graph: Record the graph of the task when `fit` starts; the task needs `example_input_array`.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = INSTEAD_IN_LOGGERS | {
        "default_hp_metric": "Leave it out: TensorBoard shows a run's hyperparameters next to all its values.",
        "sub_dir": "Leave it out: the files are in `tensorboard` in the run directory.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_IN_LOGGERS

    @check_arguments
    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = None,
        version: int | str | None = None,
        *,
        log_graph: bool = False,
    ) -> None:
        super().__init__(save_dir, name, version)
        import_optional("tensorboard", "TensorBoardLogger", "tensorboard")
        self._make_writer = import_module("lumen.integrations.tensorboard_events").EventWriter
        self._directory: Path | None = None
        self._step, self._log_graph = 0, log_graph
        self._hyperparameters: dict[str, int | float | str] | None = None
        self._before_fit: dict[str, int | float | str] = {}
        self._deferred = DeferredWriter("TensorBoardLogger")
        self._writer: Any = None

    def open(self, directory: Path, *, resumed: bool) -> None:
        """Choose the number of the next event file; remove old files unless the run is resumed."""
        self._directory = directory / "tensorboard"
        self._step, self._hyperparameters = 0, None
        # The number exceeds the numbers of all existing files, including files to remove, so names always increase.
        self._part = max(
            (int(path.name.split(".")[3]) + 1 for path in self._list_event_files("events.out.tfevents.*.lumen")),
            default=0,
        )
        if not resumed:
            for path in self._list_event_files():
                path.unlink()

    @property
    def experiment(self) -> Any:
        """`SummaryWriter`, in a run and in the first process.

        Calls before the run are made once it begins. Other calls do nothing.
        """
        if self._directory is None:
            return self._get_idle_writer(self._deferred)
        if self._writer is None:
            self._writer = self._make_writer(self._directory / f"events.out.tfevents.{self._part:05d}.lumen")
            self._part += 1
        self._deferred.replay(self._writer)
        return self._writer

    @explain_wrong_calls
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        self._step = step
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)

    def log_system(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars with names that begin with `system/`."""
        for name, value in values.items():
            self.experiment.add_scalar(f"system/{name}", value, step)

    @explain_wrong_calls
    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None, metrics: Mapping[str, float] | float | None = None
    ) -> None:
        """Write hyperparameters; `lr` of the task is `model.lr`. Values other than numbers are written as text.

        Hyperparameters given before `fit` are written once `fit` begins. `metrics` are values to log at this step; one
        number is named "hp_metric".

        TensorBoard's dashboard shows one value per hyperparameter and run. Values of later calls that are new or
        changed, also those of a resumed run, are written as a text named "hyperparameters".
        """
        if metrics is not None:
            self.log_metrics(metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics})
        flat = flatten_entries(as_hyperparameters(params), ".")
        plain = {name: value if type(value) in (int, float) else str(mask_secrets(value, name)) for name, value in flat}
        if self._directory is None:
            self._before_fit |= plain
            return
        plain = self._before_fit | plain
        before, self._hyperparameters = self._hyperparameters, (self._hyperparameters or {}) | plain
        if before is None:
            if plain:
                self.experiment.add_hyperparameters(plain)
            return
        pairs = {name: (str(before[name]), str(value)) for name, value in plain.items() if name in before}
        changed = [f"* `{name}`: {old} → {new}" for name, (old, new) in pairs.items() if old != new]
        added = [f"* `{name}`: {value}" for name, value in plain.items() if name not in before]
        lines = [*(["changed:", "", *changed] if changed else []), *(["added:", "", *added] if added else [])]
        if lines:
            self.log_text("hyperparameters", "\n".join(lines), self._step)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write the graph of a module, which runs in eval mode; without `input_array` only if `log_graph` is set."""
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if self._directory is None or (input_array is None and not self._log_graph):
            return
        if example is None:
            raise ConfigError(
                f"TensorBoardLogger(log_graph=True): {type(model).__name__} has no example_input_array. Set "
                "self.example_input_array in __init__ of the task, to a tensor or a tuple of the arguments of forward."
            )
        if any(map(is_sharded, model.parameters())):
            _log.warning(  # Only this process has the logger, so an error would leave the others waiting.
                "TensorBoardLogger wrote no graph, because the parameters of %s are sharded and only the first process "
                "would compute the graph. Record the graph in a run with strategy: auto and devices: 1",
                type(model).__name__,
            )
            return
        device = next((each.device for each in model.parameters()), None)
        modes = [(module, module.training) for module in model.modules()]
        with preserve_generators(), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # `add_graph` of torch traces.
            try:
                self.experiment.add_graph(model.eval(), move_batch(example, device) if device else example)
            finally:
                for module, was_training in modes:  # A parent comes before its children.
                    module.train(was_training)

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Write an image."""
        self.experiment.add_image(name, as_image_array(name, image), step)

    @explain_wrong_calls
    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Write a histogram."""
        numbers = as_array(values).astype(np.float64)
        numbers = numbers[np.abs(numbers) < _MIN_UNBINNED]
        if numbers.size:
            self.experiment.add_histogram(name, numbers, step)

    @explain_wrong_calls
    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        self.experiment.add_text(name, text, step)

    def save(self) -> None:
        """Write buffered events to the disk."""
        if self._writer is not None:
            self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes of the event files in bytes, the last logged step, and the hyperparameters."""
        files = {self._get_state_key(path): path.stat().st_size for path in self._list_event_files()}
        return {"files": files, "step": self._step, "hyperparameters": self._hyperparameters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut every file back to its saved size, remove newer files, and continue in a new file."""
        self._close_writer()
        self._step, self._hyperparameters = state["step"], state["hyperparameters"]
        for path in self._list_event_files():
            size = state["files"].get(self._get_state_key(path))
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def describe_library_use(self) -> str:
        """Return how to write further events."""
        return f", or write torch.utils.tensorboard.SummaryWriter('{self.log_dir}/tensorboard')"

    def finalize(self, status: str) -> None:
        """Close the event file."""
        self._close_writer()
        self._directory = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _list_event_files(self, pattern: str = "*tfevents*") -> list[Path]:
        """Return the event files, including those in subdirectories, which `add_scalars` and `add_hparams` create."""
        return [] if self._directory is None else sorted(self._directory.rglob(pattern))

    def _get_state_key(self, path: Path) -> str:
        assert self._directory is not None
        return path.relative_to(self._directory).as_posix()
