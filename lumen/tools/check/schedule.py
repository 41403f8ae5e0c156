"""Checks of the whole run: steps, learning rates, validations, checkpoints and duration."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import time
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path, PurePath
from typing import final

from torch.utils.data import DataLoader

from lumen.callbacks import ModelCheckpoint
from lumen.checkpoint.save.collect import capture_run
from lumen.console import format_bytes
from lumen.data.combined import list_loaders
from lumen.data.nested import iterate_tensors
from lumen.errors import ConfigError
from lumen.optim import Warmup
from lumen.run.plan import EpochLengths, Plan
from lumen.run.run import Run
from lumen.run.scheduler_config import SchedulerConfig, iterate_unfinished, make_horizon
from lumen.task.hooks import collect_texts
from lumen.tools.check.data import is_map_style
from lumen.tools.check.report import CheckReport, format_every, format_rough_duration, shorten_rows
from lumen.tools.check.trial import CheckTrial
from lumen.tools.terminal import format_count, get_first_line


@final
class RunLength:
    """Length of a run.

    Args:
        plan: The plan of the run, as given.
        run: The run, whose loaders are open.

    Attributes:
        steps: Number of all steps of the run, or None if unknown in advance.
        per_epoch: Number of steps of the first epoch, or None if unknown in advance.
        lengths: Number of steps of each epoch, or None if unknown in advance.
        done: Number of steps before the run resumes.
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        self.lengths = run.loaders.get_epoch_lengths()
        self.per_epoch = None if self.lengths is None else self.lengths.get_length(0)
        self.done: int = run.checkpoint.state["progress"]["step"] if run.checkpoint else 0
        self.steps: int | None = None
        with suppress(ConfigError):
            self.steps = plan.count_total_steps(self.lengths)

    @property
    def epochs(self) -> float | None:
        """Number of epochs, which may be a fraction, or None if unknown."""
        return self.steps / self.per_epoch if self.steps and self.per_epoch else None

    def list_epoch_ends(self, every: int = 1) -> Sequence[int]:
        """Return the last step of each `every`-th epoch, for the remaining epochs that the run completes."""
        lengths, per_epoch = self.lengths, self.per_epoch
        if lengths is None or not self.steps or not per_epoch:
            return []
        first, last = lengths.count_complete_epochs(self.done), lengths.count_complete_epochs(self.steps)
        epochs = range(first - first % every + every, last + 1, every)
        # If all epochs have the same length, a range suffices, however many there are.
        if lengths.count_steps_before(last) == last * per_epoch:
            return range(epochs.start * per_epoch, epochs.stop * per_epoch, every * per_epoch)
        return [lengths.count_steps_before(epoch) for epoch in epochs]


def list_validation_steps(plan: Plan, length: RunLength) -> Sequence[int] | None:
    """Return the remaining steps after which a validation runs, or None if unknown in advance."""
    if length.steps is None or plan.val_every_s is not None:
        return None
    if plan.val_every_n_steps is not None:
        found = _list_multiples(plan.val_every_n_steps, length)
        nth = plan.val_every_n_epochs
        if nth == 1:
            return found
        lengths = length.lengths
        return (
            None if lengths is None else [at for at in found if (lengths.count_complete_epochs(at - 1) + 1) % nth == 0]
        )
    if plan.val_every_epoch_fraction is None or length.lengths is None or not length.per_epoch:
        return None
    if plan.val_every_epoch_fraction == 1.0:
        return length.list_epoch_ends(plan.val_every_n_epochs)
    return _list_fraction_steps(plan, length.steps, length.done, length.lengths)


def _list_fraction_steps(plan: Plan, steps: int, done: int, lengths: EpochLengths) -> list[int]:
    fraction, found, epoch = plan.val_every_epoch_fraction or 1.0, list[int](), lengths.count_complete_epochs(done)
    while (begin := lengths.count_steps_before(epoch)) < steps:
        for part in range(1, int(1 / fraction + 1e-9) + 1 if (epoch + 1) % plan.val_every_n_epochs == 0 else 0):
            at = begin + math.ceil(part * fraction * lengths.get_length(epoch) - 1e-9)
            if done < at <= steps and at not in found[-1:]:
                found.append(at)
        epoch += 1
    return found


