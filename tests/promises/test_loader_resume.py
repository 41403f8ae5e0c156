"""Exact resume with every kind of loader: a run killed with -9 is bitwise identical to an uninterrupted run."""

import signal

import pytest

from tests.helpers.jobs import Nursery
from tests.helpers.loader_run import KINDS
from tests.promises.lives import final_state


@pytest.fixture(scope="module")
def run():
    """Return a function that resumes a run until it kills itself at a micro-batch, or to its end."""
    nursery = Nursery("tests.helpers.loader_run")

    def call(directory, kind, killed_at=None):
        directory.mkdir(exist_ok=True)
        options = {"kind": kind, "killed_at": killed_at}
        code, _, output = nursery.start(directory, "tests.helpers.loader_run", options).wait()
        assert code == (0 if killed_at is None else -signal.SIGKILL), output

    yield call
    nursery.close()


#: Loader in `make test`; the others together are slow.
QUICK = "stream"


@pytest.mark.time_limit(240)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_kills_leave_no_trace_with_any_loader(run, tmp_path, kind):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run(undisturbed, kind)
    expected = final_state(undisturbed, kind)
    batches = expected[2]["micro_batches"]
    run(killed, kind, killed_at=batches * 2 // 5)  # in the middle of an epoch
    run(killed, kind, killed_at=batches // 5 + 1)
    run(killed, kind)
    for kept, whole in zip(final_state(killed, kind), expected, strict=True):
        assert kept == whole
