"""Index of errors: it has the messages of the code, and its table every class."""

import re
import runpy

from lumen import errors
from tests.helpers import ROOT

INDEX = runpy.run_path(str(ROOT / "docs/site/error_index.py"))
PAGE = INDEX["page"]((ROOT / "docs/site/errors.md").read_text())


def test_every_class_of_errors_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert rows == [name for name in INDEX["CLASSES"] if name != "LumenError"]
    assert all(f"## {name}\n" in PAGE for name in rows)


def test_exit_codes_are_those_of_the_code():
    from lumen.internals.stop_signals import STOP_EXIT_CODES

    table = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.M)}
    assert table == {0, 1, errors.HUNG, *STOP_EXIT_CODES}


def test_messages_have_gaps_in_place_of_values():
    assert PAGE.count("<li>") > 400
    assert "<li>EMA: decay must be at least 0 and less than 1, found ….</li>" in PAGE
