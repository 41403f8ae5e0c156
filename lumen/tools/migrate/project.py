"""Files of a project, and the base classes of the project's classes."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import subprocess
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, final

import lumen
from lumen.errors import ConfigError
from lumen.errors.lightning_names import LIGHTNING_PACKAGES
from lumen.tools.migrate.names import FileNames, LumenName, find_new_name, get_short_name
from lumen.tools.migrate.source import Function, get_last_name

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
        self._methods: defaultdict[str, list[tuple[Function, ast.ClassDef, FileNames]]] = defaultdict(list)
        for node, names in found:
            for each in node.body:
                if isinstance(each, Function):
                    self._methods[each.name].append((each, node, names))
        #: Kinds of the values that all training steps return: True for a dictionary, False if not, None if unknown.
        self.steps_return = self._find_returned_kinds("training_step")

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

    def is_overridden(self, owner: ast.ClassDef, method: str) -> bool:
        """Return True if a class that derives from a class, or may do so, defines a method."""
        others = ((node, names) for _, node, names in self._methods[method] if node is not owner)
        return any({owner.name, ""} & self._list_bases(*each) for each in others)

    def _list_bases(self, node: ast.ClassDef, names: FileNames) -> set[str]:
        """Return the names of all base classes, which include "" for a base that is not a name."""
        found, waiting = set[str](), [(node, names)]
        while waiting:
            node, names = waiting.pop()
            for base in node.bases:
                short = get_short_name(names.get_full_name(base) or get_last_name(base))
                if short not in found and short in self._defined:
                    waiting.append(self._defined[short])
                found.add(short)
        return found

    def _find_returned_kinds(self, name: str, callers: frozenset[str] = frozenset()) -> set[bool | None]:
        """Return the kinds of the values that the methods of a name return, in all classes, which may override it."""
        kinds: set[bool | None] = set()
        for method, _, names in self._methods[name] if name not in callers else ():
            values: defaultdict[str, list[ast.expr]] = defaultdict(list)
            for node in ast.walk(method):
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        values[getattr(target, "id", "")].append(node.value)
            waiting = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
            while waiting:
                value = waiting.pop()
                if isinstance(value, ast.IfExp):
                    waiting += [value.body, value.orelse]
                elif isinstance(value, ast.Name) and values[value.id]:
                    waiting += values[value.id]
                    values[value.id] = [ast.Constant(None)]  # The values of a name count once.
                elif isinstance(value, ast.Call) and getattr(getattr(value.func, "value", None), "id", "") == "self":
                    kinds |= self._find_returned_kinds(get_last_name(value.func), callers | {name})
                elif value is not None and not (isinstance(value, ast.Constant) and value.value is None):
                    kinds.add(_is_dictionary(value, names))
        return kinds or {None}

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


def _is_dictionary(node: ast.expr, names: FileNames) -> bool | None:
    """Return True if a value is a dictionary, False if the value is a number or a tensor, and None if unknown."""
    if isinstance(node, ast.Dict) or getattr(getattr(node, "func", None), "id", "") in ("dict", "OrderedDict"):
        return True
    if isinstance(node, ast.Call):
        is_number = (names.get_full_name(node.func) or "").startswith("torch.")
        is_number = is_number or get_last_name(node.func) in ("mean", "sum")
    else:
        is_number = isinstance(node, ast.Constant | ast.UnaryOp)
        is_number = is_number or (isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr))
    return False if is_number else None


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
