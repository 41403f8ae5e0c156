"""Lightning's names in a Python file, their names in Lumen, and the imports that bind them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, final

import lumen
from lumen.errors.lightning_names import INSTEAD_OF_CLASSES, LIGHTNING_PACKAGES, RENAMED
from lumen.tools.migrate.source import COMMENT, NOTES, TABLES, EditableSource

#: Modules in the packages of any version of Lightning.
MODULES = frozenset(TABLES["modules"].split())
#: Full names of the replacements for types and functions that are not in `lumen.__all__`.
ELSEWHERE: Mapping[str, str] = TABLES["elsewhere"]


@final
class LumenName(NamedTuple):
    """Replacement for a name of Lightning.

    Attributes:
        module: The module to import the replacement from.
        name: The last part of the replacement's full name.
    """

    module: str
    name: str


def get_short_name(full: str) -> str:
    """Return the last part of a full name."""
    return full.rpartition(".")[2]


def is_module(full: str) -> bool:
    """Return True if a full name of Lightning is a package or module."""
    return full in LIGHTNING_PACKAGES or get_short_name(full) in MODULES


def find_new_name(full: str) -> LumenName | None:
    """Return the replacement for a class or function of Lightning, or None if Lumen has no counterpart."""
    short, package = get_short_name(full), full.split(".")[:2]
    if short == "__version__":
        return LumenName("lumen", short)
    if package == ["pytorch_lightning", "metrics"]:  # the origin of torchmetrics
        is_function = ".functional." in full
        return LumenName("torchmetrics.functional" if is_function else "torchmetrics", short)
    if package[1:] == ["fabric"] or package[0] == "lightning_fabric":
        return LumenName("lumen", short) if short == "seed_everything" else None
    if short == "ModelSummary" and {"core", "utilities"} & {*full.split(".")}:
        return LumenName("lumen", "summarize")  # `ModelSummary` in `callbacks` is a callback.
    if short in lumen.__all__:
        return LumenName("lumen", short)
    to = RENAMED.get(short) or ELSEWHERE.get(short)
    if to is None:
        return None
    module, _, name = to.rpartition(".")
    return None if module == "lumen" and name not in lumen.__all__ else LumenName(module, name)


def find_replacement(full: str) -> str:
    """Return a sentence on what to write in place of a name without counterpart."""
    short = get_short_name(full)
    if full.split(".")[1:2] == ["fabric"] or short == "Fabric" or full.startswith("lightning_fabric"):
        return "Lumen has no Fabric: write the loop as training_step of a TaskModule."
    return INSTEAD_OF_CLASSES.get(short) or TABLES["old_functions"].get(short) or f"Lumen has no {short}."


@final
class ImportBinding(NamedTuple):
    """Name that an import binds to an object of Lightning.

    Attributes:
        local: The name in the file.
        full: The full name of the imported object.
        alias: The alias node in the import statement.
        statement: The import statement with the alias.
    """

    local: str
    full: str
    alias: ast.alias
    statement: ast.Import | ast.ImportFrom


@final
class FileNames:
    """Names of a file that are bound to objects of Lightning, and all other bound names.

    Args:
        tree: The syntax tree of the file.
        own: Names of the project's packages, which hide packages of the same name.
    """

    def __init__(self, tree: ast.Module, own: Container[str] = ()) -> None:
        self._own = own
        self.bindings: dict[str, ImportBinding] = {}
        self.all_bindings: list[ImportBinding] = []
        self.star_imports: dict[str, ast.ImportFrom] = {}
        self.imported: dict[str, str] = {}
        self.bound: set[str] = set()
        self.read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in ast.walk(tree):
            self._record_binding(node)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        functions = [each for each in ast.walk(tree) if isinstance(each, kinds)]
        #: Lightning's names that a function of the file rebinds, so that a use is ambiguous.
        self.ambiguous = {_get_stored_name(node) for function in functions for node in ast.walk(function)} & {
            *self.bindings
        }
        #: Names that the file also assigns, for example as a fallback for a failed import.
        self.assigned = {_get_stored_name(node) for node in ast.walk(tree)} - self.ambiguous

    def _record_binding(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                full = alias.name if alias.asname else package
                self._add_binding(alias.asname or package, full, alias, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                if alias.name == "*":
                    self.star_imports[full] = node
                self._add_binding(alias.asname or alias.name, full, alias, node)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.bound.add(node.id)
        elif isinstance(node, ast.arg):
            self.bound.add(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            self.bound.add(node.name)

    def _add_binding(self, local: str, full: str, alias: ast.alias, statement: ast.Import | ast.ImportFrom) -> None:
        if self.is_of_lightning(full):
            if alias.name != "*":
                self.all_bindings.append(ImportBinding(local, full, alias, statement))
                self.bindings[local] = self.all_bindings[-1]
        else:
            self.bound.add(local)
            self.imported[local] = full

    def is_of_lightning(self, full: str) -> bool:
        """Return True for names of Lightning, and for functions that have no rank until Lightning sets the rank."""
        module, _, short = full.rpartition(".")
        package = full.split(".")[0]
        return (package in LIGHTNING_PACKAGES and package not in self._own) or (
            module == "lightning_utilities.core.rank_zero" and short in lumen.__all__
        )

    def get_full_name(self, node: ast.AST) -> str | None:
        """Return the full name of the imported object that a name or attribute in the file refers to, or None."""
        if isinstance(node, ast.Attribute):
            owner = self.get_full_name(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        if not isinstance(node, ast.Name) or node.id in self.ambiguous:
            return None
        return self.bindings[node.id].full if node.id in self.bindings else self.imported.get(node.id)

    def get_lightning_name(self, node: ast.AST) -> str | None:
        """Return the full name of the Lightning object that a name in the file refers to, or None."""
        full = self.get_full_name(node)
        return full if full is not None and self.is_of_lightning(full) else None

    def get_binding(self, node: ast.AST) -> ImportBinding | None:
        """Return the binding that a name or the beginning of a dotted name refers to, or None."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self.bindings.get(node.id) if isinstance(node, ast.Name) and node.id not in self.ambiguous else None


