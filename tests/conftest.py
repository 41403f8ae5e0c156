"""Time limit of each test: a test that exceeds it is named, with the stacks of all threads."""

import faulthandler
import gc
import os
import signal
import sys

import pytest

from tests.helpers.clock import clock  # noqa: F401 (a fixture)
from tests.helpers.group import group  # noqa: F401 (a fixture)
from tests.helpers.report import report  # noqa: F401 (a fixture)
from tests.helpers.runs import list_runs, show_runs  # noqa: F401 (fixtures)
from tests.helpers.working_directory import config_directory, program_directory  # noqa: F401 (fixtures)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share two cores with their processes

DEFAULT_LIMIT_S = 300
collect_ignore = ["projects"]  # projects for Lightning: `system/test_migrate.py` runs their tests on copies
_STDERR = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[_STDERR] = os.dup(sys.stderr.fileno())  # the real stderr, before pytest captures it for the tests
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # ignored in a background job, which children inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # Full collections would look through all modules of torch: a third of the time of `tests/fit`.


def pytest_runtest_setup(item):
    if marker := item.get_closest_marker("cuda"):
        import torch

        needed, found = marker.kwargs.get("devices", 1), torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"not proven here: it needs {needed} CUDA device{'s' * (needed > 1)}, {found} found")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    marker = item.get_closest_marker("time_limit")
    limit_s = marker.args[0] if marker else DEFAULT_LIMIT_S
    os.environ["LUMEN_TEST"] = f"{item.nodeid} (limit {limit_s} s)"  # `ps` shows this name if a test hangs in a child
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_process_group_stays():
    """Close the process group that a test left open in this process."""
    yield
    processes = sys.modules.get("lumen.distributed.processes")
    if processes is not None and processes._groups is not None:
        processes._groups.close()
        processes._groups = None


@pytest.fixture(autouse=True)
def _no_chosen_seed_stays():
    """Clear the seed that a test left by `seed_everything`."""
    yield
    if random := sys.modules.get("lumen.random"):
        random._chosen_seed = None
