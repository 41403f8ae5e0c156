"""The whole run ahead: its steps, learning rates, validations."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

from lumen.errors import ConfigError
from lumen.run.run import Run
from lumen.run.scheduler_config import horizon_of, unfinished
from lumen.task.given import texts_of
from lumen.tools.check.moments import Course, saving_steps, strip, validation_steps
from lumen.tools.check.show import Report, counted, every
from lumen.tools.check.trial import Trial

_SECTION = "schedule"
_BARS, _WIDTH, _GROUPS_SHOWN = "▁▂▃▄▅▆▇█", 28, 8
_NAME_SHOWN = 18
_BUDGET_S = 4.0
_IDLE = 0.1


def course_of(trial: Trial, run: Run) -> Course:
    """How long the run is."""
    lengths, done = run.loaders.epoch_lengths(), run.checkpoint.state["progress"]["step"] if run.checkpoint else 0
    per_epoch = None if lengths is None else lengths.of(0)
    try:
        steps = trial.plan.total_steps(lengths)
    except ConfigError:
        return Course(None, per_epoch, lengths, done)
    return Course(steps, per_epoch, lengths, done)


def look_at_schedule(report: Report, trial: Trial, run: Run, course: Course) -> None:
    """Say how long the run is; draw its learning rates."""
    _tell_length(report, trial, course)
    _tell_validations(report, trial, run, course)
    horizon = horizon_of(run.plan, run.loaders.epoch_lengths(), resumed=run.checkpoint is not None)
    for name, end, moves in unfinished(run.optim.schedulers, horizon):
        report.add(
            _SECTION, "suspicious", "schedule.length",
            f"{name} ends after {end} moves, but the run makes {moves}: the learning rate stops on its way",
            "Let the schedule be as long as the run: self.trainer.estimated_stepping_batches steps, or max_epochs.",
        )  # fmt: skip
    if trial.task.automatic_optimization and course.steps is not None:
        _draw_rates(report, trial, run, course)
    else:
        by_hand = "the task moves its schedules itself" if course.steps is not None else "its length is not known"
        report.add(_SECTION, "note", "rates", f"learning rates over the run are not drawn: {by_hand}")


def _tell_length(report: Report, trial: Trial, course: Course) -> None:
    plan = trial.plan
    report.facts["steps"], report.facts["steps_per_epoch"] = course.steps, course.per_epoch
    per_epoch = "" if course.per_epoch is None else f" of {counted(course.per_epoch, 'step')}"
    if course.steps is None:
        limits = {"max_epochs": plan.max_epochs, "max_steps": plan.max_steps, "max_time": plan.max_time_s}
        said = ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None)
        report.add(_SECTION, "note", "length", f"until {said}; how many steps that are is not known before")
        return
    epochs = "" if course.epochs is None else f": {course.epochs:.4g} epochs{per_epoch}"
    begun = f", {course.done:,} of them are made" if course.done else ""
    timed = ", or until max_time" if plan.max_time_s is not None else ""
    report.add(_SECTION, "ok", "length", f"{counted(course.steps, 'step')}{epochs}{begun}{timed}")


def _tell_validations(report: Report, trial: Trial, run: Run, course: Course) -> None:
    if not run.loaders.evaluation:
        return
    plan, steps = trial.plan, validation_steps(trial.plan, course)
    count = None if steps is None else len(steps)
    report.facts["validations"] = count
    nth = "" if plan.val_every_n_epochs == 1 else f" of every {plan.val_every_n_epochs} epochs"
    if plan.val_every_n_steps is not None:
        when = every(plan.val_every_n_steps, "step")
    elif plan.val_every_s is not None:
        when = f"every {plan.val_every_s:g} s"
    elif plan.val_every_epoch_fraction == 1.0:
        when, nth = every(plan.val_every_n_epochs, "epoch"), ""
    else:
        when = f"{1 / (plan.val_every_epoch_fraction or 1):.3g} times an epoch"
    if count == 0:
        report.add(
            _SECTION, "suspicious", "validation.never", f"validation: {when}{nth}, which the run does not get to",
            "Lower val_check_interval or check_val_every_n_epoch, or let the run be longer.",
        )  # fmt: skip
        return
    times = "" if count is None else f", {counted(count, 'time')}"
    report.add(_SECTION, "ok", "validation", f"validation: {when}{nth}{times}")


# ---------------------------------------------------------------------- learning rates


def _draw_rates(report: Report, trial: Trial, run: Run, course: Course) -> None:
    moved = [each for each in run.optim.schedulers if each.monitor is not None]
    if waits := ", ".join(f"{type(each.scheduler).__name__} for {each.monitor}" for each in moved):
        report.add(_SECTION, "note", "rates.plateau", f"{waits}: it waits for its monitor and is not drawn")
    curves, why = _curves(run, course)
    if not curves or not curves[0]:
        return
    drawn = [_row(name, curve) for name, curve in _told_apart(run, curves)]
    more = len(drawn) - _GROUPS_SHOWN
    rows = drawn[:_GROUPS_SHOWN] + ([[f"and {more} more"]] if more > 0 else [])
    if not why:
        rows += _moments(trial, run, course, min(_WIDTH, len(curves[0])))
    last = course.done + len(curves[0]) if run.optim.schedulers else course.steps or 0
    report.add(_SECTION, "ok", "rates", f"learning rates from step {course.done + 1:,} to {last:,}{why}", rows=rows)
    report.facts["rates"] = {
        name: {"first": curve[0], "most": max(curve), "last": curve[-1]} for name, curve in _told_apart(run, curves)
    }
    _judge(report, run, curves, is_whole=not why)


def _moments(trial: Trial, run: Run, course: Course, width: int) -> list[list[str]]:
    """Where validations and checkpoints are, below the rates."""
    validations = validation_steps(trial.plan, course) if run.loaders.evaluation else None
    saves = saving_steps(trial.savers[0], course) if trial.savers else []
    named = ("validation", validations or []), ("checkpoint", saves)
    return [[name, strip(steps, course, width), f"{len(steps):,}"] for name, steps in named if steps]


def _curves(run: Run, course: Course) -> tuple[list[list[float]], str]:
    """The learning rate of each group at every step, and why there are not all of them."""
    groups, began_s, why = run.optim.optimizer.param_groups, time.perf_counter(), ""
    if not run.optim.schedulers:
        return [[float(group["lr"])] * min(course.steps or 0, _WIDTH) for group in groups], ""
    curves: list[list[float]] = [[] for _ in groups]
    lengths, epoch = course.lengths, 0
    if lengths is not None:
        epoch = lengths.whole_epochs(course.done)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the order in which optimizer and schedule are moved
        try:
            for step in range(course.done + 1, (course.steps or 0) + 1):
                for curve, group in zip(curves, groups, strict=True):
                    curve.append(float(group["lr"]))
                _move(run, step)
                if lengths is not None and step == lengths.until(epoch + 1):
                    epoch += 1
                    _move_at_end(run, epoch)
                if not step % 1000 and time.perf_counter() - began_s > _BUDGET_S:
                    why = f" of {course.steps:,}, as far as a few seconds allow"
                    break
        except Exception as error:  # a scheduler of the user's may need what is not there
            why = f", where it ends by {type(error).__name__}: {error}".partition("\n")[0]
    return curves, why


def _move(run: Run, step: int) -> None:
    units = max(run.progress.units, 1.0) / max(run.progress.step, 1)
    for config in run.optim.schedulers:
        if config.monitor is None and config.moves_at(step):
            config.step()
        elif config.interval == "token":
            config.move_to(units * step, counted=True)


def _move_at_end(run: Run, epoch: int) -> None:
    for config in run.optim.schedulers:
        if config.monitor is None and config.interval == "epoch" and epoch % config.frequency == 0:
            config.step()


def _told_apart(run: Run, curves: list[list[float]]) -> list[tuple[str, list[float]]]:
    """Curves that differ, each with the groups that have it."""
    groups: dict[tuple[float, ...], list[str]] = {}
    for number, (group, curve) in enumerate(zip(run.optim.optimizer.param_groups, curves, strict=True)):
        groups.setdefault(tuple(curve), []).append(str(group.get("name") or number))
    return [(_in_words(names), list(curve)) for curve, names in groups.items()]


def _in_words(names: list[str]) -> str:
    return f"group {names[0]}" if len(names) == 1 else f"groups {names[0]}..{names[-1]}"


def _row(name: str, curve: Sequence[float]) -> list[str]:
    most = max(curve)
    name = name if len(name) <= _NAME_SHOWN else f"{name[: _NAME_SHOWN - 1]}…"
    return [name, sparkline(curve), f"{curve[0]:.3g} → {most:.3g} → {curve[-1]:.3g}"]


def sparkline(curve: Sequence[float]) -> str:
    """A curve in one line of blocks, from 0 to its largest value; each is the mean of its part.

    Args:
        curve: At least one number, none negative.
    """
    width, most = min(_WIDTH, len(curve)), max(curve)
    if most <= 0:
        return _BARS[0] * width
    parts = [curve[len(curve) * place // width : len(curve) * (place + 1) // width] for place in range(width)]
    return "".join(_BARS[min(7, int(sum(part) / len(part) / most * 7.999))] for part in parts)


def _judge(report: Report, run: Run, curves: list[list[float]], *, is_whole: bool) -> None:
    flat = [number for number, curve in enumerate(curves) if curve[0] == 0.0]
    if flat:
        whose, begins = _in_words(list(map(str, flat))), min(_zeros(curves[number]) for number in flat)
        steps = "at the first step" if begins == 1 else f"for the first {begins:,} steps"
        report.add(
            _SECTION, "note" if begins == 1 < len(curves[0]) else "suspicious", "rates.first",
            f"the learning rate of {whose} is 0 {steps}, which changes nothing",
            "Begin a warm-up above 0, and let it move every step: lumen.optim has such schedules."
            if run.optim.schedulers else "Set lr.",
        )  # fmt: skip
    idle = next((n for n in (_idle(curve) for curve in curves) if n is not None), None)
    if is_whole and idle is not None and not flat:
        report.add(
            _SECTION, "suspicious", "rates.idle",
            f"the learning rate is 0 for the last {idle:,} of {len(curves[0]):,} steps",
            "Let the schedule be as long as the run, or the run as short as the schedule.",
        )  # fmt: skip


def _zeros(curve: Sequence[float]) -> int:
    """Steps at the beginning with a rate of 0."""
    return next((step for step, rate in enumerate(curve) if rate), len(curve))


def _idle(curve: Sequence[float]) -> int | None:
    """Steps at the end with a rate of 0, if they are many."""
    most, zeros = max(curve), 0
    while zeros < len(curve) and curve[-1 - zeros] <= 1e-9 * most:
        zeros += 1
    return zeros if zeros > max(1.0, _IDLE * len(curve)) and most else None


def look_at_monitors(report: Report, trial: Trial, run: Run) -> None:
    """Find monitors that nobody logs: neither the first batches, nor, by its name, any method of task and callbacks."""
    waiting = [*trial.monitors]
    waiting += [("lr_scheduler", each.monitor) for each in run.optim.schedulers if each.monitor is not None]
    names = trial.witness.names
    known, mentioned = names | {name.partition("/")[0] for name in names}, None
    for who, name in dict.fromkeys(waiting):
        if name in known:
            report.add("schedule", "ok", "monitor", f"{who} waits for {name}, which is logged")
            continue
        mentioned = texts_of([trial.task, *trial.trainer.callbacks]) if mentioned is None else mentioned
        if name in mentioned:
            report.add("schedule", "note", "monitor", f"{who} waits for {name}, which the first batches did not log")
            continue
        report.add(
            "schedule", "suspicious", "monitor",
            f"{who} waits for {name}, which nobody logs; logged is {', '.join(sorted(names)) or 'nothing'}",
            "Write one of these names, or log it.",
        )  # fmt: skip