def _get_stored_name(node: ast.AST) -> str:
    """Return the name that a node binds, or an empty string."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


#: Full name of an object of Lightning, in a text.
LIGHTNING_NAME = re.compile(rf"({'|'.join(LIGHTNING_PACKAGES)})(\.\w+)+")


@final
class ImportEditor:
    """Editor of the uses of Lightning's names and, after them, of the imports.

    Args:
        source: The text of the file.
        names: The names of the file that are bound to objects of Lightning.
        reexported: Names of Lightning that other files of the project import from files of the project.
    """

    def __init__(self, source: EditableSource, names: FileNames, reexported: Container[str] = ()) -> None:
        self._source, self._names, self._reexported = source, names, reexported
        self._kept: defaultdict[ImportBinding, list[tuple[int, int]]] = defaultdict(list)
        self._wanted: defaultdict[ImportBinding, list[LumenName]] = defaultdict(list)
        is_free = names.imported["lumen"] == "lumen" if "lumen" in names.imported else "lumen" not in names.bound
        modules = [each.local for each in names.all_bindings if is_module(each.full)]
        kept = [local for local in modules if local in names.assigned or local in reexported] or (
            [] if is_free else modules
        )
        self._package = next(iter(kept), "lumen")

    def rename_use(self, node: ast.expr) -> str | None:
        """Rename a use of an object of Lightning.

        Returns:
            The full name in Lightning if the object has no counterpart, or None if the use was renamed.
        """
        full, binding = self._names.get_lightning_name(node), self._names.get_binding(node)
        assert full is not None
        assert binding is not None
        start, end = self._source.get_span(node)
        new = None if is_module(full) else find_new_name(full)
        if new is None:
            self._kept[binding].append((start, end))
            return None if is_module(full) else full
        text = (
            self._get_local_name(binding) if isinstance(node, ast.Name) else self._rename_through_module(binding, new)
        )
        if text != self._source.text[start:end]:
            self._source.replace(start, end, text)
        return None

    def _rename_through_module(self, binding: ImportBinding, new: LumenName) -> str:
        self._wanted[binding].append(new)
        if new.module == "lumen":
            return f"{self._package}.{new.name}"
        return new.name if self._is_free(new) else f"_{new.name}"

    def _get_local_name(self, binding: ImportBinding) -> str:
        """Return the new local name of an imported object."""
        new = find_new_name(binding.full)
        is_kept = binding.alias.asname is not None or binding.local in self._names.assigned
        is_kept = is_kept or binding.local in self._reexported
        if new is None or is_kept or not self._is_free(new):
            return binding.local
        return new.name

    def _is_free(self, new: LumenName) -> bool:
        """Return True if the file binds the name to no other object."""
        same = (f"{new.module}.{new.name}", f"typing.{new.name}")
        bound = new.name in self._names.bound and self._names.imported.get(new.name) not in same
        ours = self._names.bindings.get(new.name)
        return not bound and (ours is None or find_new_name(ours.full) == new)

    # ------------------------------------------------------------------ the statements

    def write_imports(self, tree: ast.Module) -> list[tuple[int, str]]:
        """Rewrite the imports, after all uses were renamed.

        Returns:
            Lines that still import Lightning, each with a note.
        """
        left: list[tuple[int, str]] = []
        for block in _iterate_blocks(tree) if self._names.all_bindings else ():
            written: set[str] = set()
            for run in self._iterate_import_runs(block):
                lines = self._make_import_lines(run, written, left)
                start, end = self._source.get_span(run[0])[0], self._source.get_span(run[-1])[1]
                if not lines and len(block) > len(run) and self._is_alone(start, end):
                    self._source.replace(self._source.find_line_start(start), self._source.find_line_end(end - 1), "")
                else:
                    text = f"{self._source.newline}{self._source.get_indent(start)}".join(lines or ["import lumen"])
                    if text != self._source.text[start:end]:
                        self._source.replace(start, end, text)
        return left

    def _is_alone(self, start: int, end: int) -> bool:
        """Return True if the lines of a span have no other text, except comments."""
        before = self._source.text[self._source.find_line_start(start) : start]
        behind = self._source.text[end : self._source.find_line_end(end - 1)].strip()
        return not before.strip() and (not behind or behind.startswith("#"))

    def _iterate_import_runs(self, block: list[ast.stmt]) -> Iterator[list[ast.Import | ast.ImportFrom]]:
        """Yield runs of consecutive Lightning imports without a comment between them."""
        run: list[ast.Import | ast.ImportFrom] = []
        ours = {id(binding.statement) for binding in self._names.all_bindings}
        for before, statement in pairwise([None, *block]):
            if not isinstance(statement, ast.Import | ast.ImportFrom) or id(statement) not in ours:
                continue
            if run and (run[-1] is not before or self._list_comments([run[-1], statement])):
                yield run
                run = []
            run.append(statement)
        if run:
            yield run

    def _make_import_lines(
        self, run: list[ast.Import | ast.ImportFrom], written: set[str], left: list[tuple[int, str]]
    ) -> list[str]:
        """Return the new lines that replace consecutive imports."""
        plain: list[str] = []
        by_module: defaultdict[str, list[str]] = defaultdict(list)
        bindings = {id(binding.alias): binding for binding in self._names.all_bindings}

        def add_import(new: LumenName, local: str) -> None:
            if self._names.imported.get(local) in (f"{new.module}.{new.name}", f"typing.{new.name}"):
                return
            by_module[new.module].append(new.name if local == new.name else f"{new.name} as {local}")

        for statement in run:
            for alias in statement.names:
                binding = bindings.get(id(alias))
                if binding is None:
                    module = statement.module or "" if isinstance(statement, ast.ImportFrom) else None
                    (plain if module is None else by_module[module]).append(ast.unparse(alias))
                    continue
                new, is_module_name = find_new_name(binding.full), is_module(binding.full)
                is_renamed, wanted = new is None or new.name != binding.local, self._wanted[binding]
                is_ambiguous = is_renamed and binding.local in self._names.ambiguous
                found = self._kept[binding]
                uses = [use for use in found if not self._source.is_replaced(*use)]
                if binding.local == self._package and all(last - first == len(binding.local) for first, last in uses):
                    uses = []  # The name of the package is a name for Lumen now.
                if new is not None and new.module.startswith("torchmetrics"):
                    left.append((statement.lineno, NOTES["torchmetrics"]))
                if new is not None and not is_module_name and not is_ambiguous:
                    add_import(new, self._get_local_name(binding))
                elif not is_module_name and not is_ambiguous and found and not uses:
                    continue  # All uses are left out.
                elif not is_module_name or is_ambiguous or uses:
                    short = get_short_name(binding.full)
                    kind = "ambiguous" if is_ambiguous else "stays" if is_module_name else ""
                    note = NOTES[kind].format(binding.local) if kind else f"{short}: {find_replacement(binding.full)}"
                    left.append((statement.lineno, note))
                    if isinstance(statement, ast.Import):
                        plain.append(ast.unparse(alias))
                    else:
                        by_module[statement.module or ""].append(ast.unparse(alias))
                else:
                    wanted = wanted or [LumenName("lumen", "")]
                for each in dict.fromkeys(wanted):
                    if each.module != "lumen":
                        add_import(each, each.name if self._is_free(each) else f"_{each.name}")
                    elif "lumen" not in {*self._names.imported, self._names.imported.get(self._package)}:
                        plain.append("lumen" if self._package == "lumen" else f"lumen as {self._package}")
        lines = [f"import {each}" for each in plain]
        comments = self._list_comments(run)
        for module, several in by_module.items():
            fresh = [each for each in dict.fromkeys(several) if f"{module}.{each}" not in written]
            written.update(f"{module}.{each}" for each in fresh)
            if fresh:
                lines.append(f"from {module} import {', '.join(fresh)}")
        fresh_lines = [line for line in dict.fromkeys(lines) if line not in written]
        written.update(fresh_lines)
        return [*comments, *fresh_lines]

    def _list_comments(self, run: list[ast.Import | ast.ImportFrom]) -> list[str]:
        return COMMENT.findall(self._source.text[self._source.get_span(run[0])[0] : self._source.get_span(run[-1])[1]])


def _iterate_blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield all lists of statements in a tree."""
    for node in ast.walk(tree):
        blocks = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
        yield from (block for block in blocks if isinstance(block, list) and block)
