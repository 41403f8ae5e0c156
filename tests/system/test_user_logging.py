"""Messages of a user's program and of Lumen, as the program shows them."""

import pytest

from tests.helpers.programs import run_python
from tests.helpers.user_logging import filter_messages

SCRIPT = """
import logging
{setup}
from tests.helpers.user_logging import fit_with_messages
from pathlib import Path
fit_with_messages(Path("."), "mine")
"""


@pytest.mark.parametrize(
    ("setup", "shown"),
    [
        ("", ["mine: said at 20", "warning: mine: said at 30"]),
        ("logging.basicConfig(level='INFO')", ["INFO:mine:said at 20", "WARNING:mine:said at 30"]),
        ("logging.basicConfig()", ["WARNING:mine:said at 30"]),
        pytest.param(
            "h = logging.StreamHandler(); logging.getLogger('mine').addHandler(h)",
            ["said at 20", "said at 30"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_user_messages_are_shown_once_despite_user_handlers(tmp_path, setup, shown):
    _, found = run_python("-c", SCRIPT.format(setup=setup), cwd=tmp_path)
    assert [line for line in found.splitlines() if "said" in line] == shown
    log = (tmp_path / "runs/run/run.log").read_text()
    assert filter_messages(log.splitlines()) == ["INFO mine: said at 20", "WARNING mine: said at 30"]
