"""What a run's directory tells about it, as far as it is there."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from lumen.internals.masking import masked_text
from lumen.report.media import Media, read_media
from lumen.report.settings import settings_in
from lumen.report.table import Table, read_table
from lumen.run.goodput import FILE, TimeSpent, goodput, starts

if TYPE_CHECKING:
    from lumen.checkpoint.listing import ShownRun

_CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\t\x20-\x7e\x85\xa0-\U0010ffff]")
_LONGEST_CONFIG = 200_000
KNOWN = ("metrics.csv", "system.csv", "config.yaml", "script.yaml", "run.log", "environment.json", FILE)


@final
@dataclass
class Record:
    """A run, read.

    Attributes:
        shown: How it stands, and its checkpoints.
        name: What it is called in the report.
        metrics: Values that it logged.
        system: Speed and memory while the run trained.
        spent: Where its time went; None: that is not told.
        restarts: The step of each start but the first.
        configs: Texts of its configs by file name, the oldest first; or of what a script has set.
        environment: Versions, host and devices that the run had.
        log: The end of its log.
        log_left_out: Bytes of the log before that.
        media: Images and texts.
    """

    shown: ShownRun
    name: str
    metrics: Table
    system: Table
    spent: TimeSpent | None
    restarts: list[int]
    configs: dict[str, str]
    environment: dict[str, Any]
    log: str
    log_left_out: int
    media: Media

    @property
    def epochs(self) -> int | None:
        """How many are completed; rows of the last one are there before it is."""
        known = [each for each in (self.metrics.last_epoch, self.shown.newest_info.get("epoch")) if each is not None]
        return max(known, default=None)

    @property
    def settings(self) -> dict[str, str]:
        """The newest config by paths, or what a script has set."""
        return settings_in(next(reversed(self.configs.values()), ""))


def own_file(directory: Path, name: str | Path) -> Path | None:
    """A file of a run, or None: what a link leads to elsewhere is not the run's, and must not get into its report."""
    path = directory / name
    with suppress(OSError, RuntimeError):
        if path.is_file() and path.resolve().is_relative_to(directory.resolve()):
            return path
    return None


def is_recorded(directory: Path) -> bool:
    """Whether a directory holds any of the files that a report reads."""
    return any(own_file(directory, name) for name in KNOWN)


def read_record(shown: ShownRun, name: str, *, log_bytes: int, media_bytes: int) -> Record:
    """Read a run, and at most so many bytes of its log and of what images and texts take in a page."""
    directory = Path(shown.path)
    log, left_out = _tail(own_file(directory, "run.log"), log_bytes)
    has_time = own_file(directory, FILE) is not None
    events = sorted(path.relative_to(directory) for path in directory.glob("tensorboard/**/*tfevents*"))
    return Record(
        shown=shown,
        name=name,
        metrics=read_table(own_file(directory, "metrics.csv")),
        system=read_table(own_file(directory, "system.csv")),
        spent=_time(directory) if has_time else None,
        restarts=[step for number, step in starts(directory).items() if number > 1] if has_time else [],
        configs=_configs(directory),
        environment=_environment(own_file(directory, "environment.json")),
        log=log,
        log_left_out=left_out,
        media=read_media([path for each in events if (path := own_file(directory, each))], media_bytes),
    )


def names_of(paths: Sequence[Path]) -> list[str]:
    """A name for each run: the last part of its path, with as many before it as tell it from the others."""
    parts = [path.absolute().parts for path in paths]
    count = 1
    while len({each[-count:] for each in parts}) < len({*parts}) and count < max(map(len, parts)):
        count += 1
    return ["/".join(each[-count:]) for each in parts]


def _time(directory: Path) -> TimeSpent | None:
    with suppress(OSError):
        spent = goodput(directory)
        return spent if spent.lives and math.isfinite(sum(spent.spent_s.values()) + spent.wall_s) else None
    return None


def _tail(file: Path | None, most: int) -> tuple[str, int]:
    """The last lines of a text without what would not show, and how many bytes come before them."""
    if file is None:
        return "", 0
    with suppress(OSError), file.open("rb") as opened:
        begin = max(0, opened.seek(0, 2) - most)
        opened.seek(begin)
        if begin:
            begin += len(opened.readline())
        return _CONTROLS.sub("", opened.read(most).decode(errors="replace").replace("\r\n", "\n")), begin
    return "", 0


def _configs(directory: Path) -> dict[str, str]:
    earlier = [path.name for path in directory.glob("config-*.yaml") if path.stem.partition("-")[2].isdecimal()]
    names = [*sorted(earlier, key=lambda name: int(Path(name).stem.partition("-")[2])), "config.yaml"]
    if own_file(directory, "config.yaml") is None:
        names = ["script.yaml"]
    files = {name: own_file(directory, name) for name in names}
    texts = {name: masked_text(_tail(file, _LONGEST_CONFIG)[0]) for name, file in files.items() if file is not None}
    return {name: text for name, text in texts.items() if text}


def _environment(file: Path | None) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        read = json.loads(_tail(file, _LONGEST_CONFIG)[0])
        return read if isinstance(read, dict) else {}
    return {}
