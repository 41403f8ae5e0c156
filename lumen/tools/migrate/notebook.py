"""Code of a Jupyter notebook as one Python text, and back."""

from __future__ import annotations

import ast
import json
import re
from itertools import product
from typing import Any, final

#: Comment before the code of each cell.
CELL = "# lumen-migrate: cell"
_COMMAND = "pass  # lumen-migrate: "
_COMMAND_LINE = re.compile(r"^([ \t]*)([%!?].*)$", re.M)
_MARKED_LINE = re.compile(rf"^([ \t]*){re.escape(_COMMAND)}(.*)$", re.M)
_LAYOUTS = [*product((1, 2, 4, None), (False, True), ("\n", ""))]


@final
class Notebook:
    """Notebook whose file can be written again without a difference.

    Args:
        text: Contents of the file.

    Attributes:
        code: The Python code of all cells, each after a comment. Commands of IPython are comments too.

    Raises:
        ValueError: The text is not a notebook of format 4, or has a layout that Jupyter does not write.
    """

    def __init__(self, text: str) -> None:
        self._content = json.loads(text)
        cells = self._content.get("cells") if isinstance(self._content, dict) else None
        if not isinstance(cells, list) or not all(isinstance(each, dict) and "source" in each for each in cells):
            raise ValueError("not a notebook of format 4")
        found = next((each for each in _LAYOUTS if self._format(each) == text), None)
        if found is None:
            raise ValueError("not in the layout that Jupyter writes")
        self._layout, self._cells = found, [cell for cell in cells if _is_python(cell)]
        self.code = "".join(f"{CELL}\n{_read_source(cell)}\n" for cell in self._cells)

    def find_cell(self, line: int) -> int:
        """Return the number, from 1, of the cell that contains a line of the code."""
        cell = self._cells[self.code.split("\n")[:line].count(CELL) - 1]
        return next(number for number, each in enumerate(self._content["cells"], 1) if each is cell)

    def write(self, code: str) -> str:
        """Return the contents of the file with new code."""
        parts = code.split(f"{CELL}\n")[1:]
        for cell, part in zip(self._cells, parts, strict=True):
            source = _MARKED_LINE.sub(r"\1\2", part.removesuffix("\n"))
            cell["source"] = source if isinstance(cell["source"], str) else source.splitlines(keepends=True)
        return self._format(self._layout)

    def _format(self, layout: tuple[int | None, bool, str]) -> str:
        indent, ensure_ascii, end = layout
        return json.dumps(self._content, indent=indent, ensure_ascii=ensure_ascii) + end


def _read_source(cell: dict[str, Any]) -> str:
    """Return the code of a cell, with comments in place of IPython's commands."""
    return _COMMAND_LINE.sub(rf"\1{_COMMAND}\2", "".join(cell["source"]))


def _is_python(cell: dict[str, Any]) -> bool:
    """Return True if a cell has Python code."""
    if cell.get("cell_type") != "code" or "".join(cell["source"]).startswith("%%"):
        return False
    try:
        ast.parse(_read_source(cell))
    except (SyntaxError, ValueError):
        return False
    return True
