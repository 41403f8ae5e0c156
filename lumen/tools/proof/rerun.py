"""Runs and configs to train again: their records, and a repeated training in a temporary directory."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from pydoc import locate
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, final

import torch

from lumen.callbacks import Callback
from lumen.callbacks.checkpoint_names import locate_folder
from lumen.checkpoint.format.manifest import read_head
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import as_path_or_url, is_dir
from lumen.cli import print_error
from lumen.cli.command_line import CLI, CheckedCommand
from lumen.cli.config_layers import as_list, read_config
from lumen.cli.user_errors import print_user_error
from lumen.console import logger as _log
from lumen.data.nested import flatten_leaves
from lumen.errors import ConfigError, LumenError
from lumen.loggers.csv import read_rows
from lumen.tools.proof.recorder import digest_value
from lumen.tools.runs.find import list_checkpoints
from lumen.tools.side_effect_callbacks import SIDE_EFFECT_CALLBACKS
from lumen.trainer.trainer import Trainer

_IGNORED_ENVIRONMENT = ("command", "working_directory", "host", "slurm")  # where a run was made


class RecordedValue(NamedTuple):
    """Logged value of a run.

    Attributes:
        step: Number of completed updates when the value was logged.
        name: The column of `metrics.csv`.
        text: The text of the value in `metrics.csv`.
    """

    step: int
    name: str
    text: str


def compute_relative_difference(recorded: str, now: str) -> float | None:
    """Return the difference of two logged values, relative to the larger, or None if they are not numbers."""
    try:
        mine, other = float(recorded), float(now)
    except ValueError:
        return None
    return abs(mine - other) / max(abs(mine), abs(other), 1e-300)


def _read_metrics(path: Path) -> dict[tuple[int, str], str]:
    """Return the texts of the values in a `metrics.csv` by step and name; empty without the file."""
    return {(step, name): text for step, values in read_rows(path) for name, text in values.items()}


def find_parting(
    a: Mapping[tuple[int, str], str], b: Mapping[tuple[int, str], str]
) -> tuple[RecordedValue, RecordedValue] | None:
    """Return the first values that differ in two records for the same step and name, or None."""
    differ = (key for key in a.keys() & b.keys() if a[key] != b[key])
    first = min(differ, default=None)
    return None if first is None else (RecordedValue(*first, a[first]), RecordedValue(*first, b[first]))


def find_differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ in two mappings, by name, with None for a missing value."""
    return {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}


_LEFT_OUT = {"PredictionWriter", *(kind.__name__ for kind in SIDE_EFFECT_CALLBACKS)}
_RERUN_SETTINGS: dict[str, Any] = {
    "name": "again", "resume_parts": None, "logger": True, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "profiler": None, "max_restarts": 0, "grace_s": None, "min_steps": 0,
    "min_epochs": 0, "log_level": "ERROR", "log_format": None, "devices": 1, "num_nodes": 1, "strategy": "auto",
    "sync_batchnorm": False, "fast_dev_run": False,
}  # fmt: skip


def run_with_exit_code(command: Callable[[], int]) -> int:
    """Run a command and return its exit code, or print an error and return 2. In these commands, 1 is not an error."""
    try:
        return command()
    except LumenError as error:
        print_error(error)
    except Exception as error:  # an error of user code
        print_user_error(error)
    return 2


