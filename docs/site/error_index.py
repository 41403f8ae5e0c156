"""Collect the messages of all errors that Lumen raises, for the index of errors in the reference."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path

from lumen import errors

FOLDER = Path(errors.__file__).parents[1]
CLASSES = [
    name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, errors.LumenError)
]
GAP = "…"
FEWEST_WORDS = 4


def template(node: ast.expr) -> str:
    """Return the text of a message, with a gap in place of each value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.FormattedValue(value=ast.Constant() | ast.JoinedStr() | ast.IfExp() as value):
            return template(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.IfExp(body=body, orelse=other):
            return max(template(body), template(other), key=len)
    return GAP


def messages_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the class and the template of each error that a file makes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
            text = " ".join(template(node.args[0]).split())
            while GAP * 2 in text:
                text = text.replace(GAP * 2, GAP)
            if sum(word.isalpha() for word in text.split()) >= FEWEST_WORDS:
                yield node.func.id, text


def index() -> dict[str, dict[str, list[str]]]:
    """Return the messages by class and by room of the package, each in alphabetical order."""
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in CLASSES}
    for path in sorted(FOLDER.rglob("*.py")):
        if "templates" not in path.parts:
            room = path.relative_to(FOLDER).parts[0].removesuffix(".py")
            for kind, text in messages_in(path):
                found[kind][room].append(text)
    return {kind: {room: sorted({*texts}) for room, texts in rooms.items()} for kind, rooms in found.items()}


def page(beginning: str) -> str:
    """Return the index as Markdown, below its hand-written beginning."""
    parts = [beginning.rstrip()]
    for kind, rooms in index().items():
        if rooms:
            parts.append(f"## {kind}\n\n{getattr(errors, kind).__doc__.strip()}")
        for room, texts in rooms.items():
            rows = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
            parts.append(f"Raised in `lumen.{room}`:\n\n<ul>\n{rows}\n</ul>")
    return "\n\n".join(parts) + "\n"