def list_saving_steps(saver: ModelCheckpoint, length: RunLength) -> Sequence[int]:
    """Return the remaining steps that save a checkpoint, without checkpoints saved by time or for a new best."""
    if length.steps is None:
        return []
    by_steps: Sequence[int] = _list_multiples(saver.every_n_train_steps, length) if saver.every_n_train_steps else []
    by_epochs = length.list_epoch_ends(saver.every_n_epochs) if saver.every_n_epochs else []
    at_end = [length.steps] if saver.at_end else []
    single = by_steps if not by_epochs else by_epochs if not by_steps else None
    if single is not None and (not at_end or length.steps in single):
        return single  # A range stays a range, since it may be long.
    return sorted({*by_steps, *by_epochs, *at_end})


def draw_timeline(moments: Sequence[int], length: RunLength, width: int) -> str:
    """Return a line that represents the rest of the run, with a mark for each event.

    Args:
        moments: Steps of the events, in ascending order.
        length: Length of the run, whose `steps` are known.
        width: Number of characters of the line.
    """
    remaining = (length.steps or 0) - length.done
    bounds = [length.done + remaining * position // width for position in range(width + 1)]
    counts = [bisect_right(moments, bound) for bound in bounds]
    return "".join("╵" if after > before else "·" for before, after in pairwise(counts))


def _list_multiples(every: int, length: RunLength) -> range:
    return range(length.done - length.done % every + every, (length.steps or 0) + 1, every)


_SECTION = "schedule"
_BARS, _WIDTH, _GROUPS_SHOWN, _NAME_SHOWN = "▁▂▃▄▅▆▇█", 28, 8, 18
_BUDGET_S, _MAX_IDLE_SHARE = 4.0, 0.1


def check_schedule(report: CheckReport, trial: CheckTrial, run: Run, length: RunLength) -> None:
    """Report the length of the run, and draw its learning rates."""
    _report_length(report, trial, length)
    _report_validations(report, trial, run, length)
    horizon = make_horizon(run.plan, run.loaders.get_epoch_lengths(), resumed=run.checkpoint is not None)
    for name, end, moves in iterate_unfinished(run.optim.schedulers, horizon):
        text = f"{name} ends after {end} scheduler steps, but the run makes {moves}: the learning rate stops midway"
        report.add(_SECTION, "suspicious", "schedule.length", text)
    if trial.task.automatic_optimization and length.steps is not None:
        _report_rates(report, trial, run, length)
    else:
        reason = "the task steps its schedules" if length.steps is not None else "the length of the run is not known"
        report.add(_SECTION, "note", "rates", f"learning rates are not drawn: {reason}")


def _report_length(report: CheckReport, trial: CheckTrial, length: RunLength) -> None:
    plan = trial.plan
    report.facts["steps"], report.facts["steps_per_epoch"] = length.steps, length.per_epoch
    per_epoch = "" if length.per_epoch is None else f" of {format_count(length.per_epoch, 'step')}"
    if length.steps is None:
        limits = {"max_epochs": plan.max_epochs, "max_steps": plan.max_steps, "max_time": plan.max_time_s}
        text = ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None)
        report.add(_SECTION, "note", "length", f"until {text}; the number of steps is not known in advance")
        return
    epochs = "" if length.epochs is None else f": {length.epochs:.4g} epochs{per_epoch}"
    begun = f", {length.done:,} of them done" if length.done else ""
    timed = ", or until max_time" if plan.max_time_s is not None else ""
    report.add(_SECTION, "ok", "length", f"{format_count(length.steps, 'step')}{epochs}{begun}{timed}")


