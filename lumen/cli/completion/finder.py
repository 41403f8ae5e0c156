"""argcomplete, which knows how shells split words and quote them."""

from __future__ import annotations

from typing import final

from argcomplete.finders import CompletionFinder
from argcomplete.lexers import split_line


@final
class Finder(CompletionFinder):
    """Finds what may stand at the cursor."""

    def filter_completions(self, completions: list[str]) -> list[str]:
        """Each once; with no description where argcomplete has None, which zsh would show."""
        for each in completions:
            self._display_completions.setdefault(each, "")
        return super().filter_completions(completions)


def split(line: str) -> tuple[list[str], str]:
    """The words of a line before the one at its end, and that one, as far as it is typed."""
    _, current, _, words, _ = split_line(line, len(line))
    return words, current
