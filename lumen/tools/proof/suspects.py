"""Lines of a user's source that draw what no key decides: entropy of the system, the clock, generators of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, final

_ALWAYS = {
    "os.urandom", "os.getrandom", "os.getpid", "uuid.uuid1", "uuid.uuid4", "time.time", "time.time_ns",
    "time.monotonic", "time.perf_counter", "time.process_time", "datetime.now", "datetime.datetime.now",
    "random.SystemRandom", "SystemRandom", "torch.seed", "torch.initial_seed", "torch.Generator", "Generator",
}  # fmt: skip
_WITHOUT_SEED = {
    "default_rng", "np.random.default_rng", "numpy.random.default_rng", "random.Random", "Random",
    "np.random.RandomState", "numpy.random.RandomState", "np.random.seed", "random.seed", "np.random.SeedSequence",
}  # fmt: skip
SETS = "a set, whose order is another one in each interpreter"


@final
class Suspect(NamedTuple):
    """A line that may be why.

    Attributes:
        file: Where it is.
        line: Number of the line.
        what: The function that it calls.
    """

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        """As a sentence has it."""
        return f"{self.what}, {self.file}:{self.line}"


def suspects(lines: tuple[str, int, int] | None) -> list[Suspect]:
    """Those between two lines of a file, each once."""
    if lines is None:
        return []
    file, first, last = lines
    return [each for each in _all(file) if first <= each.line <= last]


@lru_cache(maxsize=64)
def _all(file: str) -> tuple[Suspect, ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(sorted({*_in(tree, file)}, key=lambda each: each.line))


def _in(tree: ast.AST, file: str) -> Iterator[Suspect]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_bare = not node.args and not node.keywords
            if name in _ALWAYS or name.startswith("secrets.") or (name in _WITHOUT_SEED and is_bare):
                yield Suspect(file, node.lineno, f"{name}()")
        elif isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            yield Suspect(file, node.iter.lineno, SETS)


def _is_set(node: ast.expr) -> bool:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp) or called
