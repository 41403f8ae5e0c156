"""Origin: where a run begins: anew, with the weights of another, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import final

from lumen.checkpoint import (
    PARTS,
    Checkpoint,
    Part,
    Weights,
    as_weights,
    check_there,
    choose_parts,
    find_checkpoint,
    is_weights,
    load_model_and_data,
    load_weights,
)
from lumen.checkpoint.averaging import averaged
from lumen.checkpoint.folder import find_newer, newest_committed, set_aside
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.random import chosen_seed, draw_seed
from lumen.run.run import Run


@final
class Origin:
    """Where a run begins; the arguments are those of `Trainer`.

    Attributes:
        restarted: The run has begun in an earlier attempt of the same launch, and goes on where it was.
        rolled_back: The directory of a run that begins again within `fit`, and all that it leaves out then; else None.

    Raises:
        ConfigError: Two of the arguments contradict each other.
    """

    def __init__(
        self,
        resume: str | Path | None,
        resume_parts: Iterable[Part] | None,
        init_from: Weights | str | Path | None,
    ) -> None:
        self._resume = None if resume is None else str(resume)
        self._parts = choose_parts(resume_parts, self._resume)
        self.restarted = self._has_own = False
        self.rolled_back: tuple[Path, list[list[int]]] | None = None
        self._weights = None if init_from is None else as_weights(init_from)
        if self._weights is not None and self._resume is not None and not self.stays:
            raise ConfigError(
                f"init_from and resume={self._resume} both say where a new run's parameters are from. Set one to null."
            )

    def asked_for(self, ckpt_path: str | Path | None) -> Origin:
        """The origin of one run, which may ask for a checkpoint itself.

        Raises:
            ConfigError: The trainer asks for another one.
        """
        if ckpt_path is None:
            return self
        if self._resume not in (None, str(ckpt_path)):
            raise ConfigError(f"fit was given ckpt_path={ckpt_path}, but the trainer resume={self._resume}. Give one.")
        return Origin(ckpt_path, None if self._parts == PARTS else self._parts, self._weights)

    def back(self, directory: Path, left_out: list[list[int]]) -> Origin:
        """The origin of a run that begins again in its directory, from a checkpoint, and leaves out steps."""
        origin = Origin(self._resume, None if self._parts == PARTS else self._parts, self._weights)
        origin.rolled_back = directory, left_out
        return origin

    def anew(self) -> Origin:
        """The origin of a trial: the same parameters to begin with, and no checkpoint."""
        return Origin(None, None, self._weights)

    @property
    def stays(self) -> bool:
        """Whether a resumed run stays in its directory; from "best" or a path a new one starts."""
        return self.restarted or self._resume in ("auto", "last")

    @property
    def parts(self) -> frozenset[Part]:
        """Of a checkpoint that the run takes over."""
        return PARTS if self._has_own else self._parts

    def check(self) -> None:
        """Find out whether there are weights to begin with, before a directory is claimed.

        Raises:
            CheckpointError: There are none.
        """
        if self._weights is not None and not self.stays:
            check_there(self._weights.path)

    def find(
        self, own: Sequence[PurePath], earlier: Sequence[PurePath], processes: Processes, *, writes: bool
    ) -> Checkpoint | None:
        """The checkpoint to go on from, if there is one. Collective: every rank must call this.

        Args:
            own: The folders of this run's, that with the best one first.
            earlier: Likewise of the run of this name.
            processes: Those of the run.
            writes: The run will write there: damaged ones are moved out of its way.

        Raises:
            CheckpointError: The one asked for is not there, or damaged.
        """
        checkpoint = find_checkpoint("auto", own[0], processes, beside=own[1:]) if self.restarted else None
        self._has_own = checkpoint is not None
        if checkpoint is None and self._resume is not None:
            checkpoint = find_checkpoint(self._resume, earlier[0], processes, beside=earlier[1:])
        if checkpoint is not None:
            if writes and self.stays:
                processes.on_rank_zero(partial(_set_aside_newer, checkpoint.path, own))
            _log.info("going on from %s", checkpoint.path)
            if self._weights is not None:
                _log.info("init_from is not read: the parameters are the checkpoint's")
        return checkpoint

    def seed_of(self, checkpoint: Checkpoint | None, given: int | None) -> int:
        """The seed of the run: the checkpoint's, the one given, that of `seed_everything`, or one that torch draws.

        Raises:
            ConfigError: The one given, or that of `seed_everything`, is not the checkpoint's.
            CheckpointMismatch: The checkpoint has no run.
        """
        name = "seed_everything" if given is None else "seed"
        given = chosen_seed() if given is None else given
        if checkpoint is not None and "progress" in self.parts:
            if "seed" not in checkpoint.state:
                raise CheckpointMismatch(f"{checkpoint.path} holds tensors and no run. For its weights, use init_from.")
            saved = int(checkpoint.state["seed"])
            if given not in (None, saved):
                raise ConfigError(
                    f"{name}: {given} is not the seed {saved} of {checkpoint.path}. Leave it out when resuming."
                )
            return saved
        return draw_seed() if given is None else given

    def fill(
        self,
        run: Run,
        ckpt_path: Weights | str | Path | None,
        home: Path,
        folders: Sequence[PurePath],
        average: str | Sequence[str | PurePath] | None = None,
    ) -> Checkpoint | None:
        """Load the model, if there is anything to load.

        Args:
            run: With its model built and placed.
            ckpt_path: What an evaluation asks for.
            home: The run's directory.
            folders: Where its checkpoints lie, that with the best one first.
            average: What an evaluation asks for in place of the checkpoint's parameters.

        Returns:
            The checkpoint that was read.
        """
        task, stage, checkpoint = run.task, run.stage, run.checkpoint
        weights = self._weights if stage == "fit" and checkpoint is None else None
        if ckpt_path is not None and run.processes.on_rank_zero(partial(is_weights, ckpt_path)):
            weights = as_weights(ckpt_path)
            if average is not None and weights.average is not None:
                raise ConfigError(f"average={average!r} and that of ckpt_path, {weights.average!r}: give one of them.")
            if average is not None:
                weights = replace(weights, average=average if isinstance(average, str) else [*map(str, average)])
        elif ckpt_path is not None:
            where = "last" if ckpt_path == "auto" else str(ckpt_path)
            checkpoint = find_checkpoint(where, folders[0], run.processes, beside=folders[1:])
            _log.info("parameters from %s", checkpoint.path if checkpoint else None)
            checkpoint = None if checkpoint is None else averaged(checkpoint, average, run.processes)
        if checkpoint is not None:
            load_model_and_data(run, checkpoint, self.parts if stage == "fit" else PARTS)
            if stage != "fit":
                checkpoint.free()
        elif weights is not None:
            load_weights(task, weights, run.processes)
        elif stage != "fit" and not task._is_filled and any(True for _ in task.parameters()):
            trained = home if any(map(newest_committed, folders)) else "a run"
            _log.warning(
                "%s uses the parameters that %s was built with. For those of %s set ckpt_path, as in --ckpt_path best",
                stage, type(task).__name__, trained,
            )  # fmt: skip
        task._is_filled |= stage == "fit" or checkpoint is not None or weights is not None
        return checkpoint


def _set_aside_newer(path: PurePath, folders: Sequence[PurePath]) -> None:
    """Move what is newer than the newest valid checkpoint, and so damaged, out of the way: its name will be needed."""
    for damaged in find_newer(path, folders):
        set_aside(damaged)
