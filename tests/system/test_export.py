"""Exports as programs: killed, on a full disk, and measured in memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.helpers import ROOT
from tests.helpers.checkpoints import save, save_small
from tests.helpers.export import export, fit


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_exported_file_needs_neither_lumen_nor_pickle():
    fit()
    export("runs/run", "--output", "net.safetensors", "--module", "net")
    code = (
        "import sys, torch\nfrom safetensors.torch import load_file\n"
        "found = load_file('net.safetensors')\nassert 'lumen' not in sys.modules\nprint(found['frozen'].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("6.0\n", 0), done.stderr
    with safe_open("net.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers requires this name


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """Write a checkpoint of 200 MB in tensors of 4 MB."""
    model = {f"layers.{n}.weight": torch.full((1024, 1024), float(n)) for n in range(50)}
    return save(tmp_path_factory.mktemp("large") / "step-1", model=model)


LUMEN = [sys.executable, "-m", "lumen", "export"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_a_full_disk_is_said_and_leaves_nothing(large_checkpoint):
    words = [*LUMEN, str(large_checkpoint), "--output", "x", "--max_shard_size", "9MB"]
    done = subprocess.run(  # no file may be larger than 5 MB
        ["bash", "-c", f"ulimit -f 5000; exec {' '.join(words)}"], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write ")
    assert "Traceback" not in done.stderr
    assert os.listdir() == []


def stop_in_the_middle(number, output, *words):
    """Start an export and send it a signal while it writes. Return the process and its draft."""
    process = subprocess.Popen([*LUMEN, *map(str, words), "--output", output], env=ENVIRONMENT)
    while not (found := list(Path().glob(f"{output}.tmp-*/*"))):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(number)
    return process, found[0].parent


@pytest.mark.parametrize(("output", "words"), [("x.safetensors", []), ("x", ["--max_shard_size=20MB"]), ("x", [])])
def test_killed_export_leaves_nothing_and_next_cleans_up(large_checkpoint, output, words):
    process, left = stop_in_the_middle(signal.SIGKILL, output, large_checkpoint, *words)
    process.wait()
    assert left.is_dir()
    assert not Path(output).exists()
    export(large_checkpoint, "--output", output, *words)
    files = [Path(output)] if output.endswith(".safetensors") else Path(output).glob("*.safetensors")
    assert sum(len(load_file(file)) for file in files) == 50
    assert os.listdir() == [output]


def test_running_export_is_not_cleaned_up(large_checkpoint):
    save_small(Path("step-1"))
    process, left = stop_in_the_middle(signal.SIGSTOP, "x.safetensors", large_checkpoint)
    export("step-1", "--output", "x.safetensors")
    before = Path("x.safetensors").read_bytes()
    assert list(left.iterdir())
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 2  # another process was faster
    assert sorted(os.listdir()) == ["step-1", "x.safetensors"]
    assert Path("x.safetensors").read_bytes() == before


PEAK = """
import re, sys
from pathlib import Path
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.cli import main

def memory(which):
    return int(re.search(which + r":\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) / 1024

assert main(["export", "step-2", "--output", "warm-up", "--dtype", "bfloat16"]) == 0
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = memory("VmRSS")
assert main(["export", *sys.argv[1:]]) == 0
print(memory("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("sources", "words", "most"),
    [
        (1, ["--output=x.safetensors"], 16),
        (1, ["--output=x", "--max_shard_size=50MB", "--dtype=bfloat16"], 16),
        (3, ["--output=x.safetensors"], 24),  # the sum has 8 bytes
    ],
)
def test_export_memory_is_that_of_one_tensor(large_checkpoint, sources, words, most):
    save(Path("step-2"), model={"w": torch.ones(9)})
    environment, words = (
        ENVIRONMENT | {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        [*[str(large_checkpoint)] * sources, *words],
    )
    done = subprocess.run([sys.executable, "-c", PEAK, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 3 <= float(done.stdout.splitlines()[-1]) < most  # MiB; a tensor has 4, the model 200
