"""Programs of the pages on recipes and on reinforcement learning: each one runs, with few epochs."""

import numpy
import pytest
from PIL import Image

from tests.helpers.pages import run_programs


@pytest.mark.slow
def test_programs_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("max_epochs=20,", "max_epochs=1, limit_train_batches=2, limit_val_batches=1,")
    *_, found = run_programs("docs/guides/recipes.md", few)
    page = numpy.asarray(Image.open("digits.png"))
    assert page.shape == (280, 280)
    assert page.std() > 0
    assert len(found["rows"]) == 1000 + 1697
    assert found["right"] == pytest.approx(found["scans"]["right/scans"], abs=1e-6)


def test_the_page_of_reinforcement_learning_trains_a_bandit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = run_programs("docs/guides/reinforcement-learning.md")
    assert found["bandit"].preferences.argmax() == 2
