"""What is known of a project as a whole: its files, and what its classes are derived from."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

import lumen
from lumen.errors import ConfigError
from lumen.errors.lightning_names import LIGHTNINGS
from lumen.tools.migrate.names import Names, new_name, short_name

_BASES = {
    lumen.TaskModule: "task",
    lumen.DataModule: "data module",
    lumen.Callback: "callback",
    lumen.CLI: "cli",
    lumen.Logger: "logger",
    lumen.Trainer: "trainer",
}
#: Directories in which no file is the project's own, where git does not say so.
_NOT_OURS = ("__pycache__", "node_modules", "site-packages", "lightning_logs", "wandb", "mlruns")
_SUFFIXES = (".py", ".pyi", ".yaml", ".yml", ".ipynb", ".toml", ".cfg", ".txt", ".lock")
_NAMED = ("Pipfile", "Dockerfile", "Makefile")


@final
class Read(NamedTuple):
    """A file in Python that could be read.

    Attributes:
        text: What stands in the file.
        tree: The syntax tree.
        names: Which names in it are Lightning's.
    """

    text: str
    tree: ast.Module
    names: Names


@final
class Classes:
    """The classes of a project, by what they are derived from.

    Args:
        files: All files in Python.
    """

    def __init__(self, files: Iterable[Read]) -> None:
        self._kinds: dict[str, str] = {}
        found = [(node, file.names) for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
        while len(kinds := {each[0].name: kind for each in found if (kind := self.kind(*each))}) > len(self._kinds):
            self._kinds = kinds
        self._defined = {node.name: (node, names) for node, names in found}
        tasks = [node for node, names in found if self.kind(node, names) == "task"]
        steps = [each for node in tasks for each in node.body if getattr(each, "name", "") == "training_step"]
        #: Of every training step, True if it returns a dictionary.
        self.steps_return = {_returns_dictionary(each) for each in steps}

    def kind(self, node: ast.ClassDef, names: Names) -> str | None:
        """What a class is: a task, a data module, a callback, a cli, a logger or a trainer; None: something else."""
        return next((kind for base in node.bases if (kind := self._kind_of_base(base, names)) is not None), None)

    def constructed(self, name: str) -> str | None:
        """The full name of Lightning's class whose constructor a class of the project has; None: it has its own."""
        seen: set[str] = set()
        while name in self._defined and name not in seen:
            seen.add(name)
            node, names = self._defined[name]
            if not node.bases or any(getattr(each, "name", "") == "__init__" for each in node.body):
                return None
            if (full := names.of_lightning(node.bases[0])) is not None:
                return full
            name = getattr(node.bases[0], "attr", getattr(node.bases[0], "id", ""))
        return None

    def _kind_of_base(self, base: ast.expr, names: Names) -> str | None:
        full = names.full(base)
        if full is not None and full.split(".")[0] in ("lumen", *LIGHTNINGS):
            new = new_name(full)
            kind = getattr(lumen, new.name, None) if new is not None and new.module == "lumen" else None
            if not inspect.isclass(kind):
                return None
            return next((name for owner, name in _BASES.items() if issubclass(kind, owner)), None)
        short = short_name(full) if full is not None else getattr(base, "attr", getattr(base, "id", ""))
        return self._kinds.get(short)


def _returns_dictionary(step: ast.AST) -> bool:
    """Return True if a dictionary that is written in a function is what the function returns, alone or by its name."""
    returned = [node.value for node in ast.walk(step) if isinstance(node, ast.Return)]
    names = {node.id for node in returned if isinstance(node, ast.Name)}
    assigned = [node for node in ast.walk(step) if isinstance(node, ast.Assign)]
    returned += [each.value for each in assigned if {getattr(target, "id", "") for target in each.targets} & names]
    called = (getattr(getattr(each, "func", None), "id", "") for each in returned)
    return any(isinstance(each, ast.Dict) for each in returned) or "dict" in called


def files_of(path: Path) -> list[Path]:
    """The files of a project that may have to be edited: those that git knows or would, else all of a directory.

    Raises:
        ConfigError: There is nothing at the path.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or directory {path}.")
    if path.is_file():
        return [path]
    listed = _tracked(path, "--cached", "--others", "--exclude-standard")
    found: Iterable[Path] = map(path.joinpath, filter(None, listed.split("\0"))) if listed else _walk(path)
    ours = (each for each in found if _is_ours(each.relative_to(path)))
    return sorted({each for each in ours if each.is_file() and not each.is_symlink()})


def _walk(path: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(path):
        ours = (name for name in folders if not Path(folder, name, "pyvenv.cfg").exists())
        folders[:] = [name for name in ours if name not in _NOT_OURS]
        yield from (Path(folder, name) for name in files)


def _is_ours(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts[:-1])
    return not hidden and (path.suffix in _SUFFIXES or path.name in _NAMED)


def _tracked(directory: Path, *words: str) -> str:
    """List the files that git knows in a directory, as `-z` does; empty where there is no git, or no repository.

    A repository may be a stranger's, and its config can name programs. Listing runs no filter of it; monitors of the
    file system, hooks and transports are turned off.
    """
    command = ["git", "--literal-pathspecs", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "ls-files"]
    settings = {**os.environ, "GIT_ALLOW_PROTOCOL": ""}
    try:
        done = subprocess.run([*command, "-z", *words], cwd=directory, env=settings, capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def unsaved(files: Iterable[Path]) -> Mapping[Path, str]:
    """The files whose present text git could not give back, with why."""
    found: dict[Path, str] = {}
    for file in files:
        entry, text = _tracked(file.parent, "--stage", "--", file.name).split(), file.read_bytes()
        if not entry:
            found[file] = "is not in git"
            continue
        digest = hashlib.new("sha1" if len(entry[1]) == 40 else "sha256", b"blob %d\0" % len(text) + text)
        if digest.hexdigest() != entry[1]:
            found[file] = "has changes that are not committed"
    return found
