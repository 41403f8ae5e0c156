"""Edits of a source text in place, which keep comments and layout."""

from __future__ import annotations

import ast
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, final


def read_tables(name: str) -> Mapping[str, Any]:
    """Return the tables of a file in this folder."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


TABLES = read_tables("tables")
NOTES: Mapping[str, str] = TABLES["notes"]
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
AddNote = Callable[[ast.AST, str], None]  # adds a sentence on a node
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMMENT = re.compile(r"#[^\r\n]*")


def get_last_name(node: ast.AST) -> str:
    """Return the last part of a name or an attribute, or an empty string for other nodes."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


@final
class MigrationNote(NamedTuple):
    """Note on a line that the user has to check."""

    line: int
    sentence: str


@final
class EditableSource:
    """Text and the edits to make in it.

    Args:
        text: The text, with its line ends as they are in the file.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [line for line in _LINE.findall(text) if line]
        self._starts = [0, *accumulate(map(len, self.lines))]
        self._edits: dict[tuple[int, int, str], None] = {}  # start offset, end offset and the new text

    def get_span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end offsets of a node of Python's syntax tree."""
        return (
            self._get_offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._get_offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def get_text(self, node: ast.AST) -> str:
        """Return the text of a node, with the edits made so far within the node."""
        return self.apply_edits(*self.get_span(node))

    def get_line_number(self, offset: int) -> int:
        """Return the number of the line with an offset, starting from 1."""
        return max(1, bisect_left(self._starts, offset + 1))

    def find_line_start(self, offset: int) -> int:
        """Return the offset at which the line with an offset begins."""
        return self._starts[self.get_line_number(offset) - 1]

    def find_line_end(self, offset: int) -> int:
        """Return the offset at which the next line begins."""
        return self._starts[self.get_line_number(offset)] if self.lines else 0

    def get_indent(self, offset: int) -> str:
        """Return the indentation of the line with an offset."""
        line = self.lines[self.get_line_number(offset) - 1]
        return str(line[: len(line) - len(line.lstrip(" \t\f"))])

    @property
    def newline(self) -> str:
        """Line ending of the text."""
        first = self.lines[0] if self.lines else ""
        return first[len(first.rstrip("\r\n")) :] or "\n"

    def replace(self, start: int, end: int, text: str) -> None:
        """Replace a span by a text. An edit of a larger span overrides the edits within the span."""
        self._edits[start, end, text] = None

    def replace_node(self, node: ast.AST, text: str) -> None:
        """Replace a node by a text."""
        self.replace(*self.get_span(node), text)

    def remove_statement(self, node: ast.AST) -> None:
        """Remove the lines of a statement, and one of the empty lines around it if both sides have one."""
        start, end = self.get_span(node)
        start, end = self.find_line_start(start), self.find_line_end(end - 1)
        if self.text[:start].endswith(self.newline * 2) and self.text[end:].startswith(self.newline):
            end += len(self.newline)
        self.replace(start, end, "")

    def is_replaced(self, start: int, end: int) -> bool:
        """Return True if an edit of a larger span overrides the edits within a span."""
        return any(first <= start and end <= last and (first, last) != (start, end) for first, last, _ in self._edits)

    def apply_edits(self, first: int = 0, last: int | None = None) -> str:
        """Return the text between two offsets, by default all of it, with the edits there."""
        parts, at, last = [], first, len(self.text) if last is None else last
        for start, end, text in sorted(self._edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
            if start >= at and end <= last:
                parts += [self.text[at:start], text]
                at = end
        return "".join([*parts, self.text[at:last]])

    def _get_offset(self, line: int, column: int) -> int:
        """Return the offset of a line and a column. The syntax tree counts columns in UTF-8 bytes."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        behind = column if text.isascii() else len(text.encode()[:column].decode())
        return self._starts[line - 1] + behind


@final
class SourceItem(NamedTuple):
    """Argument of a call, or entry of a dictionary literal.

    Attributes:
        name: Name of the argument or entry, or None if it is positional or unpacked.
        value: The expression of the value.
        start: Offset of the beginning, including the name.
        end: Offset of the end, without the comma.
        comma: Offset of the end with the comma, or `end`.
        named: Start and end offsets of the name, or of the first node of an item without a name.
    """

    name: str | None
    value: ast.expr
    start: int
    end: int
    comma: int
    named: tuple[int, int]


@final
class ItemEditor:
    """Arguments of a call or entries of a dictionary, which can be removed, renamed and added.

    Args:
        source: The text of the file.
        node: The call or the dictionary.
    """

    def __init__(self, source: EditableSource, node: ast.Call | ast.Dict) -> None:
        self._source = source
        self.is_call = isinstance(node, ast.Call)
        begin = source.get_span(node.func)[1] if isinstance(node, ast.Call) else source.get_span(node)[0]
        self.open, self.close = source.text.index("(" if self.is_call else "{", begin) + 1, source.get_span(node)[1] - 1
        self.all: list[SourceItem] = []
        self._removed: set[int] = set()
        self._added = ""
        items = _list_call_items(node) if isinstance(node, ast.Call) else _list_dictionary_items(node)
        places = pairwise([*(source.get_span(first)[0] for _, first, _ in items), self.close])
        at = self.open
        for (name, first, value), (begin, following) in zip(items, places, strict=True):
            before = _blank_comments(source.text[at:begin])  # This includes parentheses around a value.
            start, end = (
                at + len(before) - len(before.lstrip()),
                max(source.get_span(first)[1], source.get_span(value)[1]),
            )
            behind, comma, _ = _blank_comments(source.text[end:following]).partition(",")
            at = end + len(behind + comma) if comma else end + len(behind.rstrip())
            end = min(end + len(behind.rstrip()), self.close)
            self.all.append(
                SourceItem(name, value, start, end, at if comma else end, self._find_name_span(name, first))
            )

    def _find_name_span(self, name: str | None, first: ast.AST) -> tuple[int, int]:
        start, end = self._source.get_span(first)
        return (start, start + len(name)) if self.is_call and name is not None else (start, end)

    def rename(self, item: SourceItem, name: str) -> None:
        """Rename an argument or entry."""
        self._source.replace(*item.named, self.format_name(name).removesuffix("=").removesuffix(": "))

    def format_name(self, name: str) -> str:
        """Return a name in the form that precedes its value, such as `name=`."""
        if self.is_call:
            return f"{name}="
        quote = next((self._source.text[each.start] for each in self.all if each.name is not None), '"')
        return f"{quote}{name}{quote}: "

    def remove(self, item: SourceItem) -> None:
        """Remove an argument or entry."""
        self._removed.add(self.all.index(item))

    def add(self, text: str) -> None:
        """Append one argument or entry."""
        self._added = text

    def apply_edits(self) -> None:
        """Make the edits. Call this once, after all other methods."""
        kept = [number for number in range(len(self.all)) if number not in self._removed]
        if self._removed and not kept:
            self._source.replace(self.open, self.close, self._added)
            return
        for _, run in groupby(sorted(self._removed), key=lambda number: number - sorted(self._removed).index(number)):
            self._remove_neighbours([*run])
        if self._added:
            self._add_items()

    def _remove_neighbours(self, run: list[int]) -> None:
        """Remove neighbouring items."""
        source, first, last = self._source, self.all[run[0]], self.all[run[-1]]
        rest = source.text[last.comma : source.find_line_end(last.comma - 1)].split("#")[0]
        starts_line = not source.text[source.find_line_start(first.start) : first.start].strip()
        if starts_line and not rest.strip():  # The items have their own lines; trailing comments are removed too.
            source.replace(source.find_line_start(first.start), source.find_line_end(last.comma - 1), "")
        elif run[0] == 0 or (run[-1] + 1 < len(self.all) and (starts_line or rest.strip())):
            source.replace(first.start, self.all[run[-1] + 1].start, "")
        else:
            before = self.all[run[0] - 1]
            start = before.end if last.comma == last.end else before.comma
            source.replace(first.start if "#" in source.text[start : first.start] else start, last.comma, "")

    def _add_items(self) -> None:
        source, last = self._source, self.all[-1] if self.all else None
        if last is None:
            source.replace(self.open, self.open, self._added)
        elif not source.text[source.find_line_start(last.start) : last.start].strip():
            text = f"{source.newline}{source.get_indent(last.start)}{self._added}"
            source.replace(last.comma, last.comma, f"{text}," if last.comma > last.end else f",{text}")
        else:
            source.replace(last.end, last.end, f", {self._added}")


def _list_dictionary_items(node: ast.Dict) -> list[tuple[str | None, ast.AST, ast.expr]]:
    """Return name, first node and value of each entry, in order."""
    names = [key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None for key in node.keys]
    return [(name, key or value, value) for name, key, value in zip(names, node.keys, node.values, strict=True)]


def _list_call_items(node: ast.Call) -> list[tuple[str | None, ast.AST, ast.expr]]:
    """Return name, first node and value of each argument, in the order of the text."""
    positional = [(None, value, value) for value in node.args]
    named = [(each.arg, each, each.value) for each in node.keywords]
    return sorted([*positional, *named], key=lambda each: (each[2].lineno, each[2].col_offset))


def _blank_comments(text: str) -> str:
    """Return the text between expressions, with spaces in place of comments and backslashes."""
    return COMMENT.sub(lambda comment: " " * len(comment[0]), text).replace("\\", " ")
