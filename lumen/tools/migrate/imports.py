"""The imports of a file and the uses of what they bind: Lightning's names become Lumen's."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import final

from lumen.tools.migrate.names import Binding, Names, New, instead_of, is_module, new_name, short_name
from lumen.tools.migrate.source import COMMENT, Source

_UNCLEAR = "{} is something else in a function of this file. Rename one of them, and run this again."


@final
class Imports:
    """Renames what is used of Lightning, and then writes the imports anew.

    Args:
        source: The text of the file.
        names: Which of its names are Lightning's.
    """

    def __init__(self, source: Source, names: Names) -> None:
        self._source, self._names = source, names
        self._kept: set[Binding] = set()
        self._wanted: defaultdict[Binding, list[New]] = defaultdict(list)
        is_free = names.others.get("lumen", "lumen") == "lumen" and (
            "lumen" not in names.bound or "lumen" in names.others
        )
        modules = [each.local for each in names.every if is_module(each.full)]
        kept = [local for local in modules if local in names.assigned] or ([] if is_free else modules)
        self._package = next(iter(kept), "lumen")

    def use(self, node: ast.expr) -> str | None:
        """Rename a use of something that is Lightning's.

        Returns:
            The full name of Lightning's if it has no counterpart; None if all is done.
        """
        full, binding = self._names.of_lightning(node), self._names.root(node)
        assert full is not None
        assert binding is not None
        start, end = self._source.span(node)
        new = None if is_module(full) else new_name(full)
        if new is None:
            self._kept.add(binding)
            return None if is_module(full) else full
        text = self._local(binding) if isinstance(node, ast.Name) else self._through_module(binding, new)
        if text != self._source.text[start:end]:
            self._source.replace(start, end, text)
        return None

    def _through_module(self, binding: Binding, new: New) -> str:
        self._wanted[binding].append(new)
        if new.module == "lumen":
            return f"{self._package}.{new.name}"
        return new.name if self._is_free(new) else f"_{new.name}"

    def _local(self, binding: Binding) -> str:
        """What a name that was imported is called in the file from now on."""
        new = new_name(binding.full)
        is_kept = binding.alias.asname is not None or binding.local in self._names.assigned
        if new is None or is_kept or not self._is_free(new):
            return binding.local
        return new.name

    def _is_free(self, new: New) -> bool:
        """Whether a file binds a name to nothing else."""
        same = (f"{new.module}.{new.name}", f"typing.{new.name}")
        bound = new.name in self._names.bound and self._names.others.get(new.name) not in same
        ours = self._names.bindings.get(new.name)
        return not bound and (ours is None or new_name(ours.full) == new)

    # ------------------------------------------------------------------ the statements

    def finish(self, tree: ast.Module) -> list[tuple[int, str]]:
        """Write the imports anew, when all uses are known.

        Returns:
            Line of what is still imported of Lightning, and what has to be thought about there.
        """
        left: list[tuple[int, str]] = []
        for block in _blocks(tree) if self._names.every else ():
            written: set[str] = set()
            for run in self._runs(block):
                lines = self._lines(run, written, left)
                start, end = self._source.span(run[0])[0], self._source.span(run[-1])[1]
                if not lines and len(block) > len(run) and self._is_alone(start, end):
                    self._source.replace(self._source.line_start(start), self._source.line_end(end - 1), "")
                else:
                    text = f"{self._source.newline}{self._source.indent(start)}".join(lines or ["import lumen"])
                    if text != self._source.text[start:end]:
                        self._source.replace(start, end, text)
        return left

    def _is_alone(self, start: int, end: int) -> bool:
        """Whether nothing else stands on the lines of a piece, but for comments."""
        before = self._source.text[self._source.line_start(start) : start]
        behind = self._source.text[end : self._source.line_end(end - 1)].strip()
        return not before.strip() and (not behind or behind.startswith("#"))

    def _runs(self, block: list[ast.stmt]) -> Iterator[list[ast.Import | ast.ImportFrom]]:
        """Imports of Lightning that follow each other without a comment."""
        run: list[ast.Import | ast.ImportFrom] = []
        for statement in block:
            if not self._is_ours(statement):
                continue
            assert isinstance(statement, ast.Import | ast.ImportFrom)
            if run and not self._belongs_to(statement, run[-1], block):
                yield run
                run = []
            run.append(statement)
        if run:
            yield run

    def _belongs_to(
        self, statement: ast.Import | ast.ImportFrom, before: ast.Import | ast.ImportFrom, block: list[ast.stmt]
    ) -> bool:
        """Whether two imports can be one."""
        return block[block.index(before) + 1] is statement and not self._comments([before, statement])

    def _is_ours(self, statement: ast.stmt) -> bool:
        return any(binding.statement is statement for binding in self._names.every)

    def _lines(
        self, run: list[ast.Import | ast.ImportFrom], written: set[str], left: list[tuple[int, str]]
    ) -> list[str]:
        """The new imports in place of some."""
        plain: list[str] = []
        of_modules: defaultdict[str, list[str]] = defaultdict(list)
        bindings = {id(binding.alias): binding for binding in self._names.every}

        def need(new: New, local: str) -> None:
            if self._names.others.get(local) in (f"{new.module}.{new.name}", f"typing.{new.name}"):
                return
            of_modules[new.module].append(new.name if local == new.name else f"{new.name} as {local}")

        for statement in run:
            for alias in statement.names:
                binding = bindings.get(id(alias))
                if binding is None:
                    plain.append(_text(alias))
                    continue
                new, of_module = new_name(binding.full), is_module(binding.full)
                is_unclear = binding.local in self._names.unclear
                if new is not None and not of_module and not is_unclear:
                    need(new, self._local(binding))
                    wanted = self._wanted[binding]
                elif not of_module or is_unclear or binding in self._kept:
                    said = _UNCLEAR if is_unclear else f"{short_name(binding.full)}: {instead_of(binding.full)}"
                    left.append((statement.lineno, said.format(binding.local)))
                    if isinstance(statement, ast.Import):
                        plain.append(_text(alias))
                    else:
                        of_modules[statement.module or ""].append(_text(alias))
                    wanted = self._wanted[binding]
                else:
                    wanted = self._wanted[binding] or ([New("lumen", "")] if of_module else [])
                for each in dict.fromkeys(wanted):
                    if each.module != "lumen":
                        need(each, each.name if self._is_free(each) else f"_{each.name}")
                    elif "lumen" not in self._names.others:
                        plain.append("lumen" if self._package == "lumen" else f"lumen as {self._package}")
        lines = [f"import {each}" for each in plain]
        comments = self._comments(run)
        for module, several in of_modules.items():
            fresh = [each for each in dict.fromkeys(several) if f"{module}.{each}" not in written]
            written.update(f"{module}.{each}" for each in fresh)
            if fresh:
                lines.append(f"from {module} import {', '.join(fresh)}")
        fresh_lines = [line for line in dict.fromkeys(lines) if line not in written]
        written.update(fresh_lines)
        return [*comments, *fresh_lines]

    def _comments(self, run: list[ast.Import | ast.ImportFrom]) -> list[str]:
        return COMMENT.findall(self._source.text[self._source.span(run[0])[0] : self._source.span(run[-1])[1]])


def _text(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """All lists of statements."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block
