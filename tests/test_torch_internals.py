"""Private names of torch stand in one file of Lumen, and one that is gone is said before any work is done."""

import ast
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import lumen

ROOT = Path(lumen.__file__).parent
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text(), str(path))
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "torch_internals.py"
}
#: Underscore names that are neither Lumen's nor torch's.
OTHERS = {
    "_asdict", "_fields", "_make", "_replace",  # named tuples
    "_actions", "_option_string_actions", "_typehint",  # argparse, jsonargparse
    "_distributed",  # Hugging Face's data sets
    "_strip_protocol",  # fsspec
    "_computed", "_defaults", "_forward_cache", "_reductions", "_sync_dist", "_to_sync",  # torchmetrics
    "_update_count",
}  # fmt: skip
#: Lumen's own, put where no assignment shows it.
LUMENS = {"_", "_hparams"}
#: What those objects of torch call private that Lumen is given, or makes classes of.
OF_TORCH = {
    name
    for owner in (nn.Module(), torch.Tensor, torch.optim.Optimizer, DataLoader, torch)
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
}


def is_private(name):
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.endswith("__")


def defined_in(tree):
    """Underscore names that a module gives to something: functions, classes, variables, attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used_in(tree):
    """(line, name) of underscore names that are attributes, imported, or spelled out for `getattr` and the like."""
    own = set(defined_in(tree))
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (ast.unparse(node.value) == "self" and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = (getattr(node, "module", None) or "").split(".")
            for name in (*origin, *(part for alias in node.names for part in alias.name.split("."))):
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            for name in node.value.split("."):
                yield node.lineno, name


def private_names_of_others():
    own = {name for tree in SOURCES.values() for name in defined_in(tree)}
    for path, tree in SOURCES.items():
        for line, name in used_in(tree):
            if is_private(name) and name not in OTHERS | LUMENS and (name not in own or name in OF_TORCH):
                yield f"{path}:{line} {name}"


def test_private_names_of_torch_stand_in_one_file():
    assert list(private_names_of_others()) == []
