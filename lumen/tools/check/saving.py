"""Where checkpoints go, how large they are, and how long the run takes."""

from __future__ import annotations

import math
import os
import shutil
import statistics
from pathlib import Path, PurePath
from typing import NamedTuple, final

from torch.utils.data import DataLoader

from lumen.callbacks import ModelCheckpoint
from lumen.checkpoint.save.collect import capture
from lumen.console import size
from lumen.data.nested import tensors
from lumen.run.run import Run
from lumen.tools.check.data import is_map_style, loaders_in
from lumen.tools.check.moments import Course, saving_steps, validation_steps
from lumen.tools.check.show import Report, counted, duration, every
from lumen.tools.check.trial import Trial

_SLOWER, _WORTH_SAYING_S = 1.5, 0.02


@final
class Estimate(NamedTuple):
    """How long the run takes, by its first steps.

    Attributes:
        step_s: An optimizer step without waiting for data.
        wait_s: Waiting for the data of a step.
        run_s: The whole run, validations too; None: its length is not known.
    """

    step_s: float
    wait_s: float
    run_s: float | None


def look_at_time(report: Report, trial: Trial, run: Run, course: Course) -> Estimate | None:
    """Estimate how long the run takes; compare the loader with the step."""
    witness = trial.witness
    if not witness.compute_s:
        report.add("time", "note", "time", "no step was timed")
        return None
    per_step = 1
    if trial.task.automatic_optimization and run.loaders.train is not None:
        per_step = -(-run.loaders.train.per_step // trial.processes)
    step_s = per_step * statistics.median(witness.compute_s) + (witness.step_s[-1] if witness.step_s else 0.0)
    wait_s = statistics.median(witness.waited_s[1:] or witness.waited_s or [0.0]) / trial.processes
    run_s = None
    if course.steps is not None:
        run_s = (course.steps - course.done) * (step_s + wait_s) + _validation_s(trial, run, course)
    report.facts["time"] = {"step_s": step_s, "wait_s": wait_s, "run_s": run_s}
    _tell_time(report, trial, step_s, wait_s, run_s)
    _compare_loader(report, run, step_s, wait_s, per_step)
    return Estimate(step_s, wait_s, run_s)


def _validation_s(trial: Trial, run: Run, course: Course) -> float:
    batches = [trial.plan.batches("validate", each) for each in run.loaders.evaluation]
    steps = validation_steps(trial.plan, course)
    if not trial.witness.validation_s or steps is None:
        return 0.0
    one_s = min(trial.witness.validation_s)
    return len(steps) * one_s * sum(each or 0 for each in batches) / trial.processes


def _tell_time(report: Report, trial: Trial, step_s: float, wait_s: float, run_s: float | None) -> None:
    each = f"{duration(step_s)} a step, and {duration(wait_s)} of waiting for its data"
    timed = f"estimated by {trial.witness.micro_batches} micro-batches"
    limit_s = trial.plan.max_time_s
    if run_s is None:
        report.add("time", "ok", "time", f"{each}; {timed}")
        return
    shorter = f"; max_time ends it after {duration(limit_s)}" if limit_s is not None and limit_s < run_s else ""
    report.add("time", "ok", "time", f"about {duration(run_s)}: {each}; {timed}{shorter}")


def _compare_loader(report: Report, run: Run, step_s: float, wait_s: float, micro_batches: int) -> None:
    if wait_s <= _SLOWER * step_s or wait_s / micro_batches < _WORTH_SAYING_S:
        return
    loaders = [each for _, each in loaders_in(run.loaders.sources.get("fit")) if isinstance(each, DataLoader)]
    now = max((each.num_workers for each in loaders), default=0)
    wanted, cores = math.ceil((wait_s + step_s * bool(now)) / step_s) * max(now, 1), os.cpu_count() or 1
    workers = min(wanted, cores)
    beyond = f" ({wanted} would be needed, the machine has {cores} cores)" if wanted > cores else ""
    makes_own = not all(map(is_map_style, loaders)) or not loaders  # a stream may follow the training itself
    advice = f"Set num_workers={workers} in DataLoader{beyond}, with persistent_workers=True; or make samples cheaper."
    if not loaders or workers <= now:
        advice = "Make samples cheaper: decode or resize them once, before the run."
    report.add(
        "time", "note" if makes_own else "suspicious", "loader.slow",
        f"the loader is slower than the step: {duration(wait_s)} for the data of one, {duration(step_s)} to compute it",
        advice,
    )  # fmt: skip


# ---------------------------------------------------------------------- checkpoints


def look_at_checkpoints(report: Report, trial: Trial, run: Run, course: Course, estimate: Estimate | None) -> None:
    """Say where checkpoints go and whether there is room for them."""
    if not trial.savers:
        report.add("checkpoints", "note", "checkpoints", "none are saved: enable_checkpointing is False")
        return
    one_bytes = _bytes_of(run)
    report.facts["checkpoint_bytes"] = one_bytes
    for saver in trial.savers:
        _look_at_saver(report, trial, saver, course, estimate, one_bytes)


def _bytes_of(run: Run) -> int:
    """What a checkpoint takes, with the optimizer's state of now."""
    sections, _, _ = capture(run, complete=False)
    return sum(each.numel() * each.element_size() for part in sections.values() for each in tensors(dict(part)))


def _look_at_saver(
    report: Report, trial: Trial, saver: ModelCheckpoint, course: Course, estimate: Estimate | None, one_bytes: int
) -> None:
    trainer = trial.trainer
    place: PurePath = saver.given_dirpath or trainer.default_root_dir / str(trainer.name) / "checkpoints"
    saves = _saves(saver, course, estimate)
    kept = _kept(saver, saves, course)
    most = None if kept is None else one_bytes * (kept + 1)  # none is removed before the next is there
    count = "" if saves is None else f", about {counted(saves, 'time')}"
    held = "all are kept" if kept is None else f"{kept} kept"
    disk = "" if most is None else f": up to {size(most)}"
    rows = [[str(place)], [f"saved {_when(saver)}{count}; {held}, {size(one_bytes)} each{disk}"]]
    if not isinstance(place, Path):
        report.add("checkpoints", "note", "checkpoints", "their place is remote and was not looked at", rows=rows)
        return
    there = _nearest(place)
    free = shutil.disk_usage(there).free
    report.facts.setdefault("checkpoints", []).append(
        {"place": str(place), "kept": kept, "saves": saves, "bytes": most, "free_bytes": free}
    )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        report.add(
            "checkpoints", "wrong", "checkpoints.writable", f"{there} cannot be written to",
            "Choose another trainer.default_root_dir or dirpath, or change its permissions.", rows,
        )  # fmt: skip
    elif (most or one_bytes * max(saves or 1, 1)) > free:
        report.add(
            "checkpoints", "suspicious", "checkpoints.room", f"{size(free)} are free, which is not enough for all",
            "Keep fewer of them: keep_last, save_top_k and keep_every_n_steps of ModelCheckpoint.", rows,
        )  # fmt: skip
    else:
        report.add("checkpoints", "ok", "checkpoints", f"there is room for them: {size(free)} are free", rows=rows)


def _saves(saver: ModelCheckpoint, course: Course, estimate: Estimate | None) -> int | None:
    """How many are saved, about; None: nobody knows."""
    if course.steps is None:
        return None
    saves = len(saving_steps(saver, course))
    if estimate is not None and estimate.run_s is not None and saver.train_time_interval_s < math.inf:
        saves += int(estimate.run_s // saver.train_time_interval_s)
    return max(saves, 1)


def _kept(saver: ModelCheckpoint, saves: int | None, course: Course) -> int | None:
    """How many lie there in the end, at most; None: all, and nobody knows how many."""
    if -1 in (saver.keep_last, saver.save_top_k):
        return saves
    kept = max(saver.keep_last, 1) + (saver.save_top_k if saver.monitor is not None else 0)
    if saver.keep_every_n_steps is not None:
        if course.steps is None:
            return None
        kept += course.steps // saver.keep_every_n_steps
    return kept if saves is None else min(kept, saves)


def _when(saver: ModelCheckpoint) -> str:
    parts = [
        every(saver.every_n_train_steps, "step") if saver.every_n_train_steps else "",
        every(saver.every_n_epochs, "epoch") if saver.every_n_epochs else "",
        f"every {duration(saver.train_time_interval_s)}" if saver.train_time_interval_s < math.inf else "",
        f"at a new best {saver.monitor}" if saver.on_best and saver.monitor is not None else "",
        "at the end" if saver.at_end else "",
    ]
    return ", ".join(filter(None, parts)) or "never"


def _nearest(path: Path) -> Path:
    """What of a path is there already."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
