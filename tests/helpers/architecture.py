"""Packages of Lumen in layers, and their files."""

import ast
from pathlib import Path

import lumen

ROOT = Path(lumen.__file__).parent
#: Layers from the bottom up. A module imports only from lower layers; a package is one unit.
LAYERS = (
    {"errors", "console", "version"},
    {"internals", "random"},
    {"data", "metrics", "precision", "distributed", "loggers"},
    {"task", "optim"},
    {"strategies"},
    {"run"},
    {"checkpoint"},
    {"loop", "callbacks", "profilers"},
    {"trainer"},
    {"cli", "integrations"},
    {"tools"},
)

#: Packages that the core does not need.
AROUND_THE_CORE = ("cli", "tools", "integrations")


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(ROOT.rglob("*.py"))}
