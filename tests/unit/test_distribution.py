"""Name of the distribution: `lumen-train` wherever a user installs, since `lumen` on PyPI is a different project."""

import re
import tomllib

import pytest

from lumen.version import DISTRIBUTION, FOREIGN_NAMES
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted(ROOT.glob("lumen/tools/init/templates/*/pyproject.toml"))
#: Files in which a user or a machine reads what to install.
FILES = [
    path
    for pattern in ("*.md", "Makefile", "constraints.txt", ".github/**/*", "docs/**/*", "lumen/**/*", "models/*")
    for path in sorted(ROOT.glob(pattern))
    if path.suffix in {".ipynb", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"} or path.name == "Makefile"
]
#: The other distribution as an argument of pip, or with an extra.
OTHER_NAME = re.compile(r"""pip install [^\n`]*(?<![\w./-])lumen(?![\w.-])|["'` ]lumen\[[a-z]+[\],]""")


def test_project_has_the_name_of_the_code():
    assert PROJECT["name"] == DISTRIBUTION == "lumen-train"
    extras = [each for needed in PROJECT["optional-dependencies"].values() for each in needed]
    assert {each.partition("[")[0] for each in extras if each.startswith("lumen")} == {DISTRIBUTION}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.parent.name)
def test_new_projects_depend_on_the_distribution(path):
    """A project needs Lumen with one of its extras, and packages in the versions that Lumen is tested with."""
    project = tomllib.loads(path.read_text())["project"]
    needed, *others = project["dependencies"]
    name, _, extra = needed.rstrip("]").partition("[")
    assert name == DISTRIBUTION
    assert not extra or extra in PROJECT["optional-dependencies"]
    assert {*others, *project["optional-dependencies"]["test"]} <= {*PROJECT["optional-dependencies"]["test"]}


def test_no_text_installs_the_other_project():
    found = {str(path.relative_to(ROOT)): OTHER_NAME.findall(path.read_text()) for path in FILES}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "text", ["pip install lumen", "pip install 'lumen[report]'", '"lumen[aim,stats]"', "a lumen[ray]"]
)
def test_other_name_is_found(text):
    assert OTHER_NAME.search(text)
    assert not OTHER_NAME.search(text.replace("lumen", DISTRIBUTION))


def test_foreign_names_are_not_ours():
    assert {*FOREIGN_NAMES}.isdisjoint(path.name for path in (ROOT / "lumen").iterdir())
