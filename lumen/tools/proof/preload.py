"""Imports for the fork server, so that the processes of variants start with these modules loaded."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from lumen.internals.compiler import import_compiler
from lumen.tools.proof.worker import PRELOAD_VARIABLE

import_compiler()
if file := os.environ.pop(PRELOAD_VARIABLE, None):
    for name in Path(file).read_text(encoding="utf-8").split():
        with suppress(Exception):  # A module that fails here is imported later by its user.
            import_module(name)
