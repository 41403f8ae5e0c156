"""Programs of the page on manual optimization: each one runs."""

from lumen.checkpoint import find_checkpoints
from tests.helpers.pages import run_programs


def test_programs_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(list(run_programs("docs/guides/manual-optimization.md"))) == 3
    assert len(find_checkpoints(tmp_path / "runs/gan/checkpoints")) > 0
