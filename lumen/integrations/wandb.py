"""Logger for Weights & Biases."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, expand_path
from lumen.errors.lightning_names import ATTRIBUTES_OF_WANDB
from lumen.integrations.service import UPLOADING, Service, as_plain
from lumen.internals.optional_packages import import_optional
from lumen.loggers.base import Array, as_array, as_uint8_image, explain_wrong_calls

_STEP = "trainer/global_step"


@final
class WandbLogger(Service):
    """Logger for Weights & Biases, online or into files that `wandb sync` uploads.

    All values are plotted over `trainer/global_step`; timings and memory have names that begin with `system/`.
    Hyperparameters are the config: `lr` of the task is `model.lr`.

    The file `wandb.json` in the run directory stores the run's id; a resumed run continues the same W&B run. Its files
    are in `wandb` in the run directory, in one folder for each part of the run. Recorded values are not sent again. A
    killed process may lose up to 15 seconds of values, which Lumen restores from the CSV files. Lost images, histograms
    and texts are not restored.

    `experiment` is a `wandb.Run`, `version` its id. If the program has called `wandb.init`, the logger uses that run
    and leaves it open.

    Args:
        name: Name of the run. Default: the name of the run directory.
        save_dir: Parent directory of the folder `wandb`. Default: the run directory.
        version: Id of a W&B run to continue, instead of the one in the run directory; the same as `id`.
        offline: Write files only. The variable WANDB_MODE=offline does the same.
        id: Alias of `version`.
        project: The project of the run. Default: the variable WANDB_PROJECT, else "lumen".
        experiment: A `wandb.Run` to use, which is left open.
        prefix: Prefix of all value names, before a "-".
        entity: The user or team that owns the project.
        group: Name of a group of runs that W&B shows together.
        tags: Tags of the run.
        notes: Description of the run.
        kwargs: Further arguments of `wandb.init`, such as `config` and `settings`; in YAML under `dict_kwargs`.

    Raises:
        ConfigError: The package `wandb` is not installed.
    """

    title = "Weights & Biases"
    file = "wandb.json"
    INSTEAD: ClassVar[Mapping[str, str]] = {
        "add_file_policy": "Leave it out: Lumen does not upload checkpoints.",
        "anonymous": "Leave it out: W&B no longer has anonymous runs.",
        "checkpoint_name": "Leave it out: Lumen does not upload checkpoints.",
        "log_model": UPLOADING,
        "resume": "Leave it out: a resumed run continues its W&B run. To continue a different W&B run, set id.",
    }
    ATTRIBUTES: ClassVar[Mapping[str, str]] = {**Service.ATTRIBUTES, **ATTRIBUTES_OF_WANDB}

    @check_arguments
    def __init__(
        self,
        /,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        offline: bool = False,
        id: str | None = None,
        project: str | None = None,
        experiment: Any = None,
        prefix: str = "",
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix)
        self._library = import_optional("wandb", "WandbLogger", "wandb")
        if None not in (id, version) and id != version:
            raise ConfigError(f"WandbLogger: id={id!r} and version={version!r} name two runs. Remove one of the two.")
        self._name, self._project, self._user_run, self._user_id = name, project, experiment, id or version
        self._place = None if save_dir is None else expand_path(save_dir)
        self._mode = "offline" if offline else None
        about = {"entity": entity, "group": group, "tags": tags, "notes": notes}
        self._options = {name: value for name, value in about.items() if value is not None} | kwargs
        self._watched: list[tuple[Any, dict[str, Any]]] = []

    def connect(self, directory: Path, kept: str | None) -> str:
        """Begin or resume a W&B run."""
        place = (directory if self._place is None else self._place).absolute()  # W&B's service has its own directory.
        place.mkdir(parents=True, exist_ok=True)
        self._first_row: int | None = None
        running = self._user_run or self._library.run
        self._owns_run = running is None
        if running is None:
            project = self._project or os.environ.get("WANDB_PROJECT") or "lumen"
            about = {"name": self._name or directory.name, "project": project, "mode": self._mode, "dir": str(place)}
            about |= {"id": self._user_id or kept, "resume": "allow"}
            running = self._library.init(**about | self._options)
        self._writer = running
        if kept is not None and self._owns_run and running.offline:
            self._first_row = 1 + max((number for number, _ in self._read_earlier_rows()), default=-1)
        running.define_metric(_STEP)
        running.define_metric("*", step_metric=_STEP, step_sync=True)
        for module, options in self._watched:
            self._watch(module, options)
        return str(running.id)

    def recorded(self, directory: Path) -> Iterator[tuple[str, int, Any]]:
        """Yield name, step and value of everything that the run's files contain."""
        for _, row in self._read_earlier_rows():
            if isinstance(step := row.pop(_STEP, None), int):
                yield from ((name, step, value) for name, value in row.items() if not name.startswith("_"))

    def _read_earlier_rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows in the run's files; for earlier parts of an online run only the uploaded rows."""
        from lumen.integrations.wandb_files import read_history

        newest = Path(self._writer.settings.sync_file).absolute()
        uploaded = math.inf if self._writer.offline else self._writer.starting_step
        # W&B adds "-1" to the name of the second folder in a second.
        files = sorted(path.absolute() for path in newest.parents[1].glob(f"*run-*-{self._writer.id}*/{newest.name}"))
        return [row for path in files for row in read_history(path) if path == newest or row[0] < uploaded]

    def send(self, values: Mapping[str, Any], step: int) -> None:
        """Log values."""
        self._writer.log({**values, _STEP: step}, step=self._first_row, commit=True)
        self._first_row = None  # The library counts further rows.

    def send_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Update the config."""
        self._writer.config.update(as_plain(params), allow_val_change=True)

    @explain_wrong_calls
    def log_image(self, name: str, image: Array, step: int) -> None:
        """Log an image."""
        pixels = as_uint8_image(name, image)
        self.record(self._send_new_object, name, step, lambda: self._library.Image(pixels))

    @explain_wrong_calls
    def log_histogram(self, name: str, values: Array, step: int) -> None:
        """Log a histogram of the finite values."""
        numbers = as_array(values).astype(np.float64)
        numbers = numbers[np.isfinite(numbers)]
        if numbers.size:
            self.record(self._send_new_object, name, step, lambda: self._library.Histogram(numbers))

    @explain_wrong_calls
    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text as a table of one cell, which is how W&B shows texts."""
        self.record(self._send_new_object, name, step, lambda: self._library.Table(["text"], [[text]]))

    def _send_new_object(self, name: str, step: int, make: Callable[[], Any]) -> None:
        if ((key := self.key(name)), step) not in self._pending_calls or self._is_marked:
            self.send({key: make()}, step)

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of a module's gradients or parameters; may be called before `fit`.

        Args:
            model: The module, such as the task.
            log: "gradients", "parameters", "all", or None for neither.
            log_freq: Number of calls of the module between two records.
            log_graph: Record the module's graph too.
        """
        options = {"log": log, "log_freq": log_freq, "log_graph": log_graph}
        self._watched = [each for each in self._watched if each[0] is not model] + [(model, options)]
        if self.is_open:
            self._watch(model, options)

    def _watch(self, module: Any, options: dict[str, Any]) -> None:
        for part in module.modules():  # `unwatch` leaves this mark, with which `watch` refuses a module.
            vars(part).pop("_wandb_watch_called", None)
        self._writer.watch(module, **options)

    @property
    def name(self) -> str | None:
        """Name of the W&B run; None before `fit`."""
        return self._name or (None if self.run_directory is None else self.run_directory.name)

    def describe_library_use(self) -> str:
        """Return how to continue the W&B run."""
        where = {"entity": self._writer.entity, "project": self._writer.project, "dir": self.log_dir}
        given = ", ".join(f"{name}={value!r}" for name, value in where.items() if value)
        return f", or write wandb.init(id={self._id!r}, resume='allow', {given})"

    def disconnect(self, status: str) -> None:
        """End the W&B run, unless it belongs to the user."""
        for module, _ in self._watched:
            self._writer.unwatch(module)
        if not self._owns_run:
            return
        if status == "interrupted":
            self._writer.mark_preempting()
        self._writer.finish(exit_code=0 if status == "success" else 1)
        if self._writer.offline:
            from lumen.integrations.wandb_files import wait_for_end

            wait_for_end(Path(self._writer.settings.sync_file))  # A run that resumes at once must find all records.
