"""Starts Python so that no file of the working directory is imported in place of a module of Lumen, torch or Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

SAFE_PATH = "PYTHONSAFEPATH"
_LUMEN = Path(__file__).parent.parent
# The child imports the lumen of its parent, wherever the parent has found it.
_START = """\
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
folder, module = sys.argv[1:3]
del sys.argv[1:3]
found = spec_from_file_location("lumen", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["lumen"] = lumen = module_from_spec(found)
found.loader.exec_module(lumen)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of Lumen in an interpreter that ignores the working directory.

    Args:
        module: The full name of the module.
        arguments: Words for its `sys.argv`.
    """
    return [sys.executable, "-P", "-c", _START, str(_LUMEN), module, *arguments]


@final
class SearchPath:
    """The `sys.path` of a process, which any other process that receives it takes over."""

    def __init__(self) -> None:
        self._path = sys.path[:]

    def __setstate__(self, state: dict[str, list[str]]) -> None:
        sys.path[:] = state["_path"]


@contextmanager
def safe_path() -> Iterator[None]:
    """Hold the working directory back from interpreters that multiprocessing starts, which take over `sys.path`.

    The function that such a process calls is imported first; its first argument is a `SearchPath`, for modules of the
    user. A process that starts programs of the user removes `SAFE_PATH` from its environment.
    """
    before, path = os.environ.get(SAFE_PATH), sys.path[:]
    os.environ[SAFE_PATH] = "1"
    if Path.cwd() != _LUMEN.parent:
        sys.path[:] = [entry for entry in path if Path(entry).absolute() != Path.cwd()]
    try:
        yield
    finally:
        sys.path[:] = path
        del os.environ[SAFE_PATH]
        if before is not None:
            os.environ[SAFE_PATH] = before
