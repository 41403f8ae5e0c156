"""Descriptions of arguments, attributes, results and errors: each one has a meaning alone."""

import ast
import re
from pathlib import Path

import pytest

import lumen

ROOT = Path(lumen.__file__).parent
SECTION = re.compile(r"^( *)(Args|Attributes|Returns|Yields|Raises):$")
NAMED = re.compile(r"^(\w+): (.*)", re.DOTALL)
FEWEST_WORDS = 3
#: Begin of a description that refers to a missing noun: "Of the run.", "It cannot.", "As given."
DANGLING = {
    "as",
    "by",
    "for",
    "from",
    "in",
    "it",
    "its",
    "of",
    "some",
    "theirs",
    "them",
    "they",
    "what",
    "whose",
    "with",
}
FEWEST_WORDS_OF_DANGLING = 5
ARTICLES = {"a", "an", "the", "its", "this", "that", "of", "to"}


def iterate_entries(docstring):
    """Return (section, name, description) of every entry in the sections of a docstring in Google's style."""
    lines, section, found = docstring.splitlines(), None, []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if match := SECTION.match(line):
            section, outer = match[2], len(match[1])
        elif section and line.strip():
            if indent <= outer:
                section = None
            elif indent == outer + 4 and (section in ("Args", "Attributes", "Raises") or not started(found, section)):
                found.append([section, line.strip()])
            elif not started(found, section):
                found.append([section, ""])
            else:
                found[-1][1] += " " + line.strip()
    for section, text in found:
        named = NAMED.match(text) if section not in ("Returns", "Yields") else None
        yield (section, *((named[1], named[2]) if named else ("", text)))


def started(found, section):
    return bool(found) and found[-1][0] == section


def find_fault(name, description):
    """Return why a description has no meaning, or None."""
    words = re.findall(r"[\w'.*/+-]+", description)
    sentence = re.findall(r"\w+", re.split(r"[.;:](?: |$)", description)[0].lower())
    if len(words) < FEWEST_WORDS:  # also an entry with another indentation than the others
        return "too short"
    if len(words) < FEWEST_WORDS_OF_DANGLING and words[0].lower().rstrip(".") in DANGLING:
        return "says of what it does not name"
    if set(sentence) - ARTICLES <= set(name.lower().split("_")) and len(sentence) == len(words):
        return "repeats the name"
    return None


@pytest.mark.parametrize(
    "stub",
    [
        ("task", "Whose."), ("checkpoint", "What with."), ("how", "As given."), ("seed", "Of the run."),
        ("optimizer", "It."), ("ConfigError", "It cannot."), ("path", "The path."), ("names", "Theirs."),
        ("model_name", "The name of the model."), ("device", "Of this process."), ("NonFiniteLoss", "Names them."),
    ],
)  # fmt: skip
def test_a_stub_is_found(stub):
    assert find_fault(*stub) is not None


@pytest.mark.parametrize(
    "entry",
    [
        ("seed", "The run's seed, which keys everything random."), ("k", "Fast steps for each slow step, at least 1."),
        ("epoch", "Epochs completed by now."), ("ConfigError", "The setting has an unknown option."),
    ],
)  # fmt: skip
def test_a_description_is_none(entry):
    assert find_fault(*entry) is None


def test_entries_are_read_as_they_are_written():
    docstring = """Do it.

        Args:
            one: First line
                and second.
            two: Another: with a colon.

        Returns:
            What
            it is.
        """
    assert list(iterate_entries(docstring)) == [
        ("Args", "one", "First line and second."),
        ("Args", "two", "Another: with a colon."),
        ("Returns", "", "What it is."),
    ]


def test_every_description_says_something():
    found, seen = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                for section, name, description in iterate_entries(ast.get_docstring(node, clean=True) or ""):
                    seen += 1
                    if why := find_fault(name, description):
                        place = f"{path.relative_to(ROOT)}:{node.lineno if not isinstance(node, ast.Module) else 1}"
                        found.append(f"{place} {section} {name}: {description} ({why})")
    assert seen > 900
    assert not found, "\n".join(found)
