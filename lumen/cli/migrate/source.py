"""A text whose pieces are replaced where they stand, so that comments and layout stay as their author made them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple, final

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_OPENING = (tokenize.LPAR, tokenize.LSQB, tokenize.LBRACE)
_CLOSING = (tokenize.RPAR, tokenize.RSQB, tokenize.RBRACE)
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@final
class Edit(NamedTuple):
    """A piece of a text, from one character to another, and what comes in its place."""

    start: int
    end: int
    text: str


@final
class Token(NamedTuple):
    """A token of Python, by its place in the text."""

    kind: int
    text: str
    start: int
    end: int


@final
class Source:
    """A text and the edits that are wanted of it.

    Args:
        text: The text, with its line ends as they are in the file.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [line for line in _LINE.findall(text) if line]
        self._starts = [0, *accumulate(map(len, self.lines))]
        self._edits: list[Edit] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node of Python's syntax tree begins and ends."""
        return (
            self._offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def line_of(self, offset: int) -> int:
        """The number of the line that a character is in, from 1 on."""
        return max(1, bisect_left(self._starts, offset + 1))

    def line_start(self, offset: int) -> int:
        """Where the line begins that a character is in."""
        return self._starts[self.line_of(offset) - 1]

    def line_end(self, offset: int) -> int:
        """Where the next line begins."""
        return self._starts[self.line_of(offset)] if self.lines else 0

    def indent(self, offset: int) -> str:
        """The blanks that a line begins with."""
        line = self.lines[self.line_of(offset) - 1]
        return str(line[: len(line) - len(line.lstrip(" \t\f"))])

    @property
    def newline(self) -> str:
        """How its lines end."""
        first = self.lines[0] if self.lines else ""
        return first[len(first.rstrip("\r\n")) :] or "\n"

    @cached_property
    def tokens(self) -> list[Token]:
        """The tokens of Python in it."""
        reading = io.StringIO(self.text, newline="").readline
        return [
            Token(each.exact_type, each.string, self._starts[each.start[0] - 1] + each.start[1],
                  self._starts[min(each.end[0], len(self._starts)) - 1] + each.end[1])
            for each in tokenize.generate_tokens(reading)
        ]  # fmt: skip

    def tokens_from(self, offset: int) -> Iterator[Token]:
        """The tokens that begin at a character or after it."""
        first = bisect_left(self.tokens, offset, key=lambda token: token.start)
        yield from self.tokens[first:]

    def has_comment(self, start: int, end: int) -> bool:
        """Whether there is a comment of Python's in a piece."""
        within = (token for token in self.tokens_from(start) if token.start < end)
        return any(token.kind == tokenize.COMMENT for token in within)

    def replace(self, start: int, end: int, text: str) -> None:
        """Put a text in the place of a piece. An edit of a larger piece takes the place of those within it."""
        self._edits.append(Edit(start, end, text))

    def replace_node(self, node: ast.AST, text: str) -> None:
        """Put a text in the place of a node."""
        self.replace(*self.span(node), text)

    def is_removed(self, offset: int) -> bool:
        """Whether an edit leaves out the piece that a character is in."""
        return any(edit.start <= offset < edit.end and not edit.text.strip() for edit in self._edits)

    def edited(self) -> str:
        """The text with all edits."""
        parts, at = [], 0
        for edit in sorted(dict.fromkeys(self._edits), key=lambda edit: (edit.start, edit.end > edit.start, -edit.end)):
            if edit.start >= at:
                parts += [self.text[at : edit.start], edit.text]
                at = edit.end
        return "".join([*parts, self.text[at:]])

    def _offset(self, line: int, column: int) -> int:
        """The character that a line and a column stand for; the syntax tree counts columns in bytes of UTF-8."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        behind = column if text.isascii() else len(text.encode()[:column].decode())
        return self._starts[line - 1] + behind


@final
class Item(NamedTuple):
    """An argument of a call, or an entry of a dictionary that is written out.

    Attributes:
        name: Of the argument or entry; None for a positional one, and for what is unpacked.
        value: The expression that it is given.
        start: Where it begins, with its name.
        end: Where it ends, without the comma.
        comma: Where it ends with its comma, or `end`.
        named: Where its name is; empty for one without.
    """

    name: str | None
    value: ast.expr
    start: int
    end: int
    comma: int
    named: tuple[int, int]


@final
class Items:
    """The arguments of a call or the entries of a dictionary, to be taken out, renamed and added.

    Args:
        source: The text of the file.
        node: The call or the dictionary.
    """

    def __init__(self, source: Source, node: ast.Call | ast.Dict) -> None:
        self._source = source
        self.is_call = isinstance(node, ast.Call)
        begin = source.span(node.func)[1] if isinstance(node, ast.Call) else source.span(node)[0]
        tokens = source.tokens_from(begin)
        self.open = next(token.end for token in tokens if token.kind in _OPENING)
        given = _given(node)
        segments, self.close = _segments(tokens, [source.span(value) for _, value in given])
        self.all = [
            Item(name, value, first.start, last.end, comma or last.end, self._named(name, first))
            for (name, value), (first, last, comma) in zip(given, segments, strict=True)
        ]
        self._gone: set[int] = set()
        self._added: list[str] = []

    def _named(self, name: str | None, first: Token) -> tuple[int, int]:
        return (first.start, first.start if name is None else first.end)

    def rename(self, item: Item, name: str) -> None:
        """Give an argument or entry another name."""
        self._source.replace(*item.named, self.name_of(name).removesuffix("=").removesuffix(": "))

    def name_of(self, name: str) -> str:
        """A name as it stands before its value."""
        if self.is_call:
            return f"{name}="
        quote = next((self._source.text[each.start] for each in self.all if each.name is not None), '"')
        return f"{quote}{name}{quote}: "

    def remove(self, item: Item) -> None:
        """Take an argument or entry out."""
        self._gone.add(self.all.index(item))

    def add(self, text: str) -> None:
        """Put an argument or entry behind the others."""
        self._added.append(text)

    def finish(self) -> None:
        """Make the edits. To be called once, when all is said."""
        kept = [number for number in range(len(self.all)) if number not in self._gone]
        if self._gone and not kept:
            self._source.replace(self.open, self.close, ", ".join(self._added))
            return
        for _, run in groupby(sorted(self._gone), key=lambda number: number - sorted(self._gone).index(number)):
            self._remove_run([*run])
        if self._added:
            self._add()

    def _remove_run(self, run: list[int]) -> None:
        """Take out neighbours."""
        source, first, last = self._source, self.all[run[0]], self.all[run[-1]]
        rest = source.text[last.comma : source.line_end(last.comma - 1)].split("#")[0]
        begins = not source.text[source.line_start(first.start) : first.start].strip()
        if begins and not rest.strip():  # lines of their own, with the comments behind them
            source.replace(source.line_start(first.start), source.line_end(last.comma - 1), "")
        elif run[0] == 0 or (run[-1] + 1 < len(self.all) and (begins or rest.strip())):
            source.replace(first.start, self.all[run[-1] + 1].start, "")
        else:
            before = self.all[run[0] - 1]
            start = before.end if last.comma == last.end else before.comma
            source.replace(first.start if source.has_comment(start, first.start) else start, last.comma, "")

    def _add(self) -> None:
        source, last = self._source, self.all[-1] if self.all else None
        text = ", ".join(self._added)
        if last is None:
            source.replace(self.open, self.open, text)
            return
        if not source.text[source.line_start(last.start) : last.start].strip():
            between, end = f"{source.newline}{source.indent(last.start)}", "," if last.comma > last.end else ""
            source.replace(
                last.comma, last.comma, "".join(f"{'' if end else ','}{between}{each}{end}" for each in self._added)
            )
        else:
            source.replace(last.end, last.end, f", {text}")


def _given(node: ast.Call | ast.Dict) -> list[tuple[str | None, ast.expr]]:
    """Names and values in the order in which they are written."""
    if isinstance(node, ast.Dict):
        names = [
            key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None for key in node.keys
        ]
        return [*zip(names, node.values, strict=True)]
    both: Iterable[tuple[str | None, ast.expr]] = [
        *((None, value) for value in node.args), *((each.arg, each.value) for each in node.keywords)
    ]  # fmt: skip
    return sorted(both, key=lambda each: (each[1].lineno, each[1].col_offset))


def _segments(
    tokens: Iterator[Token], values: list[tuple[int, int]]
) -> tuple[list[tuple[Token, Token, int | None]], int]:
    """First and last token of what commas divide, up to the bracket that closes it; and where that is."""
    found: list[tuple[Token, Token, int | None]] = []
    depth, first, last = 0, None, None
    for token in tokens:
        if token.kind in _NO_CODE:
            continue
        ends = token.kind == tokenize.COMMA and not any(start < token.start < end for start, end in values)
        if depth == 0 and (token.kind in _CLOSING or ends):
            if first is not None and last is not None:
                found.append((first, last, token.end if ends else None))
            if not ends:
                return found, token.start
            first = last = None
            continue
        depth += (token.kind in _OPENING) - (token.kind in _CLOSING)
        first, last = first or token, token
    raise AssertionError("a bracket without its end has no syntax tree")
