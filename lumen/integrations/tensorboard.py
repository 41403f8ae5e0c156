"""Logger for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from lumen.errors.arguments import check_arguments
from lumen.errors.lightning_names import INSTEAD_IN_LOGGERS, NEUTRAL_IN_LOGGERS
from lumen.internals.masking import mask_secrets
from lumen.internals.optional_packages import import_optional
from lumen.loggers.base import Array, Logger, NullWriter, as_array, as_image_array, explain_wrong_calls, flatten_entries

_MIN_UNBINNED = 1e20  # The bins of TensorBoard's histograms end here.


@final
class TensorBoardLogger(Logger):
    """Logger that writes event files into `tensorboard` in the run directory: `tensorboard --logdir runs` shows them.

    Metrics are float32 scalars over the step; timings and memory have names that begin with `system/`. A resumed run
    cuts the files back to its checkpoint and continues in a new file, which TensorBoard merges with the others. A
    server started earlier with `--load_fast=false` shows the removed values until it is restarted.

    `experiment` is a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = INSTEAD_IN_LOGGERS | {
        "default_hp_metric": "Leave it out: TensorBoard shows a run's hyperparameters next to all its values.",
        "log_graph": "Leave it out; self.logger.experiment.add_graph(task, batch) records a graph.",
        "sub_dir": "Leave it out: the files are in `tensorboard` in the run directory.",
    }
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_IN_LOGGERS

    @check_arguments
    def __init__(self) -> None:
        import_optional("tensorboard", "TensorBoardLogger", "tensorboard")
        self._make_writer = import_module("lumen.integrations.tensorboard_events").EventWriter
        self._directory: Path | None = None
        self._step = 0
        self._hyperparameters: dict[str, int | float | str] | None = None
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
        """`SummaryWriter`; outside of `fit`, and in all processes but the first, calls on it do nothing."""
        if self._directory is None:
            return NullWriter()
        if self._writer is None:
            self._writer = self._make_writer(self._directory / f"events.out.tfevents.{self._part:05d}.lumen")
            self._part += 1
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
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters; `lr` of the task is `model.lr`. Values other than numbers are written as text.

        TensorBoard's dashboard shows one value per hyperparameter and run. If a resumed run has changed
        hyperparameters, they are written as a text named "hyperparameters".
        """
        flat = flatten_entries(params, ".")
        plain = {name: value if type(value) in (int, float) else str(mask_secrets(value, name)) for name, value in flat}
        before, self._hyperparameters = self._hyperparameters, plain
        if before is None:
            if plain:
                self.experiment.add_hyperparameters(plain)
            return
        pairs = {name: (str(before.get(name)), str(plain.get(name))) for name in before | plain}
        changed = [f"* `{name}`: {old} → {new}" for name, (old, new) in pairs.items() if old != new]
        if changed:
            self.log_text("hyperparameters", "\n".join(["changed:", "", *changed]), self._step)

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
