"""A run or a config, to be trained again: beside what it was, with a recorder, below a temporary directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, final

import torch

from lumen.callbacks import Callback
from lumen.cli import tell
from lumen.cli.command_line import CLI, Checked
from lumen.cli.config_layers import as_list, read_config
from lumen.cli.users_error import show
from lumen.console import logger as _log
from lumen.errors import ConfigError, LumenError
from lumen.tools.bystanders import BYSTANDERS
from lumen.tools.proof.recorded import RecordedRun
from lumen.trainer.trainer import Trainer

_LEFT_OUT = {"PredictionWriter", *(kind.__name__ for kind in BYSTANDERS)}
_AGAIN: dict[str, Any] = {
    "name": "again", "resume_parts": None, "logger": True, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "profiler": None, "max_restarts": 0, "grace_s": None, "min_steps": 0,
    "min_epochs": 0, "log_level": "ERROR", "log_format": None, "devices": 1, "num_nodes": 1, "strategy": "auto",
    "sync_batchnorm": False, "fast_dev_run": False,
}  # fmt: skip


def coded(command: Callable[[], int]) -> int:
    """The exit code of a command whose 1 means that it has found something: 2 for any error, which is printed."""
    try:
        return command()
    except LumenError as error:
        tell(error)
    except Exception as error:  # of the user's code
        show(error)
    return 2


@final
class Rerun:
    """What can be trained again, from its config.

    Args:
        source: The directory of a run, or a config file.
        seed: Where the config has none.

    Attributes:
        source: The path, as it was given.
        config: The settings, as plain data.
        run: What the run has recorded; None: it is a config file.
        notes: What is other than it was, in sentences without a full stop.

    Raises:
        ConfigError: There is no such thing, or a file cannot be read.
    """

    def __init__(self, source: str, *, seed: int = 0) -> None:
        self.source, path = source, Path(source)
        if not path.exists():
            raise ConfigError(f"there is no {source}. Name the directory of a run, or a config file.")
        self.run: RecordedRun | None = None
        self.notes: list[str] = []
        self._file = path / "config.yaml" if path.is_dir() else path
        self.config: dict[str, Any] = self._read() if self._file.exists() else {}
        if path.is_dir():
            self.run = RecordedRun.read(path, _folders(self.config))
        given = self.config.get("seed_everything")
        if self.config and (given is None or given is True):  # which 1 equals
            self.config["seed_everything"] = seed

    def _read(self) -> dict[str, Any]:
        if self._file.parent.is_dir() and (self._file.parent / "environment.json").exists():
            return read_config(str(self._file))
        return dict(
            Checked(args=["fit", "--config", str(self._file)])._recorded()
        )  # with all defaults, as a run has it

    @property
    def why_not(self) -> str | None:
        """Why it cannot be trained again, in a sentence; None: it can."""
        if not self.config:
            return f"{self.source} has no config.yaml: it was started in Python"
        if "class_path" not in (self.config.get("model") or {}):
            return f"{self._file} names no class of a task: it is of a script's own command line"
        return None

    def train(
        self,
        callbacks: list[Callback],
        checkpoint: PurePath | None = None,
        then: Callable[[Trainer, Path], Any] | None = None,
    ) -> Any:
        """Train from a checkpoint, or from the beginning, until a callback stops it.

        Args:
            callbacks: Beside its own.
            checkpoint: One of the run's; None: it begins anew.
            then: Called with the trainer and the directory that the training has written, before that is removed.

        Returns:
            Whatever comes back from `then`; None without one.
        """
        if (reason := self.why_not) is not None:
            raise ConfigError(f"{reason}, so it cannot be trained again here.")
        with TemporaryDirectory(prefix="lumen-", ignore_cleanup_errors=True) as name, self._threads():
            root = Path(name)
            settings = self._settings(root, checkpoint)
            try:
                made = CLI(args=settings, run=False, save_config_callback=None)
            except ConfigError as error:
                error.add_note(self._hint())
                raise
            made.trainer.callbacks += callbacks
            made.trainer.fit(made.model, made.datamodule)
            return None if then is None else then(made.trainer, root / "again")

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """As many threads as the run had: sums are split among them."""
        before = torch.get_num_threads()
        torch.set_num_threads(before if self.run is None else int(self.run.environment.get("threads", before)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _hint(self) -> str:
        where = None if self.run is None else self.run.environment.get("working_directory")
        return f"It was started in {where}: start this command there too." if where else "It is the config's."

    def _settings(self, root: Path, checkpoint: PurePath | None) -> dict[str, Any]:
        trainer = dict(self.config.get("trainer") or {})
        processes = 1 if self.run is None else int(self.run.environment.get("processes", 1))
        trainer["callbacks"] = [each for each in as_list(trainer.get("callbacks")) if _class_of(each) not in _LEFT_OUT]
        trainer |= _AGAIN | {"default_root_dir": str(root), "resume": None if checkpoint is None else str(checkpoint)}
        if checkpoint is not None:
            trainer["init_from"] = None
        if trainer.get("accelerator") == "cuda" and not torch.cuda.is_available():
            trainer["accelerator"] = "auto"
            self._say("it was trained on CUDA, which this machine lacks")
        if processes > 1:
            self._say(f"{processes} processes have trained it, here it is one: sums are rounded in another order")
            if trainer.get("global_batch_size") is None:
                trainer["accumulate_grad_batches"] = _times(processes, trainer.get("accumulate_grad_batches", 1))
        if trainer.get("max_steps") is None and trainer.get("max_epochs") is None:
            trainer["max_epochs"] = 1 << 30
        trainer["max_time"] = None
        return self.config | {"trainer": trainer}

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.info("%s: %s", self.source, note)


def _times(processes: int, accumulate: Any) -> Any:
    if isinstance(accumulate, dict):
        return {epoch: processes * number for epoch, number in accumulate.items()}
    return processes * accumulate


def _class_of(callback: Any) -> str:
    name = callback.get("class_path", "") if isinstance(callback, dict) else callback or ""
    return str(name).rpartition(".")[2]


def _folders(config: dict[str, Any]) -> list[str]:
    """Where the config says that checkpoints are."""
    given = [each for each in as_list((config.get("trainer") or {}).get("callbacks")) if isinstance(each, dict)]
    folders = ((each.get("init_args") or {}).get("dirpath") for each in given if _class_of(each) == "ModelCheckpoint")
    return [str(each) for each in folders if each is not None]
