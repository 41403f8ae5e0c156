"""Pages for contributors: their statements match the code."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import lumen
from lumen.checkpoint.format.manifest import FORMAT_VERSION
from lumen.internals.torch_versions import TESTED_VERSIONS
from lumen.version import __version__
from tests.helpers import communication
from tests.helpers.architecture import LAYERS, ROOT, SOURCES
from tests.helpers.pages import COLLECTIVE, HOME, NAMES, PAGES, read_rows

TESTS = [str(path.relative_to(HOME)) for path in HOME.glob("tests/**/*.py")]
COLLECTIVES = "docs/contributing/collectives.md"
PATH = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def list_definitions(tree, prefix=""):
    """Return functions, classes and methods of a module, as `name` and `Class.name`."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from list_definitions(node, f"{prefix}{node.name}.")


# ---------------------------------------------------------------------- names on the pages


def test_the_security_page_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (HOME / "docs/security.md").read_text())
    assert len(named) > 8
    assert set(named) <= set(TESTS)


@pytest.mark.parametrize("page", NAMES)
def test_files_and_functions_named_in_pages_exist(page):
    named = PATH.findall(PAGES[page])
    for path, name in named:
        if (ROOT / path).exists():
            assert not name or name in list_definitions(ast.parse((ROOT / path).read_text())), f"{path}:{name}"
        else:
            assert not name, f"{path}:{name}: there is no such file in lumen/"
            assert any(each.endswith(f"/{path.removeprefix('tests/')}") for each in TESTS), path
    assert named or page == "docs/reference/checkpoint-format.md"


def test_architecture_page_lists_every_package_on_its_layer():
    of_page = [{name.strip("`") for layer, name, _ in read_rows(NAMES[0], "Packages") if layer == str(number)}
               for number in range(1, len(LAYERS) + 1)]  # fmt: skip
    assert of_page == [*LAYERS]
    on_disk = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for layer in of_page for name in layer} == on_disk - {"__init__", "__main__"}


