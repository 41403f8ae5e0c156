"""Programs of the page on timm and torchvision: each one runs, and the statements of the page hold."""

import tests.helpers.torchvision_on_cpu  # noqa: F401
from tests.helpers.pages import run_programs
from tests.helpers.tables import read_rows


def test_programs_of_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(run_programs("docs/guides/vision.md"))
    for run, name in (("mixed", "val_acc"), ("found", "map")):
        assert any(row[name] for row in read_rows(tmp_path / "runs" / run / "metrics.csv"))