def _report_validations(report: CheckReport, trial: CheckTrial, run: Run, length: RunLength) -> None:
    if not run.loaders.evaluation:
        return
    plan, steps = trial.plan, list_validation_steps(trial.plan, length)
    count = None if steps is None else len(steps)
    report.facts["validations"] = count
    nth = "" if plan.val_every_n_epochs == 1 else f" of every {plan.val_every_n_epochs} epochs"
    if plan.val_every_n_steps is not None:
        when = format_every(plan.val_every_n_steps, "step")
    elif plan.val_every_s is not None:
        when = f"every {plan.val_every_s:g} s"
    elif plan.val_every_epoch_fraction == 1.0:
        when, nth = format_every(plan.val_every_n_epochs, "epoch"), ""
    else:
        when = f"{1 / (plan.val_every_epoch_fraction or 1):.3g} times an epoch"
    if count == 0:
        text = f"validation: {when}{nth}, but the run ends earlier"
        report.add(_SECTION, "suspicious", "validation.never", text)
        return
    times = "" if count is None else f", {format_count(count, 'time')}"
    report.add(_SECTION, "ok", "validation", f"validation: {when}{nth}{times}")


# ---------------------------------------------------------------------- learning rates


def _report_rates(report: CheckReport, trial: CheckTrial, run: Run, length: RunLength) -> None:
    moved = [each for each in run.optim.schedulers if each.monitor is not None]
    if waits := ", ".join(f"{type(each.scheduler).__name__} for {each.monitor}" for each in moved):
        report.add(_SECTION, "note", "rates.plateau", f"{waits}: not drawn, since the rate depends on the monitor")
    curves, reason = _compute_curves(run, length)
    if not curves or not curves[0]:
        return
    named = _group_equal_curves(run, curves)
    rows = shorten_rows([_make_row(name, curve) for name, curve in named.items()], _GROUPS_SHOWN)
    if not reason:
        rows += _draw_timelines(trial, run, length, min(_WIDTH, len(curves[0])))
    last = length.done + len(curves[0]) if run.optim.schedulers else length.steps or 0
    report.add(_SECTION, "ok", "rates", f"learning rates from step {length.done + 1:,} to {last:,}{reason}", rows=rows)
    report.facts["rates"] = {
        name: {"first": curve[0], "most": max(curve), "last": curve[-1]} for name, curve in named.items()
    }
    _check_curves(report, run, curves, is_complete=not reason)


def _draw_timelines(trial: CheckTrial, run: Run, length: RunLength, width: int) -> list[list[str]]:
    """Return rows that mark validations and checkpoints, to show below the learning rates."""
    validations = list_validation_steps(trial.plan, length) if run.loaders.evaluation else None
    saves = list_saving_steps(trial.savers[0], length) if trial.savers else []
    named = ("validation", validations or []), ("checkpoint", saves)
    return [[name, draw_timeline(steps, length, width), f"{len(steps):,}"] for name, steps in named if steps]


def _compute_curves(run: Run, length: RunLength) -> tuple[list[list[float]], str]:
    """Return the learning rate of each group at every step, and the reason if steps are missing."""
    groups, began_s, reason = run.optim.optimizer.param_groups, time.perf_counter(), ""
    if not run.optim.schedulers:
        return [[float(group["lr"])] * min(length.steps or 0, _WIDTH) for group in groups], ""
    curves: list[list[float]] = [[] for _ in groups]
    lengths = length.lengths
    epoch = 0 if lengths is None else lengths.count_complete_epochs(length.done)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if schedulers step before the optimizer.
        try:
            for step in range(length.done + 1, (length.steps or 0) + 1):
                for curve, group in zip(curves, groups, strict=True):
                    curve.append(float(group["lr"]))
                ends_epoch = lengths is not None and step == lengths.count_steps_before(epoch + 1)
                epoch += ends_epoch
                _step_schedulers(run, step, epoch if ends_epoch else None)
                if not step % 1000 and time.perf_counter() - began_s > _BUDGET_S:
                    reason = f" of {length.steps:,}, since drawing takes only a few seconds"
                    break
        except Exception as error:  # A custom scheduler may fail here.
            reason = f", where a schedule failed: {get_first_line(error)}"
    return curves, reason