@final
class Rerun:
    """Run or config that can be trained again, with the records of the run.

    Args:
        source: The directory of a run, or a config file, which has no records.

    Attributes:
        source: The path, as given.
        is_run: True if the source is the directory of a run.
        config: The settings, as plain data.
        metrics: The text of each logged value by step and name, in the order of `metrics.csv`.
        environment: Versions, machine and processes, from `environment.json`.
        checkpoints: Valid checkpoints by step.
        notes: Differences between the repeated and the recorded training, in sentences without a full stop.
        filled: Names of the settings that a run of this config takes from its data.

    Raises:
        ConfigError: The source does not exist, or a file cannot be read.
    """

    def __init__(self, source: str) -> None:
        self.source, path = source, Path(source)
        if not path.exists():
            raise ConfigError(f"there is no {source}. Name the directory of a run, or a config file.")
        self.is_run = path.is_dir()
        self._file = path / "config.yaml" if self.is_run else path
        self.filled: set[str] = set()
        self.config: dict[str, Any] = self._read_config() if self._file.exists() else {}
        self.metrics: dict[tuple[int, str], str] = {}
        self.environment: dict[str, Any] = {}
        self.checkpoints: dict[int, PurePath] = {}
        self.notes: list[str] = []
        if self.is_run:
            self._read_records(path)
        seed = self.config.get("seed_everything")
        self._has_seed = seed is not None and seed is not True  # `is`, because 1 == True
        if self.config and not self._has_seed:
            self.config["seed_everything"] = 0

    def take_seed(self, other: Rerun) -> None:
        """Use the seed of another run or config if the config has none, as each run draws a different one."""
        if self.config and other._has_seed and not self._has_seed:
            self.config["seed_everything"] = other.config["seed_everything"]
            self._add_note(f"the config has no seed, and takes that of {other.source}")

    def _read_config(self) -> dict[str, Any]:
        if (self._file.parent / "environment.json").exists():
            return read_config(str(self._file))
        command = CheckedCommand(args=["fit", "--config", str(self._file)])
        self.filled = {f"model.init_args.{name}" for name in command._links}
        return command._make_config_record()  # with all defaults, as the config of a run

    def _read_records(self, path: Path) -> None:
        metrics, environment = path / "metrics.csv", path / "environment.json"
        if not (metrics.exists() or environment.exists() or self._file.exists()):
            missing = "the directory has no config.yaml and no metrics.csv"
            raise ConfigError(f"{path} is not a run: {missing}. Name the directory of a run.")
        self.metrics = _read_metrics(metrics)
        if os.access(environment, os.R_OK):  # Only the owner of a run may read this file.
            self.environment = json.loads(environment.read_text())
        for place in (locate_folder(path, given) for given in [None, *_list_dirpaths(self.config)]):
            found = list_checkpoints(place) if is_dir(place) else []
            valid = (each for each in found if not (each.problem or each.kind))
            self.checkpoints |= {int(each.info["step"]): each.path for each in valid}

    def find_checkpoint_before(self, step: int) -> tuple[int, PurePath | None]:
        """Return the number of updates and the path of the newest checkpoint before a step, or 0 and None."""
        begin = max((each for each in self.checkpoints if each < step), default=0)
        return begin, self.checkpoints.get(begin)

    def compare_environment(self, other: Rerun) -> dict[str, tuple[Any, Any]]:
        """Return the differences in machine, versions and processes from another run."""
        mine, theirs = (
            {k: v for k, v in flatten_leaves(each.environment) if k.partition(".")[0] not in _IGNORED_ENVIRONMENT}
            for each in (self, other)
        )
        return find_differing(mine, theirs) if mine and theirs else {}

    def find_common_checkpoints(self, other: Rerun) -> tuple[int, int | None]:
        """Compare the parameters and optimizer states in the checkpoints of two runs.

        Returns:
            The step of the last equal checkpoint before the first different one, or 0, and the step of the first
            different one, or None. Checkpoints of the same files are compared by the bytes of these files. Other
            numbers of processes write other files, whose tensors are read and compared.
        """
        equal = 0
        for step in sorted(self.checkpoints.keys() & other.checkpoints.keys()):
            if not _are_equal(self.checkpoints[step], other.checkpoints[step]):
                return equal, step
            equal = step
        return equal, None

    @property
    def refusal(self) -> str | None:
        """Reason why the source cannot be trained again, as a sentence, or None if it can."""
        if not self.config:
            return f"{self.source} has no config.yaml, since the run was started in Python"
        if "class_path" not in (self.config.get("model") or {}):
            return f"{self._file} has no class_path of a task, since a script's own command line wrote the file"
        return None

    def train(
        self, callbacks: list[Callback], checkpoint: PurePath | None
    ) -> tuple[Trainer, dict[tuple[int, str], str]]:
        """Train from a checkpoint, or from the beginning, until a callback stops the training.

        Args:
            callbacks: Callbacks to add to those of the config.
            checkpoint: A checkpoint of the run, or None to start with new parameters.

        Returns:
            The trainer, and the text of each logged value by step and name.
        """
        if (reason := self.refusal) is not None:
            raise ConfigError(f"{reason}, so the run cannot be trained again.")
        with TemporaryDirectory(prefix="lumen-", ignore_cleanup_errors=True) as name, self._limit_threads():
            root = Path(name)
            settings = self._make_settings(root, checkpoint)
            try:
                made = CLI(args=settings, run=False, save_config_callback=None)
            except ConfigError as error:
                where = self.environment.get("working_directory")
                advice = f"The run was started in {where}: run this command there." if where else "Check the config."
                error.add_note(advice)
                raise
            made.trainer._change_settings(callbacks)
            made.trainer.fit(made.model, made.datamodule)
            return made.trainer, _read_metrics(root / "again" / "metrics.csv")

    @contextmanager
    def _limit_threads(self) -> Iterator[None]:
        """Use as many threads as the run, because their number affects the order of sums."""
        before = torch.get_num_threads()
        torch.set_num_threads(int(self.environment.get("threads", before)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _make_settings(self, root: Path, checkpoint: PurePath | None) -> dict[str, Any]:
        trainer = dict(self.config.get("trainer") or {})
        processes = int(self.environment.get("processes", 1))
        trainer["callbacks"] = [each for each in as_list(trainer.get("callbacks")) if not _is_left_out(each)]
        trainer |= _RERUN_SETTINGS | {
            "default_root_dir": str(root),
            "resume": None if checkpoint is None else str(checkpoint),
        }
        if checkpoint is not None:
            trainer["init_from"] = None
        if trainer.get("accelerator") == "cuda" and not torch.cuda.is_available():
            trainer["accelerator"] = "auto"
            self._add_note("the run used CUDA, which this machine lacks")
        if processes > 1:
            self._add_note(
                f"the run used {processes} processes, but this training uses one: sums are rounded in a different order"
            )
            if trainer.get("global_batch_size") is None:
                setting = _pop_schedule(trainer["callbacks"]) or trainer.get("accumulate_grad_batches", 1)
                times = {0: 1} | setting if isinstance(setting, dict) else {0: setting}
                trainer["accumulate_grad_batches"] = {epoch: processes * each for epoch, each in times.items()}
        if trainer.get("max_steps") is None and trainer.get("max_epochs") is None:
            trainer["max_epochs"] = 1 << 30
        trainer["max_time"] = None
        return self.config | {"trainer": trainer}

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
            _log.info("%s: %s", self.source, note)


def _are_equal(a: PurePath, b: PurePath) -> bool:
    ours, theirs = _list_files(a), _list_files(b)
    return ours == theirs if ours.keys() == theirs.keys() else _digest_tensors(a) == _digest_tensors(b)


def _digest_tensors(path: PurePath) -> dict[tuple[str, str], str]:
    sections = ("model", "optimizer")
    read = Checkpoint.open(path, "sizes", sections=sections)
    tensors = (((section, name), tensor) for section in sections for name, tensor in read.as_mapping(section).items())
    return {key: digest_value([tensor]) for key, tensor in tensors}


def _list_files(checkpoint: PurePath) -> dict[str, str]:
    files = read_head(checkpoint).files
    return {name: sha for name, (_, sha) in files.items() if name.startswith(("model/", "optimizer/"))}


def _get_class_name(callback: Any) -> str:
    name = callback.get("class_path", "") if isinstance(callback, dict) else callback or ""
    return str(name).rpartition(".")[2]


def _pop_schedule(callbacks: list[Any]) -> dict[int, int] | None:
    """Remove the `GradientAccumulationScheduler` of a config, and return its schedule; None without one."""
    for number, each in enumerate(callbacks):
        if _get_class_name(each) == "GradientAccumulationScheduler":
            return dict(callbacks.pop(number)["init_args"]["scheduling"])
    return None


def _is_left_out(callback: Any) -> bool:
    """Return True if a callback of the config does not change the computation."""
    path = callback.get("class_path", "") if isinstance(callback, dict) else callback or ""
    kind = locate(str(path))
    is_subclass = inspect.isclass(kind) and issubclass(kind, SIDE_EFFECT_CALLBACKS)
    return is_subclass or _get_class_name(callback) in _LEFT_OUT


def _list_dirpaths(config: dict[str, Any]) -> list[PurePath]:
    """Return the directories of checkpoints in the config's callbacks."""
    callbacks = [each for each in as_list((config.get("trainer") or {}).get("callbacks")) if isinstance(each, dict)]
    folders = (
        (each.get("init_args") or {}).get("dirpath") for each in callbacks if _get_class_name(each) == "ModelCheckpoint"
    )
    return [as_path_or_url(each) for each in folders if each is not None]
