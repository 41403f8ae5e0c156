"""Lumen: a training library for PyTorch that never changes what is computed."""

from __future__ import annotations

import ast
import gc
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lumen.version import FOREIGN_NAMES, __version__ as __version__, make_mixed_files_error

_FOLDER = os.path.dirname(__file__)
if os.path.exists(os.path.join(_FOLDER, FOREIGN_NAMES[0])):  # one look at the disk, a few microseconds
    raise make_mixed_files_error(_FOLDER, sorted({*FOREIGN_NAMES} & {*os.listdir(_FOLDER)}))

if "LUMEN_LAUNCHER" in os.environ:  # the launcher then prints the error that ends this process
    import_module("lumen.distributed.worker").attach_to_launcher()

#: The module of each public name, from the stub: type checkers read the stub in place of this file.
_HOME = {
    public.name: str(statement.module)
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("lumen")
    for public in statement.names
    if not public.name.startswith("_")
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule when it is first used, so that `lumen --help` need not wait for torch."""
    if name in _HOME:
        collects = gc.isenabled()
        gc.disable()  # one full collection among all of torch's objects takes as long as the import
        try:
            return getattr(import_module(_HOME[name]), name)
        finally:
            if collects:
                gc.enable()
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    from lumen.errors.lightning_names import INSTEAD_OF_CLASSES

    instead = f". {INSTEAD_OF_CLASSES[name]}" if name in INSTEAD_OF_CLASSES else ""
    raise AttributeError(f"module 'lumen' has no attribute {name!r}{instead}")


def __dir__() -> list[str]:
    return __all__
