"""Checkpoints: when one is made, which are kept, and where they lie are three separate questions."""

from __future__ import annotations

import math
import time
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from lumen.callbacks.base import Callback
from lumen.checkpoint.folder import find_checkpoints, read_info, remove_checkpoint
from lumen.errors import ConfigError

if TYPE_CHECKING:
    from lumen.task import TaskModule
    from lumen.trainer import Trainer


@final
class ModelCheckpoint(Callback):
    """Saves checkpoints and removes those that no rule keeps.

    Each is a directory `step-NNNNNNNN`, named by completed optimizer updates. One is never written twice, and none is
    removed before a newer one is committed, nor the one the run was resumed from before that.

    Args:
        monitor: A logged name, such as `val_loss`, that says which checkpoints are best.
        mode: "min": smaller is better; "max": larger is better.
        every_n_steps: When: after every n-th optimizer step.
        every_n_epochs: When: at the end of every n-th epoch; 0: never.
        every_n_minutes: When: that many minutes after the last one; 0: never. Outside exact repetition, as any clock.
        on_best: When: at every new best value of the monitor.
        at_end: When: at the end of training, and when the run is asked to leave.
        keep_last: Which: the newest n; 0: none but the very last; -1: all.
        keep_best: Which: the n best by the monitor.
        keep_every_n_steps: Which: those whose step is a multiple of n.
        dirpath: Where: default `checkpoints` in the run directory.

    Attributes:
        best_model_path: Directory of the best checkpoint, or "".
        best_model_score: Its value, or None.
        last_model_path: Directory of the newest checkpoint, or "".
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int = 1,
        every_n_minutes: float = 10.0,
        on_best: bool = True,
        at_end: bool = True,
        keep_last: int = 2,
        keep_best: int = 1,
        keep_every_n_steps: int | None = None,
        dirpath: str | Path | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f'ModelCheckpoint: mode must be "min" or "max", found {mode!r}.')
        for name, value in (("every_n_steps", every_n_steps), ("keep_every_n_steps", keep_every_n_steps)):
            if value is not None and value < 1:
                raise ConfigError(f"ModelCheckpoint: {name} must be at least 1, found {value}.")
        self.monitor = monitor
        self.mode = mode
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.every_n_minutes = every_n_minutes
        self.on_best = on_best
        self.at_end = at_end
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.keep_every_n_steps = keep_every_n_steps
        self.given_dirpath = self.dirpath = None if dirpath is None else Path(dirpath)
        self.scores: dict[str, float] = {}
        self._epoch = 0
        self._saved_at_s = time.monotonic()

    @property
    def best_model_path(self) -> str:
        """Directory of the best checkpoint; "" before there is one."""
        name = self._best_name()
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    @property
    def best_model_score(self) -> float | None:
        """The monitor's value at the best checkpoint."""
        name = self._best_name()
        return None if name is None else self.scores[name]

    @property
    def last_model_path(self) -> str:
        """Directory of the newest checkpoint; "" before there is one."""
        found = find_checkpoints(self.dirpath) if self.dirpath is not None and self.dirpath.is_dir() else []
        return str(found[-1]) if found else ""

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Start anew, and find out where checkpoints go."""
        if stage != "fit":
            return
        self.scores = {}
        if self.given_dirpath is None and trainer.run_directory is not None:
            self.dirpath = trainer.run_directory / "checkpoints"

    def on_train_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Start the clock, and finish what a kill between a commit and its clean-up left undone."""
        self._saved_at_s = time.monotonic()
        self._epoch = trainer.current_epoch
        resumed = trainer.run.checkpoint
        if resumed is not None and resumed.path.parent == self.dirpath:
            self._prune(trainer, resumed.path)
        elif self.dirpath is not None and self.dirpath.is_dir() and find_checkpoints(self.dirpath):
            raise ConfigError(
                f"ModelCheckpoint: {self.dirpath} holds the checkpoints of another run. "
                'Choose another dirpath, or go on from them with Trainer(resume="auto").'
            )
        self.scores = {name: score for name, score in self.scores.items() if self._exists(name)}

    def on_boundary(self, trainer: Trainer, task: TaskModule) -> None:
        """Save if one of the rules says so."""
        if self.dirpath is None:
            return
        step, epoch = trainer.global_step, trainer.current_epoch
        fresh = self.monitor is not None and self.monitor in trainer.fresh_metrics
        value = float(trainer.callback_metrics[str(self.monitor)]) if fresh else None
        epoch_ended, self._epoch = epoch != self._epoch, epoch
        due = (
            (self.every_n_steps is not None and step % self.every_n_steps == 0)
            or (epoch_ended and self.every_n_epochs > 0 and epoch % self.every_n_epochs == 0)
            or (self.every_n_minutes > 0 and time.monotonic() - self._saved_at_s >= 60 * self.every_n_minutes)
            or (self.on_best and value is not None and self._is_among_best(value))
            or (self.at_end and trainer.is_ending)
        )
        if due:
            self._save(trainer, value)
        if epoch_ended and self.monitor is not None:
            trainer.require_logged("ModelCheckpoint", self.monitor)

    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Complain of a monitor that never had a value, now that all is saved."""
        if self.monitor is not None:
            trainer.require_logged("ModelCheckpoint", self.monitor)

    def state_dict(self) -> dict[str, Any]:
        """Which checkpoints scored what."""
        return {"scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.scores = state["scores"]

    def _save(self, trainer: Trainer, value: float | None) -> None:
        path, saved = self._place(trainer)
        if value is not None:
            self.scores[path.name] = value
        if not saved:
            trainer.save_checkpoint(path, info={"best": self._best_name(), "finished": trainer.run.limit_reached})
        self._saved_at_s = time.monotonic()
        self._prune(trainer, path)

    def _place(self, trainer: Trainer) -> tuple[Path, bool]:
        """Where this moment's checkpoint lies or will lie, and whether it is there already.

        A skipped update leaves the step as it was while samples were consumed: a second moment of a step gets `-1`.
        """
        assert self.dirpath is not None
        committed = find_checkpoints(self.dirpath)
        now = trainer.run.progress.micro_batches, trainer.current_epoch
        later = (f"-{number}" for number in count(1))
        for suffix in ("-validating",) if trainer.validation_due else chain(("",), later):
            path = self.dirpath / f"step-{trainer.global_step:08d}{suffix}"
            if path not in committed:
                return path, False
            info = read_info(path)
            if trainer.validation_due or (info["micro_batches"], info["epoch"]) == now:
                break
        return path, True

    def _exists(self, name: str) -> bool:
        return self.dirpath is not None and (self.dirpath / name).is_dir()

    def _prune(self, trainer: Trainer, newest: Path) -> None:
        """Remove what no rule of any `ModelCheckpoint` keeps; the newest is committed already."""
        assert self.dirpath is not None
        found = find_checkpoints(self.dirpath)
        savers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        sharing = [saver for saver in savers if saver.dirpath == self.dirpath]
        kept = {newest}.union(*(saver.kept(found) for saver in sharing))
        for path in found:
            if path not in kept:
                remove_checkpoint(path)
                for saver in sharing:
                    saver.scores.pop(path.name, None)

    def kept(self, found: list[Path]) -> set[Path]:
        """Which of some checkpoints, oldest first, the rules keep."""
        kept = set(found if self.keep_last < 0 else found[max(0, len(found) - self.keep_last) :])
        best = self._ranked()[: self.keep_best]
        kept |= {path for path in found if path.name in best}
        if self.keep_every_n_steps is not None:
            kept |= {path for path in found if int(path.name.split("-")[1]) % self.keep_every_n_steps == 0}
        return kept

    def _ranked(self) -> list[str]:
        """Scored checkpoints, best first; NaN is never best; of equals the earlier."""
        sign = 1.0 if self.mode == "min" else -1.0
        return sorted(
            (name for name in self.scores if not math.isnan(self.scores[name])),
            key=lambda name: (sign * self.scores[name], name),
        )

    def _best_name(self) -> str | None:
        return next(iter(self._ranked()), None)

    def _is_among_best(self, value: float) -> bool:
        ranked = self._ranked()
        if math.isnan(value) or self.keep_best < 1:
            return False
        if len(ranked) < self.keep_best:
            return True
        worst = self.scores[ranked[self.keep_best - 1]]
        return value < worst if self.mode == "min" else value > worst
