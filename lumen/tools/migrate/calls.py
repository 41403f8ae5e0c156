"""The edits of the arguments of calls: of Lightning's classes, and of the methods of its trainer and module."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, final

from lumen.tools.migrate.arguments import (
    KEPT,
    UNKNOWN,
    Change,
    change_of,
    change_of_method,
    positions,
    written,
)
from lumen.tools.migrate.source import Item, Items, Source

_LIMITS = {"max_epochs", "max_steps", "max_time", "max_nb_epochs", "fast_dev_run"}
_ENDLESS = 1000  # Lightning's max_epochs where nothing limits a run


@final
class Calls:
    """Edits what calls are given.

    Args:
        source: The text of the file.
        note: Is told a line and what has to be thought about there.
        fits: Somewhere in the project a trainer's `fit` is called.
    """

    def __init__(self, source: Source, note: Callable[[int, str], None], *, fits: bool) -> None:
        self._source, self._note, self._fits = source, note, fits

    def method(self, node: ast.Call, method: str) -> None:
        """Edit the arguments of a method that the trainer, the tuner or the task has."""
        items = Items(self._source, node)
        for item in items.all:
            if item.name is not None:
                self._apply(items, item, change_of_method(method, item.name))
        items.finish()

    def constructor(self, node: ast.Call | ast.Dict, theirs: str, owner: str) -> None:
        """Edit the arguments of a class.

        Args:
            node: The call, or a dictionary of its arguments.
            theirs: The name of Lightning's class.
            owner: That of Lumen's.
        """
        items, shifted = Items(self._source, node), False
        their_order, our_order = positions(theirs, owner)
        for number, item in enumerate(items.all):
            positional = item.name is None and items.is_call and self._source.text[item.start] != "*"
            name = their_order[number] if positional and number < len(their_order) else item.name
            if name is None:
                continue
            change = change_of(owner, name, _literal(item.value))
            moved = positional and (shifted or our_order[number : number + 1] != [name])
            self._apply(items, item, change)
            shifted = shifted or change.arguments is not None
            if moved and change.arguments is None and not change.sentence:
                self._source.replace(item.start, item.start, f"{name}=")
            if owner == "CLI" and name == "trainer_defaults" and isinstance(item.value, ast.Dict):
                self.constructor(item.value, "Trainer", "Trainer")
        is_limited = bool({item.name for item in items.all} & {*_LIMITS, None})
        if owner == "Trainer" and items.is_call and self._fits and not is_limited:
            items.add(f"max_epochs={_ENDLESS}")
        items.finish()

    def _apply(self, items: Items, item: Item, change: Change) -> None:
        if change.sentence:
            self._note(self._source.line_of(item.start), change.sentence)
        if change.arguments is None:
            return
        if not change.arguments:
            items.remove(item)
        elif [*change.arguments.values()] == [KEPT]:
            items.rename(item, next(iter(change.arguments)))
        else:
            texts = [self._source.of(item.value) if value is KEPT else written(value, "python")
                     for value in change.arguments.values()]  # fmt: skip
            parts = [f"{items.name_of(key)}{text}" for key, text in zip(change.arguments, texts, strict=True)]
            before = self._source.text[self._source.line_start(item.start) : item.start]
            between = ", " if before.strip() else f",{self._source.newline}{before}"
            self._source.replace(item.start, item.end, between.join(parts))


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
