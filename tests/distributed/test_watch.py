"""A process that gets no further says where it stands, also where no other one waits for it."""

from pathlib import Path

import pytest

import lumen
from tests.helpers.watch import WHERE, stuck_fit


def stuck_on_ranks(folder):
    steps, texts = stuck_fit(Path(folder), 0, lumen.DDP(timeout_s=5, startup_timeout_s=5), range(16))
    return steps, bool(texts) and bool(WHERE.search(texts[0]))


@pytest.mark.slow
def test_processes_that_all_wait_for_data_say_where(tmp_path, group):
    assert group(2).run(stuck_on_ranks, str(tmp_path)) == [(4, True)] * 2
