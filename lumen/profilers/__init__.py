"""Profilers that measure how long each part of a run takes."""

from __future__ import annotations

from lumen.errors import ConfigError
from lumen.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from lumen.profilers.base import PassThroughProfiler as PassThroughProfiler, Profiler as Profiler
from lumen.profilers.instrument import profile_run as profile_run
from lumen.profilers.simple import SimpleProfiler as SimpleProfiler
from lumen.profilers.torch_profiler import TorchProfiler as TorchProfiler

_NAMES: dict[str, type[SimpleProfiler | AdvancedProfiler | TorchProfiler]] = {
    "advanced": AdvancedProfiler,
    "simple": SimpleProfiler,
    "torch": TorchProfiler,
    "pytorch": TorchProfiler,
}


def make_profiler(profiler: str | Profiler | None) -> Profiler:
    """Return the profiler with a name.

    Args:
        profiler: `simple`, `advanced` or `torch` (`pytorch`, as in Lightning, is the same). None returns a profiler
            that measures nothing; an object is returned unchanged.

    Raises:
        ConfigError: No profiler has this name.
    """
    if profiler is None or isinstance(profiler, Profiler):
        return profiler or PassThroughProfiler()
    if str(profiler) not in _NAMES:
        raise ConfigError(
            f"profiler: no profiler is named {profiler!r}; use {', '.join(_NAMES)}, or an object such as "
            "lumen.SimpleProfiler()."
        )
    return _NAMES[str(profiler)]()
