"""Profilers: where the time of a run goes."""

from __future__ import annotations

from lumen.errors import ConfigError
from lumen.profilers.advanced import AdvancedProfiler as AdvancedProfiler
from lumen.profilers.base import PassThroughProfiler as PassThroughProfiler, Profiler as Profiler
from lumen.profilers.instrument import profiled as profiled
from lumen.profilers.simple import SimpleProfiler as SimpleProfiler
from lumen.profilers.torch_profiler import TorchProfiler as TorchProfiler

_NAMES: dict[str, type[SimpleProfiler | AdvancedProfiler | TorchProfiler]] = {
    "advanced": AdvancedProfiler,
    "simple": SimpleProfiler,
    "torch": TorchProfiler,
    "pytorch": TorchProfiler,
}


def make_profiler(profiler: str | Profiler | None) -> Profiler:
    """The profiler of a name.

    Args:
        profiler: `simple`, `advanced` or `torch` (Lightning's `pytorch` means the same); None: one that measures
            nothing; an object is returned as it is.

    Raises:
        ConfigError: There is no profiler of this name.
    """
    if profiler is None or isinstance(profiler, Profiler):
        return profiler or PassThroughProfiler()
    if str(profiler) not in _NAMES:
        raise ConfigError(
            f"profiler: no profiler is named {profiler!r}; use {', '.join(_NAMES)}, or an object such as "
            "lumen.SimpleProfiler()."
        )
    return _NAMES[str(profiler)]()
