"""Every test has a time limit; the one that exceeds it is named and shows where every thread stands."""

import faulthandler
import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared with the processes that tests start

DEFAULT_LIMIT_S = 120
_STDERR = os.dup(sys.stderr.fileno())  # pytest captures descriptor 2 during tests; a hung test must reach the real one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("time_limit")
    limit_s = marker.args[0] if marker else DEFAULT_LIMIT_S
    os.environ["LUMEN_TEST"] = f"{item.nodeid} (limit {limit_s} s)"  # shown by ps, for a test that hangs in a child
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
