"""Python programs in new processes."""

import os
import subprocess
import sys

from tests.helpers import ROOT


def run_python(*words, cwd=ROOT, code=0, **environment):
    """Run Python with arguments. Return its output and its errors."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout, done.stderr


def run_and_read_numbers(*words):
    """Return the numbers that Python prints, in a process that returns freed memory."""
    return [float(word) for word in run_python(*words, MALLOC_MMAP_THRESHOLD_="1000000")[0].split()]
