"""Exact resume with every kind of loader: a run killed with -9 is bitwise identical to an uninterrupted run."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.loader_run import KINDS
from tests.promises.lives import final_state


def run(directory, *kinds, strike=None):
    """Run the child until it is killed at an event, or to its end. Return its output."""
    command = [sys.executable, "-u", "-m", "tests.helpers.loader_run", str(directory), *kinds]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        for line in child.stdout:
            said.append(line.strip())
            if strike is not None and said.count(strike[0]) == strike[1]:
                os.kill(child.pid, signal.SIGKILL)
                break
        errors = child.communicate()[1]
    assert child.returncode == (0 if strike is None else -signal.SIGKILL), errors
    return said


#: Loader in `make test`; the others together are slow.
QUICK = "stream"


@pytest.mark.time_limit(240)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_kills_leave_no_trace_with_any_loader(tmp_path, kind):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run(undisturbed, kind)
    expected = final_state(undisturbed, kind)
    batches = expected[2]["micro_batches"]
    run(killed, kind, strike=("train", batches * 2 // 5))  # in the middle of an epoch
    run(killed, kind, strike=("train", batches // 5 + 1))
    run(killed, kind)
    for kept, whole in zip(final_state(killed, kind), expected, strict=True):
        assert kept == whole
