"""What the pages for contributors say of the code is so."""

import inspect
import re
import textwrap

from lumen.distributed.processes import Processes
from tests.helpers import ROOT as HOME

NAMES = (
    "docs/contributing/architecture.md",
    "docs/reference/checkpoint-format.md",
    "docs/contributing/collectives.md",
    "CONTRIBUTING.md",
)


PAGES = {name: (HOME / name).read_text() for name in NAMES}


def rows(page, heading):
    """The cells of the first table below a heading, but for its own heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGES[page], re.S | re.M)
    table = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.S | re.M)[0]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines()[2:]]


COLLECTIVE = {
    name for name, method in vars(Processes).items()
    if inspect.isfunction(method) and "Collective" in (method.__doc__ or "")
}  # fmt: skip


def snippets(page="docs/guides/data-loaders.md"):
    """The programs of a page, in their order."""
    text = (HOME / page).read_text()
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)```", text, re.S | re.M)]


def programs_run(page, *replaced):
    """Execute the programs of a page one after the other; yields what they define so far after each."""
    found = {"__name__": "page"}
    for number, program in enumerate(snippets(page)):
        for old, new in replaced:
            program = program.replace(old, new)
        exec(compile(program, f"{page}, program {number}", "exec"), found)
        yield found
