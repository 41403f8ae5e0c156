"""Examples of tests/README.md: tests that pass."""

import subprocess
import sys

from tests.helpers import ROOT
from tests.helpers.pages import find_programs


def test_examples_for_writers_of_tests_pass(tmp_path):
    examples = find_programs("tests/README.md")
    assert len(examples) == 4
    for number, text in enumerate(examples):
        (tmp_path / f"test_example_{number}.py").write_text(text)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    ended = subprocess.run([*pytest, f"--rootdir={tmp_path}", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert "4 passed" in ended.stdout, ended.stdout
