"""Style of Lumen: avoided words, first words of docstrings and arguments, lengths of lines, cells and names.

`CONTRIBUTING.md` has the rules.
"""

import ast
import io
import re
import tokenize

import pytest

from tests.helpers import ROOT

AVOIDED = re.compile(
    r"\b(told|hears?|wish(?:es)?|anew|beside|as ever|for nothing|goes on|kin|kept pace|lent|dealt|whose turn|"
    r"another one|(?-i:there is none|is none)|of one's own|to the letter|those (?:that|of))\b",
    re.IGNORECASE,
)
PRIVATE_WORDS = {
    "told", "tell", "tells", "hear", "hears", "agree", "agrees", "apart", "beside", "anew", "lent", "dealt", "whose",
    "wish", "wishes", "kin",
}  # fmt: skip
BEGINNINGS = re.compile(
    r"(What|Whether|Which|Who|Whose|Where|When|How|If|It|Its|This|That|These|Those|They|As|At|By|For|From|In|Of|On|To|"
    r"With|Without|Under|Until|Beside|Below|Above|Before|After)\b"
)
FIRST_WORDS = re.compile(r"(What|Whether|Which|Those|It|As|See)\b")
MOST_LINE, MOST_CELL, MOST_SENTENCE, MOST_NAME = 100, 15, 30, 8
#: Share of the descriptions of arguments that may begin with a pronoun or a preposition.
MOST_BEGINNINGS = 0.02

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
}
ROOMS = sorted({path.relative_to(ROOT / "lumen").parts[0] for path in (ROOT / "lumen").rglob("*.py")})
FOLDERS = [
    "conftest.py",
    "helpers",
    "unit",
    "fit",
    "distributed",
    "system",
    "promises",
    "ecosystem",
    "hydra",
    "installed",
]


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


def list_modules(place):
    """Return the Python files of a package, of one file, or of a folder, without templates and projects of users."""
    paths = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [path for path in paths if not {"templates", "projects"} & {*path.parts}]


def iterate_docstrings(tree):
    """Yield (line, docstring) of the module, its classes and its functions."""
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def find_docstring_faults(source):
    """Return every docstring that begins with an avoided word."""
    found = ((line, text.lstrip("`*\"' ").splitlines()[0]) for line, text in iterate_docstrings(ast.parse(source)))
    return [f"{line}: {text[:60]}" for line, text in found if FIRST_WORDS.match(text)]


def find_avoided_words(source, *, in_docstrings=False):
    """Return every avoided word in the comments and in the messages or, of tests, in the docstrings."""
    tree = ast.parse(source)
    lines = {line for line, _ in iterate_docstrings(tree)}
    texts = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if (node.lineno in lines) == in_docstrings
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string[1:]) for token in tokens if token.type == tokenize.COMMENT]
    words = [(line, word) for line, text in texts for word in AVOIDED.findall(re.sub("`[^`\\n]*`", "", text))]
    return [f"{line}: {word!r}" for line, word in sorted(words)]


def find_name_faults(source):
    """Return every name of a function, class, parameter, variable or attribute with a private word."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            found.add((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add((node.lineno, node.attr))
    return [f"{line}: {name}" for line, name in sorted(found) if PRIVATE_WORDS & {*re.findall("[a-z]+", name.lower())}]


def list_arguments(source):
    """Return the description of every argument in the docstrings."""
    sections = [re.split(r"^Args:\n", text, flags=re.M)[1:] for _, text in iterate_docstrings(ast.parse(source))]
    bodies = [re.split(r"^\S", section[0], maxsplit=1, flags=re.M)[0] for section in sections if section]
    return [text for body in bodies for text in re.findall(r"^    \*{0,2}\w+(?: \([^)]*\))?: (.*)", body, re.M)]


def find_argument_faults(source):
    """Return every description of an argument that begins with a pronoun or a preposition."""
    return [text for text in list_arguments(source) if BEGINNINGS.match(text)]


def find_faults(find, place, **options):
    """Return the faults that a function finds in the files of a place, with the names of the files."""
    return [f"{path.name}:{fault}" for path in list_modules(place) for fault in find(path.read_text(), **options)]


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
    assert find_faults(find_docstring_faults, ROOT / "lumen" / room) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_tests_keep_the_rules(folder):
    place = ROOT / "tests" / folder
    assert find_faults(find_docstring_faults, place) == []
    assert find_faults(find_avoided_words, place, in_docstrings=True) == []


@pytest.mark.parametrize("room", ROOMS)
def test_messages_and_comments_avoid_private_words(room):
    assert find_faults(find_avoided_words, ROOT / "lumen" / room) == []


@pytest.mark.parametrize("room", ROOMS)
def test_names_avoid_private_words(room):
    assert find_faults(find_name_faults, ROOT / "lumen" / room) == []


def test_descriptions_of_arguments_begin_with_nouns():
    count = sum(len(list_arguments(path.read_text())) for path in list_modules(ROOT / "lumen"))
    found = find_faults(find_argument_faults, ROOT / "lumen")
    assert len(found) <= MOST_BEGINNINGS * count, "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS[2:])
def test_names_of_tests_are_short(folder):
    assert find_long_test_names(folder) == []


def test_faults_are_found():
    assert find_page_faults("It goes on beside.") == ["1: 'goes on'", "1: 'beside'"]
    assert find_page_faults("```\nbeside\n```\n`anew` [a](anew.md)") == []
    assert find_page_faults("| a | " + "word " * 16 + "|") == ["1: a cell of 16 words"]
    assert find_page_faults("word " * 31)[-1].startswith("a sentence of 31 words")
    assert find_docstring_faults('"""See x."""\ndef f():\n    """Return x, as told."""') == ["1: See x."]
    source = 'def f():\n    """Return x, as told."""\n    raise E("Go on beside.")  # or anew'
    assert find_avoided_words(source) == ["3: 'anew'", "3: 'beside'"]
    assert find_avoided_words(source, in_docstrings=True) == ["2: 'told'", "3: 'anew'"]
    assert find_name_faults("def tell_all(wishes, kindle): self.is_apart = retold = 1") == [
        "1: is_apart", "1: tell_all", "1: wishes",
    ]  # fmt: skip
    source = '"""X.\n\nArgs:\n    a: Of the run.\n    b (int): The run.\n\nReturns:\n    c: It.\n"""'
    assert (list_arguments(source), find_argument_faults(source)) == (["Of the run.", "The run."], ["Of the run."])
