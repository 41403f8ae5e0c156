"""Which functions of Python take the time of each part of a run, by `cProfile`."""

from __future__ import annotations

import cProfile
import pstats
import re
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, final

from lumen.errors import ConfigError
from lumen.errors.arguments import checked
from lumen.profilers.base import Profiler, end_part

if TYPE_CHECKING:
    from lumen.run.run import Run


@final
class AdvancedProfiler(Profiler):
    """Shows at the end of a run, for each part of it, the functions that were called there, the slowest part first.

    One part is measured at a time: what is called in a part inside of another one counts there only. It slows Python
    down, so that shares are of use and absolute times are not; on CUDA they are those of the host.

    Args:
        dirpath: See `Profiler`.
        filename: See `Profiler`.
        line_count_restriction: Functions of each part: a number of them, or a share up to 1.0.
        dump_stats: Write what was measured of each part to `STAGE-PART.prof` too, for `pstats` or snakeviz; without a
            `dirpath` into `profile` in the run directory.
    """

    @checked
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
        """See `Profiler.begin`."""
        super().begin(run, directory)
        self.profiled_actions = {}

    def start(self, action_name: str) -> None:
        """See `Profiler.start`.

        Raises:
            ConfigError: Something else profiles Python.
        """
        if self._stack:
            self._stack[-1][1].disable()
        profile = self.profiled_actions.setdefault(action_name, cProfile.Profile())
        self._stack.append((action_name, profile))
        _enable(profile)

    def stop(self, action_name: str) -> None:
        """See `Profiler.stop`.

        Raises:
            ConfigError: It is not the part in progress.
        """
        end_part(self, self._stack, action_name).disable()
        if self._stack:
            _enable(self._stack[-1][1])

    def summary(self) -> str:
        """The functions of each part."""
        parts = [
            (name, *_functions(profile, self.line_count_restriction)) for name, profile in self._measured().items()
        ]
        return "\n".join(f"{name}\n{text}" for name, _, text in sorted(parts, key=lambda part: -part[1]))

    def describe(self) -> None:
        """Show the summary, and write the files that were asked for."""
        super().describe()
        folder = self._folder if self.dirpath is not None or self._folder is None else self._folder / "profile"
        if self.dump_stats and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            rank = "" if self._run is None or self._run.processes.is_global_zero else f"-rank{self._run.processes.rank}"
            for name, profile in self._measured().items():
                profile.dump_stats(folder / f"{self._stage}-{re.sub(r'[^0-9A-Za-z_.]+', '_', name)}{rank}.prof")

    def _measured(self) -> dict[str, cProfile.Profile]:
        """The parts in which a function was called."""
        found = {}
        for name, profile in self.profiled_actions.items():
            profile.create_stats()
            if profile.stats:
                found[name] = profile
        return found


def _enable(profile: cProfile.Profile) -> None:
    try:
        profile.enable()
    except ValueError as error:  # since Python 3.12 there is one at a time
        raise ConfigError(
            "AdvancedProfiler: another profiler or debugger of Python is at work. End it, or leave this one out."
        ) from error


def _functions(profile: cProfile.Profile, restriction: int | float) -> tuple[float, str]:
    """The seconds of a part, and its functions as a text."""
    file = StringIO()
    stats = pstats.Stats(profile, stream=file).sort_stats("cumulative")
    stats.print_stats(restriction)
    return stats.total_tt, "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines() if line)  # type: ignore[attr-defined]
