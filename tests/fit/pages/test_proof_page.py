"""Programs of the page on comparing runs."""

import pytest

from lumen.tools.proof.recorder import KINDS
from tests.helpers import ROOT
from tests.helpers.pages import find_programs

PAGE = "docs/guides/compare-runs.md"


@pytest.mark.parametrize("program", find_programs(PAGE))
def test_each_program_of_the_page_runs(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, PAGE, "exec"), {"__name__": "program"})


def test_the_page_tells_of_each_kind_of_entry():
    text = (ROOT / PAGE).read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text and "operator" not in kind] == []
