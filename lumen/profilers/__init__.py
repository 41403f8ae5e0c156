"""Profilers: where the time of a run goes."""

from __future__ import annotations

from lumen.errors import ConfigError
from lumen.profilers.advanced import AdvancedProfiler
from lumen.profilers.base import PassThroughProfiler, Profiler
from lumen.profilers.instrument import profiled
from lumen.profilers.simple import SimpleProfiler
from lumen.profilers.torch_profiler import TorchProfiler

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "SimpleProfiler",
    "TorchProfiler",
    "make_profiler",
    "profiled",
]

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
