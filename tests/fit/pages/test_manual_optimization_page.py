"""The programs of the page on manual optimization run."""

import re

from lumen.checkpoint import find_checkpoints
from tests.helpers import ROOT

PAGE = (ROOT / "docs/guides/manual-optimization.md").read_text()


def test_the_programs_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "page"}
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    for number, program in enumerate(programs):
        exec(compile(program, f"docs/guides/manual-optimization.md, program {number}", "exec"), found)
    assert len(programs) == 3
    assert len(find_checkpoints(tmp_path / "runs/gan/checkpoints")) > 0
