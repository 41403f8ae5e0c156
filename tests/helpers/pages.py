"""Helpers for the pages."""

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


def read_rows(page, heading):
    """Return the cells of the first table below a heading, without the header row."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGES[page], re.S | re.M)
    table = re.search(r"^\|.*?(?=\n\n|\Z)", section, re.S | re.M)[0]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines()[2:]]


COLLECTIVE = {
    name for name, method in vars(Processes).items()
    if inspect.isfunction(method) and "Collective" in (method.__doc__ or "")
}  # fmt: skip


def find_programs(page="docs/guides/data-loaders.md"):
    """Return the programs of a page, in order."""
    text = (HOME / page).read_text()
    return [textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)```", text, re.S | re.M)]


def run_programs(page, *replaced):
    """Execute the programs of a page in order; after each, yield the names defined so far."""
    found = {"__name__": "page"}
    for number, program in enumerate(find_programs(page)):
        for old, new in replaced:
            program = program.replace(old, new)
        exec(compile(program, f"{page}, program {number}", "exec"), found)
        yield found
