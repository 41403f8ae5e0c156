"""Saving of checkpoints: rules for when to save, which checkpoints to keep, and where to store them."""

from __future__ import annotations

import logging
import math
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, final

import torch

from lumen.callbacks.base import Callback
from lumen.callbacks.callback_trainer import CallbackTrainer
from lumen.callbacks.checkpoint_names import (
    as_score,
    can_rank_checkpoints,
    find_lost_checkpoints,
    get_moment,
    is_same_path,
    locate_checkpoint,
    order_checkpoint_callbacks,
)
from lumen.checkpoint import CheckpointSaver
from lumen.checkpoint.format.folder import clean_leftovers, find_newest_committed, find_unread, remove_checkpoints
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.errors.lightning_names import INSTEAD_IN_CHECKPOINTS, NEUTRAL_IN_CHECKPOINTS
from lumen.run.plan import Duration, parse_duration_s
from lumen.task.task_module import TaskModule

_DEFAULT_INTERVAL_S = 600.0
_SHORT_RUN_S = 10.0


@final
class ModelCheckpoint(Callback):
    """Callback that saves checkpoints and removes those that no rule keeps.

    Each checkpoint is a directory `step-NNNNNNNN`, named by completed optimizer updates. A checkpoint is never written
    twice. Lumen removes a checkpoint only after a newer one is complete (committed), including the checkpoint that the
    run was resumed from.

    When Lumen saves: by default at the end of every epoch and every 10 minutes. If `every_n_train_steps`,
    `every_n_epochs` or `train_time_interval` is given, only at the given times. In both cases also at every new best
    value, and at the end.

    Which checkpoints are kept: all that at least one rule keeps (`keep_last`, `save_top_k`, `keep_every_n_steps`). A
    resumed run with a new or changed monitor also keeps, with a warning, the earlier checkpoints without a known score.

    Several in a run: each callback has its own rules and its own best checkpoints. Only a callback with a monitor (and
    a `save_top_k` other than 0) ranks checkpoints. The first such callback of a directory decides for that directory,
    such as for `--which best` of `lumen export` and the star of `lumen runs`. The first such callback of the run
    decides for the run: for `ckpt_path="best"`, `resume="best"` and `trainer.checkpoint_callback`. A run resumes from
    the newest checkpoint of all its directories.

    How Lumen saves: every process copies its part to host memory, and training continues. Threads then write, sync,
    commit, and remove checkpoints that no rule keeps. At most one save is in progress. The next save waits for it, and
    so does the end of the run, whose own checkpoint is written at once. If a checkpoint cannot be written, the run ends
    with that error at a later step (with several processes within about half a second). The attributes below include a
    checkpoint once it is committed.

    Args:
        filename: Accepted for compatibility with Lightning, with a warning: Lumen names each checkpoint by its step.
        monitor: A logged name, such as `val_loss`. Its values of epochs or validations rank the checkpoints. "step" and
            "epoch", unless they are logged names, rank the checkpoints that other rules save by these counts.
        mode: "min": smaller is better; "max": larger is better.
        every_n_train_steps: Save after every n-th optimizer step; 0: never.
        every_n_epochs: Save at the end of every n-th epoch; 0: never.
        train_time_interval: Save this long after the previous save: "DD:HH:MM:SS", a timedelta, or its keywords. A
            repeated run saves at other steps, because the interval depends on the clock.
        on_best: Save at every new best value of the monitor.
        at_end: Save at the end of training, and when the run is asked to stop.
        keep_last: Number of newest checkpoints to keep; 0: only the very last one; -1: all.
        save_top_k: Number of best checkpoints to keep by the monitor; 0: none, and no checkpoint is known as the best;
            -1: all.
        keep_every_n_steps: Keep checkpoints whose step is a multiple of n.
        dirpath: Directory or URL of the checkpoints. Default: `checkpoints` in the run directory. If a different run
            has saved there, or is running and saves there, a new run saves in `DIRPATH-2`, `DIRPATH-3` and so on. A
            URL may be any that fsspec can write to: `s3://` and `gs://` need `pip install 'lumen-train[remote]'`.
        asynchronous: True: training waits for the copy only. False: training waits for the commit. Default: True for a
            URL, and for 16 MiB or more (each tensor counts 16 KiB extra), but only if the copy takes at most half of
            the machine's free memory; otherwise False. A process that copies keeps host memory of the size of its share
            until the run ends. The memory is allocated before the first save: at once with `every_n_train_steps`, after
            half the interval with `train_time_interval` alone, else after 10 seconds.
        save_last: Accepted for compatibility with Lightning: the newest checkpoints are always kept; `last_model_path`
            is the newest.
        verbose: Log every save in the terminal and `run.log`; False: only at log_level DEBUG.
    """

    may_stop_at_steps = False

    INSTEAD, NEUTRAL = INSTEAD_IN_CHECKPOINTS, NEUTRAL_IN_CHECKPOINTS
    COUNTS = ("step", "epoch")  # monitors that need not be logged

    @check_arguments
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: Duration | None = None,
        on_best: bool = True,
        at_end: bool = True,
        keep_last: int = 2,
        save_top_k: int = 1,
        keep_every_n_steps: int | None = None,
        asynchronous: bool | None = None,
        save_last: bool | Literal["link"] | None = None,
        verbose: bool = False,
    ) -> None:
        if save_last and keep_last == 0:
            raise ConfigError(
                f"ModelCheckpoint: save_last={save_last!r} and keep_last=0 contradict each other. Remove one of the "
                "two."
            )
        check_at_least(0, "ModelCheckpoint", every_n_train_steps=every_n_train_steps, every_n_epochs=every_n_epochs)
        check_at_least(1, "ModelCheckpoint", keep_every_n_steps=keep_every_n_steps)
        check_at_least(-1, "ModelCheckpoint", keep_last=keep_last, save_top_k=save_top_k)
        if monitor is None and save_top_k > 1:
            raise ConfigError(
                f"ModelCheckpoint: save_top_k={save_top_k} needs a monitor to rank checkpoints. Set monitor."
            )
        has_interval = (every_n_train_steps, every_n_epochs, train_time_interval) != (None, None, None)
        self.filename, self.monitor, self.mode = filename, monitor, mode
        self.every_n_train_steps = every_n_train_steps or 0
        self.every_n_epochs = (every_n_epochs or 0) if has_interval else 1
        self.train_time_interval_s = math.inf if has_interval else _DEFAULT_INTERVAL_S
        if train_time_interval is not None:
            self.train_time_interval_s = parse_duration_s("ModelCheckpoint: train_time_interval", train_time_interval)
        self.on_best, self.at_end = on_best, at_end
        self.keep_last, self.save_top_k = keep_last, save_top_k
        self.keep_every_n_steps = keep_every_n_steps
        self.given_dirpath = self.dirpath = None if dirpath is None else as_path_or_url(dirpath)
        self.asynchronous, self.save_last, self.verbose = asynchronous, save_last, verbose
        self.scores: dict[str, float | None] = {}  # None: a checkpoint of the resumed run whose score is unknown
        self._score: float | None = None
        self._has_saved_scores = False  # True if the resumed checkpoint holds the scores of this callback
        self._should_save = False  # True if a rule wants a checkpoint at the end of this step
        self._saves: CheckpointSaver | None = None
        self._shares_monitor = False  # True if a second `ModelCheckpoint` has the same monitor and mode
        self._callbacks_of_run: list[ModelCheckpoint] = []  # all of the run in progress, including this one

    @property
    def best_model_path(self) -> str:
        """Directory of the best checkpoint, or of the newest one without a monitor; "" without a checkpoint."""
        if self.monitor is None:
            return self.last_model_path if self.save_top_k else ""
        return self._get_path(next(iter(self._rank_committed_scores()), None))

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """Value of the monitor at the best checkpoint: a float64 tensor without dimensions."""
        scores = [*self._rank_committed_scores().values()]
        return as_score(scores[0]) if scores else None

    @property
    def current_score(self) -> torch.Tensor | None:
        """Newest value of the monitor: a float64 tensor without dimensions."""
        return None if self._score is None else as_score(self._score)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """Dictionary from directory to monitor value of the `save_top_k` best checkpoints, best first."""
        return {
            self._get_path(name): as_score(score)
            for name, score in self._select_top_k(self._rank_committed_scores()).items()
        }

    @property
    def kth_value(self) -> torch.Tensor | None:
        """Value of the monitor at the worst of the `save_top_k` best checkpoints."""
        return next(reversed(self.best_k_models.values()), None)

    @property
    def kth_best_model_path(self) -> str:
        """Directory of the worst of the `save_top_k` best checkpoints; "" without a checkpoint."""
        return self._get_path(next(reversed(self._select_top_k(self._rank_committed_scores())), None))

    @property
    def last_model_path(self) -> str:
        """Directory of the newest checkpoint; "" without a checkpoint."""
        newest = None if self.dirpath is None else find_newest_committed(self.dirpath)
        return "" if newest is None else str(newest)

    def use_folder(self, folder: PurePath) -> None:
        """Set the directory of the next run's checkpoints, which `locate_folder` has found."""
        self.dirpath = folder

    def setup(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Reset the callback."""
        if stage != "fit":
            return
        self.scores, self._score, self._has_saved_scores = {}, None, False
        other_savers = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint) and each is not self]
        self._shares_monitor = any((each.monitor, each.mode) == (self.monitor, self.mode) for each in other_savers)

    def on_train_start(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Start the clock, and finish work that a killed process left undone after its commit."""
        self._saves = trainer.run.saves
        if self.filename is not None and trainer.is_global_zero:
            _log.warning(
                "ModelCheckpoint: ignoring filename=%r, since Lumen names the checkpoints in %s step-NNNNNNNN. Read "
                "best_model_path, best_k_models or last_model_path", self.filename, self.dirpath,
            )  # fmt: skip
        if self.given_dirpath not in (None, self.dirpath) and trainer.is_global_zero:
            _log.warning("%s belongs to a different run: this run saves in %s", self.given_dirpath, self.dirpath)
        self._known_paths: set[PurePath] = set()  # on rank 0: the checkpoints found by the last search
        savers = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]
        self._callbacks_of_run = [each for each in savers if each.dirpath is not None]
        self._saved_at_s, self._epoch = trainer.run.ending.vote.now_s, trainer.current_epoch
        # The step of a validation in progress has no checkpoint yet.
        self._step, self._has_new_step = trainer.global_step - trainer.progress.validation_due, True
        self._reserve_at_s = self._saved_at_s + self._get_reserve_delay_s(trainer)
        resumed = trainer.run.checkpoint
        lost = trainer.processes.run_on_rank_zero(self._find_lost)
        if self.given_dirpath is not None and self.dirpath is not None:  # The lock of the run cleans its own directory.
            trainer.processes.run_on_rank_zero(partial(clean_leftovers, self.dirpath))
        is_over = resumed is not None and trainer.processes.run_on_rank_zero(
            lambda: trainer.run.ending.limit_reached is not None  # A hook may have set `should_stop` on one rank only.
        )
        if is_over and self.at_end and self.dirpath is not None:  # The checkpoint of this moment is saved below.
            lost -= {self._locate_checkpoint(trainer)[0].name}
        self.scores = {name: score for name, score in self.scores.items() if name not in lost}
        if resumed is not None:
            self.scores |= dict.fromkeys(trainer.processes.run_on_rank_zero(self._find_unscored))
        if resumed is None or self._callbacks_of_run[-1:] != [self]:
            return
        for each in self._callbacks_of_run:  # All of them know their scores by now.
            if is_over and each.at_end:  # The last checkpoint may be missing here if the process was killed.
                each.save(trainer, at_once=True)
            elif resumed.path.parent == each.dirpath:
                each._prune(trainer, resumed.path)

    def on_step_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Check if a rule wants a checkpoint of this step; if so, all ranks first agree on whether the run ends."""
        self._has_new_step, self._step = trainer.global_step != self._step, trainer.global_step
        self._should_save = self.dirpath is not None and self._is_due(trainer)
        if self._should_save:
            trainer.request_stop_vote()

    def on_step_checkpoint(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Save if a rule wants a checkpoint."""
        if self.dirpath is None:
            return
        if self is self._callbacks_of_run[0]:
            self._save_due_checkpoints(trainer)
        epoch_ended, self._epoch = trainer.current_epoch != self._epoch, trainer.current_epoch
        if epoch_ended:
            self._check_monitor(trainer)

    def _save_due_checkpoints(self, trainer: CallbackTrainer) -> None:
        """Note all scores, then save with every `ModelCheckpoint` that is due: each save stores all scores."""
        run, saves, ending = trainer.run, trainer.run.saves, trainer.run.ending.is_last_step
        if saves.has_ended or ending:
            saves.finish_save()
        for each in self._callbacks_of_run if ending else ():
            each._should_save = each.at_end or each._is_due(trainer)
        for each in self._callbacks_of_run:
            if run.values.updated or each._should_save:
                each._note_score(trainer)
        for each in self._callbacks_of_run:
            if each._should_save:
                each.save(trainer, at_once=ending)
            elif run.ending.vote.now_s >= each._reserve_at_s and not ending:
                each._reserve_at_s = math.inf
                saves.reserve_memory(asynchronous=each.asynchronous)

    def _note_score(self, trainer: CallbackTrainer) -> None:
        """Note a new value of the monitor, also as the score of this step's checkpoint."""
        value, progress = self._get_new_value(trainer), trainer.progress
        if value is None and self._should_save and self.monitor in self.COUNTS:
            value = float(progress.step if self.monitor == "step" else progress.epochs_begun - 1)
        if value is not None:
            self._score = value
            if self._should_save:
                self.scores[self._locate_checkpoint(trainer)[0].name] = value

    def _is_due(self, trainer: CallbackTrainer) -> bool:
        """Return True if a rule wants a checkpoint here, even if training continues. All ranks get the same result."""
        progress, value = trainer.progress, self._get_new_value(trainer)
        interval = self.every_n_train_steps
        return (
            (interval > 0 and self._has_new_step and progress.step % interval == 0)
            or (progress.epoch != self._epoch and self.every_n_epochs > 0 and progress.epoch % self.every_n_epochs == 0)
            or trainer.run.ending.vote.now_s - self._saved_at_s >= self.train_time_interval_s
            or (self.on_best and value is not None and self._is_among_best(value))
        )

    def _get_new_value(self, trainer: CallbackTrainer) -> float | None:
        """Return the value of the monitor if it is new, else None."""
        fresh = self.monitor is not None and self.monitor in trainer.run.values.updated
        return trainer.run.values.newest[str(self.monitor)] if fresh else None

    def on_train_end(self, trainer: CallbackTrainer, task: TaskModule) -> None:
        """Wait for a save in progress, then raise an error if the monitor never had a value."""
        saves = trainer.run.saves
        saves.finish_save()
        trainer.processes.run_on_rank_zero(saves.wait)  # waits for removals too
        self._check_monitor(trainer)

    def _check_monitor(self, trainer: CallbackTrainer) -> None:
        if self.monitor is not None and self.monitor not in self.COUNTS:
            trainer.run.values.check_monitor("ModelCheckpoint", self.monitor)

    def teardown(self, trainer: CallbackTrainer, task: TaskModule, stage: str) -> None:
        """Drop the references to the run."""
        self._saves, self._callbacks_of_run = None, []

    @property
    def state_key(self) -> str:
        """Class name with monitor and mode, and with `dirpath` if several callbacks have the same monitor."""
        distinguishing = (
            {"dirpath": str(self.given_dirpath)} if self._shares_monitor and self.given_dirpath is not None else {}
        )
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, **distinguishing)

    def state_dict(self) -> dict[str, Any]:
        """Return the scores of the checkpoints, if there is a monitor."""
        return {} if self.monitor is None else {"scores": self.scores, "current_score": self._score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scores."""
        self.scores, self._score, self._has_saved_scores = state["scores"], state["current_score"], True

    def save(self, trainer: CallbackTrainer, *, at_once: bool = False) -> None:
        """Save this step unless it is saved already, and remove checkpoints that no rule keeps. Collective.

        Args:
            trainer: The trainer of a run that has just completed a step.
            at_once: Write the checkpoint before returning, even if `asynchronous`.
        """
        run, saves, moment = trainer.run, trainer.run.saves, get_moment(trainer)
        if saves.moment != moment:
            saves.finish_save()
        path, saved = self._locate_checkpoint(trainer)
        if not saved:
            chief = order_checkpoint_callbacks(self._find_callbacks_of_folder(path.parent))[0]
            ranked, on_save_end = list(chief._rank_scores()), partial(self._finish_save, trainer, path)
            info = {"best": ranked[0] if ranked else None, "ranked": ranked, "monitor": chief.monitor}
            info["finished"] = run.ending.limit_reached
            later = False if at_once else self.asynchronous
            saves.save(path, info, asynchronous=later, moment=moment, on_save_end=on_save_end)
            level = logging.INFO if self.verbose else logging.DEBUG
            _log.log(level, "saving %s" if saves.path == path else "saved %s", path)
        elif saves.path is None or not is_same_path(saves.path, path):
            self._prune(trainer, path)
        self._saved_at_s = run.ending.vote.now_s

    def _locate_checkpoint(self, trainer: CallbackTrainer) -> tuple[PurePath, bool]:
        """Return the path of the present moment, and True if it is saved already. Collective."""
        assert self.dirpath is not None
        return trainer.processes.run_on_rank_zero(partial(locate_checkpoint, trainer, self.dirpath))

    def _get_reserve_delay_s(self, trainer: CallbackTrainer) -> float:
        """Return the seconds until host memory is allocated for copies.

        The allocation comes well before the first save, but not in a run that ends before that time.
        """
        if self.every_n_train_steps:
            return 0.0
        by_epochs = self.every_n_epochs > 0 and trainer.max_epochs != trainer.current_epoch + 1
        if by_epochs or (self.on_best and self.monitor is not None):
            return min(_SHORT_RUN_S, self.train_time_interval_s / 2)
        return self.train_time_interval_s / 2

    def _find_lost(self) -> set[str]:
        """Return the names with a score whose checkpoints are removed or damaged."""
        if self.dirpath is None:
            return set(self.scores)
        return find_lost_checkpoints(self.dirpath, self.scores, self._rank_scores(), max(1, self.save_top_k))

    def _find_unscored(self) -> list[str]:
        """Return the earlier checkpoints whose scores are unknown, since the resumed run had no such callback."""
        if self.monitor is None or self.dirpath is None or self._has_saved_scores:
            return []
        known = {name for each in self._find_callbacks_of_folder(self.dirpath) for name in each.scores}
        found = [path.name for path in find_unread(self.dirpath) if path.name not in known]
        if found:
            _log.warning(
                "ModelCheckpoint keeps the earlier checkpoints in %s (%d), because the resumed run saved no %s for "
                "them. Remove these checkpoints if they are not needed", self.dirpath, len(found), self.monitor,
            )  # fmt: skip
        return found

    def _prune(self, trainer: CallbackTrainer, newest: PurePath) -> None:
        """Remove checkpoints that no rule of any `ModelCheckpoint` keeps; the newest is committed already."""
        trainer.processes.run_on_rank_zero(
            partial(remove_checkpoints, self._find_removable(trainer, newest, committed=True))
        )

    def _finish_save(self, trainer: CallbackTrainer, newest: PurePath, *, committed: bool) -> list[PurePath]:
        """Update the scores after a save, notify loggers if it is complete, and return the checkpoints to remove."""
        removable = self._find_removable(trainer, newest, committed=committed)
        for logger in trainer.run.records.loggers if committed else ():
            logger.after_save_checkpoint(self)
        return removable

    def _find_removable(self, trainer: CallbackTrainer, newest: PurePath, *, committed: bool) -> list[PurePath]:
        """Return the checkpoints to remove now that the newest is committed, and drop their scores. Collective."""
        sharing = self._find_callbacks_of_folder(newest.parent)

        def find() -> list[PurePath]:
            trainer.run.saves.wait_for_removals()  # A checkpoint in removal must not be found again.
            found = find_unread(newest.parent, known=self._known_paths)
            self._known_paths = {*found}
            found = found[: found.index(newest) + 1] if newest in found else []  # Checkpoints after it are damaged.
            complete = [path for path in found if path == newest or not path.name.endswith("-validating")]
            kept = {newest}.union(*(saver._select_kept(complete) for saver in sharing))
            return [path for path in found if path not in kept]

        removable = trainer.processes.run_on_rank_zero(find) if committed else []
        for path in removable if committed else [newest]:
            for saver in sharing:
                saver.scores.pop(path.name, None)
        return removable

    def _find_callbacks_of_folder(self, folder: PurePath) -> list[ModelCheckpoint]:
        """Return the `ModelCheckpoint` callbacks that save in a folder."""
        return [
            saver
            for saver in self._callbacks_of_run
            if saver.dirpath is not None and is_same_path(saver.dirpath, folder)
        ]

    def _select_kept(self, found: list[PurePath]) -> set[PurePath]:
        """Return the checkpoints that the rules keep, out of all paths, oldest first."""
        if -1 in (self.keep_last, self.save_top_k):
            return set(found)
        unscored = {name for name, score in self.scores.items() if score is None}
        best, every = unscored.union(self._select_top_k(self._rank_scores())), self.keep_every_n_steps
        kept = set(found[max(0, len(found) - self.keep_last) :]) | {path for path in found if path.name in best}
        return kept | {path for path in found if every and int(path.name.split("-")[1]) % every == 0}

    def _rank_scores(self) -> dict[str, float]:
        """Return the scores of checkpoints by name, best first, without NaN; equal scores keep the order of steps."""
        sign = 1.0 if self.mode == "min" else -1.0
        scores = self.scores.items() if can_rank_checkpoints(vars(self)) else ()
        scored = [(name, score) for name, score in scores if score is not None and not math.isnan(score)]
        return dict(sorted(scored, key=lambda item: (sign * item[1], item[0])))

    def _rank_committed_scores(self) -> dict[str, float]:
        """Return `_rank_scores` without the checkpoint whose save is in progress."""
        under_way = None if self._saves is None else self._saves.path
        return {name: score for name, score in self._rank_scores().items() if self._get_path(name) != str(under_way)}

    def _select_top_k(self, ranked: dict[str, float]) -> dict[str, float]:
        """Return the first `save_top_k` of ranked scores."""
        return ranked if self.save_top_k < 0 else dict(islice(ranked.items(), self.save_top_k))

    def _get_path(self, name: str | None) -> str:
        return "" if name is None or self.dirpath is None else str(self.dirpath / name)

    def _is_among_best(self, value: float) -> bool:
        if math.isnan(value) or self.save_top_k == 0:
            return False
        top = [*self._select_top_k(self._rank_scores()).values()]
        if len(top) < self.save_top_k or self.save_top_k < 0:
            return True
        return value < top[-1] if self.mode == "min" else value > top[-1]
