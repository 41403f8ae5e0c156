"""Whether what others wait for is logged."""

from __future__ import annotations

from lumen.check.report import Report
from lumen.check.trial import Trial
from lumen.run.run import Run
from lumen.task.given import texts_of


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
