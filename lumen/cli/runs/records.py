"""What is known of runs, as plain data: what `lumen runs --json` prints, and `lumen.runs` returns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from lumen.checkpoint.listing import Listed, ShownRun
from lumen.cli.runs.choose import choose
from lumen.cli.runs.find import local_of, runs_in
from lumen.cli.runs.settings import reached, settings_of
from lumen.run.goodput import TimeSpent, goodput


def runs(
    directory: str | Path = "runs", where: str | Iterable[str] = (), sort: str | None = None, *, verify: bool = False
) -> list[dict[str, Any]]:
    """Runs as plain data: what each was set to, how it stands, the numbers that it has come to, its checkpoints.

    Nothing is changed, and no job is disturbed. `pandas.json_normalize(lumen.runs())` makes a frame of it.

    Args:
        directory: Where the runs are, or one of them; a URL too.
        where: Conditions that a run must meet, such as `"lr < 1e-3"` or `["status = finished", "val_loss < 2"]`.
        sort: The setting or metric by which they are sorted, the smallest first; `"-val_acc"`: the largest first.
        verify: Read every byte of the checkpoints; else manifests, and the files' sizes.

    Returns:
        A dictionary for each run: `path`, `name`, `status` (running, finished, stopped, failed or unknown), `error`,
        `step`, `epoch` (completed, as far as is known); `settings` by their names on the command line, as `model.lr`,
        and of a class its name; `metrics`, the last value of each; `monitor`, by which its checkpoints are compared;
        `checkpoints`, each with `path`, `step`, `epoch`, `metrics`, `best`, `valid` and more; `host`, `pid` and
        `started` of the job that has it; `goodput`.

    Raises:
        ConfigError: There is no such directory, or a condition names what no run has.
    """
    records = [record(each) for each in runs_in(directory, verify=verify)]
    return choose(records, [where] if isinstance(where, str) else where, sort)


def record(shown: ShownRun) -> dict[str, Any]:
    """What is known of a run."""
    holder = shown.holder or {}
    checkpoints = [
        {
            "name": each.path.name,
            "path": str(each.path),
            "step": each.info.get("step"),
            "epoch": each.info.get("epoch"),
            "saved": time_of(each, "seconds"),
            "bytes": each.size_bytes,
            "metrics": {name: _plain(value) for name, value in shown.metrics(each).items()},
            "monitor": each.info.get("monitor"),
            "best": shown.is_best(each),
            "valid": each.problem is None,
            "problem": each.problem,
        }
        for each in shown.committed
    ]
    last = reached(shown)
    return {
        "path": str(shown.path),
        "name": shown.path.name,
        "status": shown.status,
        "step": last.step,
        "epoch": last.epoch,
        "metrics": {name: _plain(value) for name, value in last.metrics.items()},
        "settings": {name: _plain(value) for name, value in settings_of(shown).items()},
        **{key: holder.get(key) for key in ("host", "pid", "started")},
        "error": shown.error,
        "monitor": shown.newest_info.get("monitor"),
        "goodput": _goodput(shown),
        "problem": shown.problem,
        "checkpoints": checkpoints,
        "temporary": [each.path.name for each in shown.checkpoints if each.kind == "tmp"],
    }


def time_spent(shown: ShownRun) -> TimeSpent | None:
    """Where its time went; None: it is not told."""
    local = local_of(shown)
    try:
        return None if local is None else goodput(local)
    except OSError:
        return None


def _goodput(shown: ShownRun) -> dict[str, Any] | None:
    spent = time_spent(shown)
    if spent is None:
        return None
    return {"share": spent.goodput, "wall_s": spent.wall_s, "lives": spent.lives, "spent_s": spent.spent_s}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def time_of(checkpoint: Listed, precision: str) -> str:
    """When a checkpoint was committed, by the local clock."""
    if checkpoint.committed_s is None:
        return ""
    return datetime.fromtimestamp(checkpoint.committed_s).astimezone().isoformat(timespec=precision)
