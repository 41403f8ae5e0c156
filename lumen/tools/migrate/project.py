"""Files of a project, and the base classes of the project's classes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import subprocess
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

import lumen
from lumen.errors import ConfigError
from lumen.errors.lightning_names import LIGHTNING_PACKAGES
from lumen.tools.migrate.names import FileNames, LumenName, find_new_name, get_short_name
from lumen.tools.migrate.source import get_last_name

_BASES = {
    lumen.TaskModule: "task",
    lumen.DataModule: "data module",
    lumen.Callback: "callback",
    lumen.CLI: "cli",
    lumen.Logger: "logger",
    lumen.Trainer: "trainer",
}
#: Directories of environments, caches and runs.
FOREIGN_FOLDERS = ("__pycache__", "node_modules", "site-packages", "lightning_logs", "wandb", "mlruns")
_SUFFIXES = (
    ".py", ".pyi", ".yaml", ".yml", ".ipynb", ".toml", ".cfg", ".txt", ".lock", ".json", ".md", ".sh", ".bash",
    ".slurm", ".sbatch", ".env",
)  # fmt: skip
_NAMED = ("Pipfile", "Dockerfile", "Makefile", "Snakefile", "justfile")


@final
class ParsedFile(NamedTuple):
    """Python file that was parsed.

    Attributes:
        text: Contents of the file.
        tree: The syntax tree.
        names: The names of the file that are bound to objects of Lightning.
    """

    text: str
    tree: ast.Module
    names: FileNames


@final
class ProjectClasses:
    """Classes of a project, by their base classes.

    Args:
        files: All Python files.
        modules: Names of the files and directories of the project, without suffixes.
    """

    def __init__(self, files: Iterable[ParsedFile], modules: Container[str] = ()) -> None:
        files = list(files)
        self._modules = modules
        sources = (full for file in files for full in file.names.imported.values())
        imported = {get_short_name(full) for full in sources if self.is_own(full)}
        for file in files:
            if any(map(self.is_own, file.names.star_imports)):
                imported |= file.names.read - file.names.bound
        bindings = (each for file in files for each in file.names.all_bindings)
        #: Full name in Lightning by the local name that other files of the project import.
        self.reexported = {each.local: each.full for each in bindings if each.local in imported}
        #: Kind of each class of the project, by its name.
        self.kinds: dict[str, str] = {}
        nodes = [(node, file.names) for file in files for node in ast.walk(file.tree)]
        found = [(node, names) for node, names in nodes if isinstance(node, ast.ClassDef)]
        while len(kinds := {each[0].name: kind for each in found if (kind := self.get_kind(*each))}) > len(self.kinds):
            self.kinds = kinds
        self._defined = {node.name: (node, names) for node, names in found}
        #: True if code of the project names LightningCLI, or if the project has only configs.
        self.uses_cli = not files or any(
            "LightningCLI" in (get_last_name(node), getattr(node, "name", "")) for node, _ in nodes
        )
        #: Name of the Lumen class by the group of its options in a command line.
        self.option_groups = {"trainer": "Trainer"}
        for node, names in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_lightning_class_args":
                self._record_options(node, names)
        tasks = [node for node, names in found if self.get_kind(node, names) == "task"]
        steps = [each for node in tasks for each in node.body if getattr(each, "name", "") == "training_step"]
        #: Set of values over all training steps: True if the step returns a dictionary.
        self.steps_return = {_returns_dictionary(each) for each in steps}

    def get_kind(self, node: ast.ClassDef, names: FileNames) -> str | None:
        """Return the kind of a class: task, data module, callback, cli, logger or trainer; None for other classes."""
        return next((kind for base in node.bases if (kind := self._get_base_kind(base, names)) is not None), None)

    def get_constructed_class(self, name: str) -> str | None:
        """Return the full name of the Lightning class whose constructor a project class inherits, or None."""
        seen: set[str] = set()
        while name in self._defined and name not in seen:
            seen.add(name)
            node, names = self._defined[name]
            if not node.bases or any(getattr(each, "name", "") == "__init__" for each in node.body):
                return None
            if (full := names.get_lightning_name(node.bases[0])) is not None:
                return full
            name = get_last_name(node.bases[0])
        return None

    def _get_base_kind(self, base: ast.expr, names: FileNames) -> str | None:
        full = names.get_full_name(base)
        if full is not None and full.split(".")[0] in ("lumen", *LIGHTNING_PACKAGES):
            return _find_kind(find_new_name(full))
        short = get_short_name(full) if full is not None else get_last_name(base)
        if full is not None and short not in self.kinds and short in self.reexported and self.is_own(full):
            return _find_kind(find_new_name(self.reexported[short]))
        return self.kinds.get(short)

    def is_own(self, full: str) -> bool:
        """Return True if an object is imported from a file of the project."""
        return full.startswith(".") or full.split(".")[0] in self._modules

    def _record_options(self, node: ast.Call, names: FileNames) -> None:
        """Record a class whose arguments are options: `parser.add_lightning_class_args(Timer, "timer")`."""
        values = [*node.args, *(each.value for each in node.keywords)]
        if len(values) < 2 or not isinstance(values[1], ast.Constant):
            return
        short = get_last_name(values[0])
        full = names.get_lightning_name(values[0]) or self.get_constructed_class(short)
        if full is not None and (new := find_new_name(full)) is not None and new.module == "lumen":
            self.option_groups[str(values[1].value)] = new.name


def _find_kind(new: LumenName | None) -> str | None:
    """Return the kind of a class of Lumen, or None."""
    kind = getattr(lumen, new.name, None) if new is not None and new.module == "lumen" else None
    return next((name for owner, name in _BASES.items() if inspect.isclass(kind) and issubclass(kind, owner)), None)


def _returns_dictionary(step: ast.AST) -> bool:
    """Return True if a function returns a dictionary literal or a `dict(...)` call, directly or by a name."""
    returned = [node.value for node in ast.walk(step) if isinstance(node, ast.Return)]
    names = {node.id for node in returned if isinstance(node, ast.Name)}
    assigned = [node for node in ast.walk(step) if isinstance(node, ast.Assign)]
    returned += [each.value for each in assigned if {getattr(target, "id", "") for target in each.targets} & names]
    called = (getattr(getattr(each, "func", None), "id", "") for each in returned)
    return any(isinstance(each, ast.Dict) for each in returned) or "dict" in called


def list_files(path: Path) -> list[Path]:
    """Return the files of a project that may need edits: files that git does not ignore, or all without git.

    Raises:
        ConfigError: The path does not exist.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or directory {path}.")
    if path.is_file():
        return [path]
    listed = _list_tracked(path, "--cached", "--others", "--exclude-standard")
    found: Iterable[Path] = map(path.joinpath, filter(None, listed.split("\0"))) if listed else _walk_files(path)
    ours = (each for each in found if _is_project_file(each.relative_to(path)))
    return sorted({each for each in ours if each.is_file() and not each.is_symlink()})


