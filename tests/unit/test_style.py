"""Style of Lumen: avoided words, first words of docstrings, lengths of lines, cells and names.

`CONTRIBUTING.md` has the rules.
"""

import ast
import re

import pytest

from tests.helpers import ROOT

AVOIDED = re.compile(
    r"\b(told|hears?|wish(?:es)?|anew|beside|as ever|for nothing|goes on|kin|kept pace|lent|dealt|whose turn|"
    r"another one|(?-i:there is none|is none)|of one's own|to the letter|those (?:that|of))\b",
    re.IGNORECASE,
)
FIRST_WORDS = re.compile(r"(What|Whether|Which|Those|It|As|See)\b")
MOST_LINE, MOST_CELL, MOST_SENTENCE, MOST_NAME = 100, 15, 30, 8

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}
ROOMS = sorted({path.relative_to(ROOT / "lumen").parts[0] for path in (ROOT / "lumen").rglob("*.py")})


def strip_code(text):
    """Return the text of a page without blocks of code, code spans and the targets of links."""
    text = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "`CODE`", re.sub(r"\]\([^)]*\)", "]", text))


def find_page_faults(text):
    """Return every place of a page that breaks a rule, with the reason."""
    found = []
    for number, (line, raw) in enumerate(zip(strip_code(text).splitlines(), text.splitlines(), strict=False), 1):
        found += [f"{number}: {word[0]!r}" for word in AVOIDED.finditer(line)]
        if line.startswith("|"):
            cells = [cell for cell in line.strip("| ").split(" | ") if len(cell.split()) > MOST_CELL]
            found += [f"{number}: a cell of {len(cell.split())} words" for cell in cells]
        elif line and len(raw) > MOST_LINE and "](" not in raw:
            found.append(f"{number}: a line of {len(raw)} characters")
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[*\d-]+\.? )", strip_code(text)):
        if not paragraph.lstrip().startswith(("|", "<", "#")):
            sentences = re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))
            found += [f"a sentence of {len(each.split())} words: {each[:60]}" for each in sentences
                      if len(each.split()) > MOST_SENTENCE]  # fmt: skip
    return found


def find_docstring_faults(room):
    """Return every docstring of a package that begins with an avoided word."""
    place = ROOT / "lumen" / room
    found = []
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        if "templates" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                said = (ast.get_docstring(node) or "").lstrip("`*\"' ")
                if FIRST_WORDS.match(said):
                    found.append(f"{path.name}:{node.body[0].lineno}: {said.splitlines()[0][:60]}")
    return found


def find_long_test_names(folder):
    """Return every test of a folder whose name has too many words."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name.startswith("test_") and name.count("_") > MOST_NAME]


@pytest.mark.parametrize("page", PAGES)
def test_pages_keep_the_rules(page):
    found = find_page_faults(PAGES[page])
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_verb_or_noun(room):
    assert find_docstring_faults(room) == []


@pytest.mark.parametrize("folder", ["unit", "fit", "distributed", "system", "promises", "vision"])
def test_names_of_tests_are_short(folder):
    assert find_long_test_names(folder) == []


def test_faults_are_found():
    assert find_page_faults("It goes on beside.") == ["1: 'goes on'", "1: 'beside'"]
    assert find_page_faults("```\nbeside\n```\n`anew` [a](anew.md)") == []
    assert find_page_faults("| a | " + "word " * 16 + "|") == ["1: a cell of 16 words"]
    assert find_page_faults("word " * 31)[-1].startswith("a sentence of 31 words")
