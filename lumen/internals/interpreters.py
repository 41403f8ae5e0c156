"""Start of Python without imports from the working directory, which could replace modules of Lumen, torch or Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

SAFE_PATH = "PYTHONSAFEPATH"
_LUMEN_FOLDER = Path(__file__).parent.parent
# A child process imports lumen from the folder of its parent's lumen.
_START_CODE = """\
import runpy, sys
from importlib.util import module_from_spec, spec_from_file_location
folder, module = sys.argv[1:3]
del sys.argv[1:3]
found = spec_from_file_location("lumen", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["lumen"] = lumen = module_from_spec(found)
found.loader.exec_module(lumen)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def make_python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of Lumen in an interpreter that ignores the working directory.

    Args:
        module: The full name of the module.
        arguments: The arguments of the module, for its `sys.argv`.
    """
    return [sys.executable, "-P", "-c", _START_CODE, str(_LUMEN_FOLDER), module, *arguments]


@final
class SearchPath:
    """Copy of a process's `sys.path`; a process that unpickles this object sets its own `sys.path` to the copy."""

    def __init__(self) -> None:
        self._path = sys.path[:]

    def __setstate__(self, state: dict[str, list[str]]) -> None:
        sys.path[:] = state["_path"]


@contextmanager
def protect_search_path() -> Iterator[None]:
    """Hide the working directory within the context from interpreters that multiprocessing starts.

    These interpreters copy `sys.path`. The function that such a process calls is imported first. Its first argument is
    a `SearchPath`, for modules of the user. A process that starts programs of the user removes `SAFE_PATH` from its
    environment.
    """
    before, path = os.environ.get(SAFE_PATH), sys.path[:]
    os.environ[SAFE_PATH] = "1"
    if Path.cwd() != _LUMEN_FOLDER.parent:
        sys.path[:] = [entry for entry in path if Path(entry).absolute() != Path.cwd()]
    try:
        yield
    finally:
        sys.path[:] = path
        del os.environ[SAFE_PATH]
        if before is not None:
            os.environ[SAFE_PATH] = before