def _walk_files(path: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(path):
        ours = (name for name in folders if not Path(folder, name, "pyvenv.cfg").exists())
        folders[:] = [name for name in ours if name not in FOREIGN_FOLDERS]
        yield from (Path(folder, name) for name in files)


def _is_project_file(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts[:-1])
    return not hidden and (path.suffix in _SUFFIXES or path.name in _NAMED)


def _list_tracked(directory: Path, *words: str) -> str:
    """Return the files that git lists in a directory, each ended by a zero byte; empty without a repository.

    The repository may be untrusted, and its config can name programs. Listing runs no filters; file system monitors,
    hooks and transports are turned off.
    """
    command = ["git", "--literal-pathspecs", "-c", "core.fsmonitor=", "-c", "core.hooksPath=/dev/null", "ls-files"]
    settings = {**os.environ, "GIT_ALLOW_PROTOCOL": ""}
    try:
        done = subprocess.run([*command, "-z", *words], cwd=directory, env=settings, capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else ""


def find_unsaved(files: Iterable[Path]) -> Mapping[Path, str]:
    """Return the files whose present contents are not in git's index, with the reason."""
    found: dict[Path, str] = {}
    for file in files:
        entry, text = _list_tracked(file.parent, "--stage", "--", file.name).split(), file.read_bytes()
        if not entry:
            found[file] = "is not in git"
            continue
        digest = hashlib.new("sha1" if len(entry[1]) == 40 else "sha256", b"blob %d\0" % len(text) + text)
        if digest.hexdigest() != entry[1]:
            found[file] = "has changes that are not committed"
    return found
