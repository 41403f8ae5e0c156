"""The config.yaml of a run."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import yaml

from lumen.callbacks import Callback
from lumen.checkpoint.disk import fsync_directory
from lumen.cli.settings import Settings

if TYPE_CHECKING:
    from lumen.task import TaskModule
    from lumen.trainer import Trainer

NAME = "config.yaml"
_log = logging.getLogger("lumen")


@final
class SaveConfig(Callback):
    """Writes the resolved configuration into the run's directory, so that it repeats the run.

    It is written when everything is built and loaded and before the first step. A different one that is there already
    (the run goes on with changed options) is kept as `config-1.yaml`, `config-2.yaml` and so on.

    Args:
        settings: What to record; read when it is written.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Write it."""
        directory = trainer.run_directory
        if directory is None or not trainer.is_global_zero:
            return
        _log.info("the run is in %s", directory)
        path = directory / NAME
        before = path.read_text(encoding="utf-8") if path.exists() else None
        record = self._settings.record()
        record["trainer"] |= {"name": directory.name, "resume": _origin(trainer, directory, before)}
        text = f"# lumen fit --config {path}\n{dump(record)}"
        if text == before:
            return
        if before is not None:
            _write_new(directory, before)
        temporary = directory / f"{NAME}.tmp"
        _write(temporary, text, "w")
        os.replace(temporary, path)
        fsync_directory(directory)


def dump(record: dict[str, Any]) -> str:
    """A record as YAML."""
    return yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120)


def _origin(trainer: Trainer, directory: Path, before: str | None) -> str | None:
    """The checkpoint of another run that this one started from: repeating it starts there again.

    Going on in place is no such start, so "auto" and "last" are never recorded.
    """
    checkpoint = trainer.run.checkpoint
    if checkpoint is not None and not checkpoint.path.is_relative_to(directory):
        return str(checkpoint.path)
    recorded = yaml.safe_load(before) if before is not None else {}
    origin = recorded.get("trainer", {}).get("resume")
    return None if origin is None else str(origin)


def _write_new(directory: Path, text: str) -> None:
    number = 1
    while True:
        try:
            return _write(directory / f"config-{number}.yaml", text, "x")
        except FileExistsError:
            number += 1


def _write(path: Path, text: str, mode: str) -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
