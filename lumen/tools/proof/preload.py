"""What every process of a variant needs, imported by the one that they are forked from."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from lumen.internals.compiler import import_compiler
from lumen.tools.proof.worker import MORE

import_compiler()
if file := os.environ.pop(MORE, None):
    for name in Path(file).read_text(encoding="utf-8").split():
        with suppress(Exception):  # one that cannot be imported alone is imported by who needs it
            import_module(name)
