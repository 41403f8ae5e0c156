"""The programs of the page on timm and torchvision run, and what it says of them holds."""

import csv

import tests.helpers.torchvision_on_cpu  # noqa: F401
from tests.helpers.pages import snippets


def test_the_programs_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "page"}
    for number, program in enumerate(snippets("docs/guides/vision.md")):
        exec(compile(program, f"docs/guides/vision.md, program {number}", "exec"), found)
    for run, name in (("mixed", "val_acc"), ("found", "map")):
        with (tmp_path / "runs" / run / "metrics.csv").open() as file:
            assert any(row[name] for row in csv.DictReader(file))
