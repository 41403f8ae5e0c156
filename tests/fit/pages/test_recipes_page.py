"""The programs of the page of recipes run, with few epochs."""

import numpy
import pytest
from PIL import Image

from tests.helpers.pages import snippets


@pytest.mark.slow
def test_the_programs_of_the_page_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "page"}
    programs = snippets("docs/guides/recipes.md")
    for number, program in enumerate(programs):
        small = program.replace("max_epochs=20,", "max_epochs=1, limit_train_batches=2, limit_val_batches=1,")
        exec(compile(small, f"docs/guides/recipes.md, program {number}", "exec"), found)
    page = numpy.asarray(Image.open("digits.png"))
    assert page.shape == (280, 280)
    assert page.std() > 0
    assert len(found["rows"]) == 1000 + 1697
    assert found["right"] == pytest.approx(found["scans"]["right/scans"], abs=1e-6)
