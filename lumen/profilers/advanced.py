"""Profiler that lists the Python functions called in each part of a run, with `cProfile`."""

from __future__ import annotations

import cProfile
import pstats
import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, final

from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.profilers.base import Profiler, end_part

if TYPE_CHECKING:
    from lumen.run.run import Run


@final
class AdvancedProfiler(Profiler):
    """Profiler that shows the functions called in each part at the end of a run, slowest part first.

    One part is measured at a time: a call in a part inside another part counts for the inner part only. The profiler
    slows Python down, so compare shares, not absolute times. On CUDA, times are host times.

    Args:
        dirpath: The directory of the files. Default: the run directory.
        filename: The name of the summary's file, `STAGE-filename.txt`. Default: the summary is printed, and appended to
            `profile.txt` and `run.log` of the run directory.
        line_count_restriction: The functions to show of each part: a number, or a share up to 1.0.
        dump_stats: Write the measurement of each part to `STAGE-PART.prof` too, for `pstats` or snakeviz. The files go
            to `dirpath`, by default to `profile` in the run directory.
    """

    @check_arguments
    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        if not line_count_restriction > 0 or (isinstance(line_count_restriction, float) and line_count_restriction > 1):
            raise ConfigError(
                "AdvancedProfiler: line_count_restriction must be at least 1, or a share of at most 1.0, found "
                f"{line_count_restriction}."
            )
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._stack: list[tuple[str, cProfile.Profile]] = []

    def begin(self, run: Run, directory: Path | None) -> None:
        """Reset the measured parts."""
        super().begin(run, directory)
        self.profiled_actions = {}

    def start(self, action_name: str) -> None:
        """Pause the outer part and profile this one.

        Raises:
            ConfigError: Another profiler or debugger of Python is active.
        """
        if self._stack:
            self._stack[-1][1].disable()
        profile = self.profiled_actions.setdefault(action_name, cProfile.Profile())
        self._stack.append((action_name, profile))
        _enable_profile(profile)

    def stop(self, action_name: str) -> None:
        """End the part that was started last, and continue the outer part.

        Raises:
            ConfigError: The part is not the one in progress.
        """
        end_part(self, self._stack, action_name).disable()
        if self._stack:
            _enable_profile(self._stack[-1][1])

    def summary(self) -> str:
        """Return the functions of each part as a text."""
        parts = [
            (name, *_format_functions(profile, self.line_count_restriction))
            for name, profile in self._get_measured().items()
        ]
        return "\n".join(f"{name}\n{text}" for name, _, text in sorted(parts, key=lambda part: -part[1]))

    def describe(self) -> None:
        """Show the summary, and write the `.prof` files if `dump_stats` is set."""
        super().describe()
        folder = self._folder if self.dirpath is not None or self._folder is None else self._folder / "profile"
        if self.dump_stats and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = "" if self._run is None or self._run.processes.is_global_zero else f"-rank{self._run.processes.rank}"
            for name, profile in self._get_measured().items():
                profile.dump_stats(folder / f"{self._stage}-{re.sub(r'[^0-9A-Za-z_.]+', '_', name)}{rank}.prof")

    def _get_measured(self) -> dict[str, cProfile.Profile]:
        """Return the parts in which a function was called."""
        found = {}
        for name, profile in self.profiled_actions.items():
            profile.create_stats()
            if profile.stats:
                found[name] = profile
        return found


def _enable_profile(profile: cProfile.Profile) -> None:
    try:
        profile.enable()
    except ValueError as error:  # since Python 3.12, only one profiler can be active
        raise ConfigError(
            "AdvancedProfiler: another profiler or debugger of Python is active. End that profiler, or remove this one."
        ) from error


def _format_functions(profile: cProfile.Profile, restriction: int | float) -> tuple[float, str]:
    """Return the seconds of a part, and its functions as a text."""
    file = StringIO()
    stats = pstats.Stats(profile, stream=file).sort_stats("cumulative")
    stats.print_stats(restriction)
    return stats.total_tt, "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines() if line)  # type: ignore[attr-defined]