def test_architecture_page_names_parts_of_run():
    parts = {name.strip("`") for name, _, _ in read_rows(NAMES[0], "The parts of a run")}
    tree = ast.parse((ROOT / "run/run.py").read_text())
    (run,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Run")
    fields = {ast.unparse(node.target) for node in run.body if isinstance(node, ast.AnnAssign)}
    stored = (node for node in ast.walk(run) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    assigned = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    given = {"stage", "task", "datamodule", "seed", "checkpoint"}
    assert parts == (fields | assigned) - given


def test_each_walk_has_its_stations_in_their_order():
    for walk, stations in (("One step", 12), ("One save", 8), ("One resume", 8), ("One config key", 8)):
        assert [row[0] for row in read_rows(NAMES[0], walk)] == [str(number) for number in range(1, stations + 1)]
        assert all(PATH.search(where) for _, where, _ in read_rows(NAMES[0], walk))


def test_each_word_has_one_meaning():
    """The glossary has one table for each subject, because a reader looks up a word and does not read all of them."""
    (section,) = re.findall(r"^## Glossary\n(.*?)(?=^## |\Z)", PAGES[NAMES[0]], re.S | re.M)
    words = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| *")]
    assert 40 <= len(words) <= 65
    assert len({word for word, _, _ in words}) == len(words)
    assert [word for word, _, where in words if not PATH.search(where)] == []


def test_each_promise_names_files_tests_and_readme_row():
    of_readme = re.findall(r"^\| \*\*(.+?)\*\* \|", (HOME / "README.md").read_text(), re.M)
    assert [promise for promise, _, _ in read_rows(NAMES[0], "Promises")] == [name.lower() for name in of_readme]
    assert all(PATH.search(files) and "test_" in tests for _, files, tests in read_rows(NAMES[0], "Promises"))


# ---------------------------------------------------------------------- decisions of ranks

OF_TORCH = {"all_reduce", "all_gather", "broadcast_object_list", "gather_object", "all_gather_object", "full_tensor"}


def test_collectives_page_lists_every_collective_method():
    assert {name.strip("`") for name, _, _ in read_rows(COLLECTIVES, "The methods")} == COLLECTIVE


def is_collective(node):
    """Return True if a call is a collective."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in (COLLECTIVE | OF_TORCH) - {"connect"}


def test_collectives_page_names_every_file_that_communicates():
    named = {path for path, _ in PATH.findall(PAGES[COLLECTIVES])}
    files = {
        str(Path(*module.split(".")[1:]).with_suffix(".py"))
        for module, tree in SOURCES.items()
        if any(map(is_collective, ast.walk(tree)))
    }
    assert files - named == set()


def test_collectives_page_has_counted_numbers():
    page, vote = PAGES[COLLECTIVES], communication.VOTE
    assert f"by a sum of **{vote} numbers**" in " ".join(page.split())
    assert f"1 `all_gather` (**{communication.GATHER} collectives**)" in page
    assert f"1 all-reduce of **{communication.OTHER_SUMS_OF_STEP} numbers**" in page
    votes = {moment: int(numbers) for moment, _, numbers in read_rows(COLLECTIVES, "Some steps: the vote")}
    assert votes["a validation is over, or an epoch whose hooks ran"] == vote + 1
    assert votes["an epoch ends"] == votes["training begins"] == vote + 2


def test_collectives_page_counts_epochs_as_tested():
    table = re.search(r"Counted for an epoch of one step:\n\n(.*?)\n\n", PAGES[COLLECTIVES], re.S)[1]
    assert [tuple(map(int, re.findall(r"\| (\d+)", row))) for row in table.splitlines()[2:]] == [
        *communication.COLLECTIVES_OF_EPOCH.values()
    ]


# ---------------------------------------------------------------------- checklists of the field

CHECKLIST = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (HOME / "docs/contributing/checklist.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| practice")
]
PRACTICES = [
    f"{letter}{number}"
    for letter, count in {"R": 51, "D": 32, "L": 24, "H": 45, "G": 49}.items()
    for number in range(1, count + 1)
]


def test_every_practice_is_in_one_short_row():
    assert len(PRACTICES) == 201
    assert Counter(" ".join(of for _, of, *_ in CHECKLIST).split()) == Counter(PRACTICES)
    assert {who for _, _, who, _ in CHECKLIST} == {"automatic", "flag", "your line"}
    assert [how for *_, how in CHECKLIST if not 0 < len(how.split()) <= 15] == []


def test_every_practice_has_tests_that_exist():
    defined = {
        f"{Path(path).name}::{node.name}"
        for path in TESTS
        for node in ast.parse((HOME / path).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    proofs = tomllib.loads((HOME / "tests/checklist.toml").read_text())
    assert [*proofs] == PRACTICES
    assert all(proofs.values())
    assert {test for tests in proofs.values() for test in tests} <= defined


# ---------------------------------------------------------------------- how to contribute


def test_contributing_is_short_and_names_existing_targets():
    page = PAGES["CONTRIBUTING.md"]
    assert len(page.splitlines()) <= 70
    targets = set(re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.M))
    assert {*re.findall(r"\bmake ([\w-]+)", page)} <= targets


def test_navigation_of_the_site_names_each_page():
    pages = {str(path.relative_to(HOME / "docs")) for path in HOME.glob("docs/**/*.md") if "site" not in path.parts}
    named = re.findall(r"\b[\w/-]+\.md\b", (HOME / "mkdocs.yml").read_text().partition("nav:")[2])
    assert set(named) >= pages
    assert len(named) == len(set(named))


def test_the_readme_leads_to_each_page():
    linked = {*re.findall(r"\]\(([^)#]+)\)", (HOME / "README.md").read_text())}
    assert linked >= {*NAMES}


# ---------------------------------------------------------------------- the promises, and where all pages are

README = (HOME / "README.md").read_text()
PICTURE = HOME / "benchmarks/results/cost.svg"
PROMISES = (HOME / "docs/concepts/promises.md").read_text()


def test_readme_rows_match_the_page_of_promises():
    rows_of_readme = re.findall(r"^\| \*\*(.+?)\*\* \| .+ \| (.+) \|$", README, re.M)
    assert [name for name, _ in rows_of_readme] == re.findall(r"^## (.+)$", PROMISES, re.M)
    said = {*re.findall(r"[\d.,]*\d(?:e-\d+)?", PROMISES)}
    for name, figure in rows_of_readme:
        assert {*re.findall(r"[\d.,]*\d(?:e-\d+)?", figure)} <= said, name


def test_picture_shows_figures_of_the_promises_page():
    bars = re.findall(r'width="([\d.]+)" height="12" rx="2" fill="#\w+"/><text [^>]*>([\d.]+)<', PICTURE.read_text())
    measured = re.search(r"^\| case .*?\n\n", PROMISES, re.S | re.M)[0]
    figures = re.findall(r"\d\.\d\d", measured)
    assert [figure for _, figure in bars] == [*figures[:8], *figures[10:12]]
    assert len({round(float(width) / float(figure)) for width, figure in bars}) == 1


def test_readme_is_short_and_leads_to_every_page():
    assert len(README.splitlines()) <= 120
    assert "](docs/pages.md)" in README
    linked = {*re.findall(r"\]\(([\w/-]+\.\w+)(?:#[\w-]+)?\)", (HOME / "docs/pages.md").read_text())}
    docs = HOME / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md") if path.parts[-2] != "site"}
    assert (pages | {"tutorials/notebook.ipynb"}) - linked == {"pages.md"}


def test_the_page_of_examples_has_every_config():
    linked = re.findall(r"\]\(\.\./\.\./models/(\w+)\.yaml\)", (HOME / "docs/guides/examples.md").read_text())
    assert sorted(linked) == sorted(path.stem for path in (HOME / "models").glob("*.yaml"))


@pytest.mark.parametrize("page", ["callbacks", "loggers", "devices", "tools", "optim"])
def test_tables_of_the_reference_name_what_exists(page):
    names = re.findall(r"^\| `(\w+)` \|", (HOME / f"docs/site/{page}.md").read_text(), re.M)
    exported = lumen.optim.__all__ if page == "optim" else lumen.__all__
    assert len(names) >= 5
    assert {*names} <= {*exported}


def test_installation_lists_every_extra_and_dependency():
    page = (HOME / "docs/installation.md").read_text()
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.M)) == sorted(project["optional-dependencies"])
    names = [re.split(r"[\[>]", each)[0] for each in project["dependencies"]]
    assert [name for name in names if name not in page] == []
    assert f"Python | {project['requires-python'].removeprefix('>=')} or newer" in page


def test_versions_page_names_tested_torch_and_format():
    page = " ".join((HOME / "docs/versions.md").read_text().split())
    assert {*re.findall(r"\| 3\.\d+ \| ([\d.]+) \|", page)} == {*TESTED_VERSIONS}
    assert f"this version reads format {FORMAT_VERSION}." in page
    assert f"version {__version__}," in page