def _step_schedulers(run: Run, step: int, ended: int | None) -> None:
    """Step the schedulers as after an optimizer step, which may end an epoch."""
    units = max(run.progress.units, 1.0) / max(run.progress.step, 1)
    for config in run.optim.schedulers:
        ends_epoch = ended is not None and config.interval == "epoch" and ended % config.frequency == 0
        if config.monitor is None and (config.moves_at(step) or ends_epoch):
            config.step()
        elif config.interval == "token":
            config.move_to(units * step, counted=True)


def _group_equal_curves(run: Run, curves: list[list[float]]) -> dict[str, Sequence[float]]:
    """Return the distinct curves by the names of the parameter groups that share them."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for number, (group, curve) in enumerate(zip(run.optim.optimizer.param_groups, curves, strict=True)):
        groups.setdefault(tuple(curve), []).append(str(group.get("name") or number))
    return {_describe_groups(names): curve for curve, names in groups.items()}


def _describe_groups(names: list[str]) -> str:
    return f"group {names[0]}" if len(names) == 1 else f"groups {names[0]}..{names[-1]}"


def _make_row(name: str, curve: Sequence[float]) -> list[str]:
    most = max(curve)
    name = name if len(name) <= _NAME_SHOWN else f"{name[: _NAME_SHOWN - 1]}…"
    return [name, draw_sparkline(curve), f"{curve[0]:.3g} → {most:.3g} → {curve[-1]:.3g}"]


def draw_sparkline(curve: Sequence[float]) -> str:
    """Return a curve as one line of block characters, from 0 to its maximum. Each block is the mean of its part.

    Args:
        curve: Non-negative numbers, at least one.
    """
    width, most = min(_WIDTH, len(curve)), max(curve)
    if most <= 0:
        return _BARS[0] * width
    parts = [curve[len(curve) * i // width : len(curve) * (i + 1) // width] for i in range(width)]
    return "".join(_BARS[min(7, int(sum(part) / len(part) / most * 7.999))] for part in parts)


def _check_curves(report: CheckReport, run: Run, curves: list[list[float]], *, is_complete: bool) -> None:
    flat = [number for number, curve in enumerate(curves) if curve[0] == 0.0]
    if flat:
        groups = _describe_groups(list(map(str, flat)))
        zero_steps = min(len([*takewhile(lambda rate: not rate, curves[number])]) for number in flat)
        steps = "at the first step" if zero_steps == 1 else f"for the first {zero_steps:,} steps"
        report.add(
            _SECTION, "note" if zero_steps == 1 < len(curves[0]) else "suspicious", "rates.first",
            f"the learning rate of {groups} is 0 {steps}: no parameter changes", _advise_on_start(run.optim.schedulers),
        )  # fmt: skip
    idle = next((n for n in (_count_idle_steps(curve) for curve in curves) if n is not None), None)
    if is_complete and idle is not None and not flat:
        text = f"the learning rate is 0 for the last {idle:,} of {len(curves[0]):,} steps"
        report.add(_SECTION, "suspicious", "rates.idle", text)


def _advise_on_start(schedulers: Sequence[SchedulerConfig]) -> str:
    if not schedulers:
        return "Set lr."
    warms = any(isinstance(each.scheduler, Warmup) for each in schedulers)
    how = "start=0.01, or the key warmup_start" if warms else "(step + 1) / n in place of step / n"
    by_epoch = any(each.interval == "epoch" for each in schedulers)
    return f"Begin the warm-up above 0: {how}." + (' Or set its interval to "step".' if by_epoch else "")


def _count_idle_steps(curve: Sequence[float]) -> int | None:
    """Return the number of final steps with a learning rate of 0, or None if they are few."""
    most = max(curve)
    zeros = len([*takewhile(lambda rate: rate <= 1e-9 * most, reversed(curve))])
    return zeros if zeros > max(1.0, _MAX_IDLE_SHARE * len(curve)) and most else None


def check_monitors(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    """Report monitors that the first batches do not log and no method of the task or callbacks mentions."""
    monitors = [*trial.monitors]
    monitors += [("lr_scheduler", each.monitor) for each in run.optim.schedulers if each.monitor is not None]
    names = trial.observer.names
    known, mentioned = names | {name.partition("/")[0] for name in names}, None
    for owner, name in dict.fromkeys(monitors):
        if name in known:
            report.add("schedule", "ok", "monitor", f"{owner} monitors {name}, which is logged")
            continue
        mentioned = collect_texts([trial.task, *trial.trainer.callbacks]) if mentioned is None else mentioned
        if name in mentioned:
            report.add("schedule", "note", "monitor", f"{owner} monitors {name}, which the first batches did not log")
            continue
        text = f"{owner} monitors {name}, which is never logged; logged names: {', '.join(sorted(names)) or 'none'}"
        report.add("schedule", "suspicious", "monitor", text)


_SLOW_FACTOR, _MIN_WAIT_S = 1.5, 0.02


def check_time(report: CheckReport, trial: CheckTrial, run: Run, length: RunLength) -> float | None:
    """Report the estimated time, compare the loader with the step, and return the estimate in seconds, or None."""
    observer = trial.observer
    if not observer.compute_s:
        report.add("time", "note", "time", "no step was timed")
        return None
    per_step = 1
    if trial.task.automatic_optimization and run.loaders.train is not None:
        per_step = -(-run.loaders.train.per_step // trial.processes)
    step_s = per_step * statistics.median(observer.compute_s) + (observer.step_s[-1] if observer.step_s else 0.0)
    wait_s = statistics.median(observer.waited_s[1:] or observer.waited_s or [0.0]) / trial.processes
    run_s = None
    if length.steps is not None:
        run_s = (length.steps - length.done) * (step_s + wait_s) + _estimate_validation_s(trial, run, length)
    report.facts["time"] = {"step_s": step_s, "wait_s": wait_s, "run_s": run_s}
    text = f"{format_rough_duration(step_s)} a step, and {format_rough_duration(wait_s)} of waiting for its data"
    text += f"; estimated from {observer.micro_batches} micro-batches"
    limit_s = trial.plan.max_time_s
    if run_s is not None:
        text = f"about {format_rough_duration(run_s)}: {text}"
        if limit_s and limit_s < run_s:
            text += f"; max_time ends the run after {format_rough_duration(limit_s)}"
    report.add("time", "ok", "time", text)
    _check_loader_speed(report, run, step_s, wait_s, per_step)
    return run_s


def _estimate_validation_s(trial: CheckTrial, run: Run, length: RunLength) -> float:
    batches = [trial.plan.count_batches("validate", each) for each in run.loaders.evaluation]
    steps = list_validation_steps(trial.plan, length)
    if not trial.observer.validation_s or steps is None:
        return 0.0
    batch_s = min(trial.observer.validation_s)
    return len(steps) * batch_s * sum(each or 0 for each in batches) / trial.processes


def _check_loader_speed(report: CheckReport, run: Run, step_s: float, wait_s: float, micro_batches: int) -> None:
    if wait_s <= _SLOW_FACTOR * step_s or wait_s / micro_batches < _MIN_WAIT_S:
        return
    loaders = [each for _, each in list_loaders(run.loaders.sources.get("fit")) if isinstance(each, DataLoader)]
    present = max((each.num_workers for each in loaders), default=0)
    needed, cores = math.ceil((wait_s + step_s * bool(present)) / step_s) * max(present, 1), os.cpu_count() or 1
    workers = min(needed, cores)
    limit = f" ({needed} would be needed, the machine has {cores} cores)" if needed > cores else ""
    is_stream = not all(map(is_map_style, loaders)) or not loaders  # A stream may depend on the training.
    advice = f"Set num_workers={workers} in DataLoader{limit}, with persistent_workers=True; or make samples cheaper."
    if not loaders or workers <= present:
        advice = "Make samples cheaper: for example, decode or resize all samples once, before the run."
    report.add(
        "time", "note" if is_stream else "suspicious", "loader.slow",
        f"the loader is slower than the step: {format_rough_duration(wait_s)} to load a step, "
        f"{format_rough_duration(step_s)} to compute a step",
        advice,
    )  # fmt: skip


# ---------------------------------------------------------------------- checkpoints


def check_checkpoints(report: CheckReport, trial: CheckTrial, run: Run, length: RunLength, run_s: float | None) -> None:
    """Report the directory of the checkpoints, and if the disk has room for them."""
    if not trial.savers:
        report.add("checkpoints", "note", "checkpoints", "no checkpoints are saved: enable_checkpointing is False")
        return
    sections, _, _ = capture_run(run, complete=False)  # includes the optimizer's present state
    checkpoint_bytes = sum(
        each.numel() * each.element_size() for part in sections.values() for each in iterate_tensors(dict(part))
    )
    report.facts["checkpoint_bytes"] = checkpoint_bytes
    for saver in trial.savers:
        _check_checkpoint_callback(report, trial, saver, length, run_s, checkpoint_bytes)


def _check_checkpoint_callback(
    report: CheckReport,
    trial: CheckTrial,
    saver: ModelCheckpoint,
    length: RunLength,
    run_s: float | None,
    checkpoint_bytes: int,
) -> None:
    trainer = trial.trainer
    directory: PurePath = saver.given_dirpath or trainer.default_root_dir / str(trainer.name) / "checkpoints"
    saves = _estimate_saves(saver, length, run_s)
    kept = _estimate_kept(saver, saves, length)
    most = None if kept is None else checkpoint_bytes * (kept + 1)  # saved before an old one is removed
    count = "" if saves is None else f", about {format_count(saves, 'time')}"
    kept_text = "all are kept" if kept is None else f"{kept} kept"
    disk = "" if most is None else f": up to {format_bytes(most)}"
    rows = [
        [str(directory)],
        [f"saved {_describe_rules(saver)}{count}; {kept_text}, {format_bytes(checkpoint_bytes)} each{disk}"],
    ]
    if not isinstance(directory, Path):
        report.add("checkpoints", "note", "checkpoints", "the directory is remote and was not checked", rows=rows)
        return
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    report.facts.setdefault("checkpoints", []).append(
        {"place": str(directory), "kept": kept, "saves": saves, "bytes": most, "free_bytes": free}
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        report.add("checkpoints", "wrong", "checkpoints.writable", f"{existing} is not writable", rows=rows)
    elif (most or checkpoint_bytes * max(saves or 1, 1)) > free:
        text = f"{format_bytes(free)} are free, too little for all checkpoints"
        report.add("checkpoints", "suspicious", "checkpoints.room", text, rows=rows)
    else:
        text = f"{format_bytes(free)} are free, enough for all checkpoints"
        report.add("checkpoints", "ok", "checkpoints", text, rows=rows)


def _estimate_saves(saver: ModelCheckpoint, length: RunLength, run_s: float | None) -> int | None:
    """Return the approximate number of saved checkpoints, or None if unknown."""
    if length.steps is None:
        return None
    saves = len(list_saving_steps(saver, length))
    saves += int((run_s or 0.0) // saver.train_time_interval_s)  # The interval may be infinite.
    return max(saves, 1)


def _estimate_kept(saver: ModelCheckpoint, saves: int | None, length: RunLength) -> int | None:
    """Return the largest number of checkpoints at the end of the run, or None if unknown."""
    if -1 in (saver.keep_last, saver.save_top_k):
        return saves
    kept = max(saver.keep_last, 1) + (saver.save_top_k if saver.monitor is not None else 0)
    if saver.keep_every_n_steps is not None:
        if length.steps is None:
            return None
        kept += length.steps // saver.keep_every_n_steps
    return kept if saves is None else min(kept, saves)


def _describe_rules(saver: ModelCheckpoint) -> str:
    parts = [
        format_every(saver.every_n_train_steps, "step") if saver.every_n_train_steps else "",
        format_every(saver.every_n_epochs, "epoch") if saver.every_n_epochs else "",
        f"every {format_rough_duration(saver.train_time_interval_s)}" if saver.train_time_interval_s < math.inf else "",
        f"at a new best {saver.monitor}" if saver.on_best and saver.monitor not in (None, *saver.COUNTS) else "",
        "at the end" if saver.at_end else "",
    ]
    return ", ".join(filter(None, parts)) or "never"
