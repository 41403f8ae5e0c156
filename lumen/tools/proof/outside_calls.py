"""Calls by which user code takes a value from outside its training: entropy, clocks, addresses and files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple, final

from lumen.distributed.process_location import Frame

#: Calls by the qualified name of a built-in function, the likeliest cause of a difference first.
OUTSIDE_CALLS = {
    "urandom": "os.urandom()", "getrandom": "os.getrandom()", "getpid": "os.getpid()", "time": "time.time()",
    "time_ns": "time.time_ns()", "datetime.now": "datetime.now()", "monotonic": "time.monotonic()",
    "perf_counter": "time.perf_counter()", "hash": "hash()", "id": "id()", "open": "open()",
}  # fmt: skip
_CARRIERS = ("random", "secrets", "uuid", "numpy", "pathlib", "PIL")  # packages that make such a call for the user


@final
class OutsideCall(NamedTuple):
    """Call of user code that may return a different value in each run.

    Attributes:
        builtin: A key of `OUTSIDE_CALLS`.
        file: Path of the user's file.
        line: Number of the line in the file.
        function: The function that the line calls, such as `SystemRandom.random()`.
    """

    builtin: str
    file: str
    line: int
    function: str


@contextmanager
def watch_outside_calls(note: Callable[[OutsideCall], None]) -> Iterator[None]:
    """Report the calls that user code makes in this thread within the context, directly or by another package."""

    def on_event(frame: FrameType | None, event: str, function: Any) -> None:
        if event == "c_call" and (name := getattr(function, "__qualname__", "")) in OUTSIDE_CALLS:
            shown = OUTSIDE_CALLS[name]
            while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _CARRIERS:
                shown, frame = f"{frame.f_code.co_qualname}()", frame.f_back
            if frame is not None and _is_in_user_code(frame.f_code.co_filename):
                note(OutsideCall(name, frame.f_code.co_filename, frame.f_lineno, shown))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)


@lru_cache(maxsize=1024)
def _is_in_user_code(file: str) -> bool:
    return Frame(file, 0, "").is_in_user_code
