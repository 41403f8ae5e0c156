"""Public API of the installed Lightning: each name has a verdict, from Lumen itself or from a file."""

import runpy
from functools import cache
from importlib.util import find_spec

import pytest

from tests.helpers import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="not proven here: it needs Lightning"),
]


@cache
def read_api():
    return runpy.run_path(str(ROOT / "docs/site/lightning_api.py"))


@cache
def judge_without_file():
    return read_api()["judge"]({})


def list_unsorted(verdicts):
    return {(owner, name) for owner, found in verdicts.items() for name in found if found[name].kind == "unsorted"}


def test_each_name_of_lightning_has_a_verdict():
    written = {(owner, name) for owner, texts in read_api()["read_differences"]().items() for name in texts}
    assert list_unsorted(judge_without_file()) - written == set()


def test_written_verdicts_are_needed():
    found = judge_without_file()
    for owner, texts in read_api()["read_differences"]().items():
        assert [name for name in texts if name not in found[owner]] == [], owner  # Lightning has no such name
        assert [name for name in texts if found[owner][name].kind in ("error", "renamed")] == [], owner


def test_probes_see_errors_and_counterparts():
    found = judge_without_file()
    assert found["Trainer"]["fit_loop"].text.startswith("Read trainer.progress")
    assert found["Trainer"]["(plugins)"].kind == found["names"]["DeepSpeedStrategy"].kind == "error"
    assert found["Trainer"]["fit"].kind == found["Trainer"]["(max_epochs)"].kind == "same"
    assert found["names"]["LightningModule"] == ("renamed", "`lumen.TaskModule`")
