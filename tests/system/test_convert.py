"""`lumen convert` on harmful files: bounded, ended with its parent, and without leftover files."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.interpreters import SHADOWS, shadow_modules

pytestmark = pytest.mark.usefixtures("program_directory")

W = {"w": torch.ones(2)}
#: Reading process with smaller limits; the real limits are 60 s and 1 GiB for the smallest file.
SMALLER = """
import sys
from pathlib import Path
from lumen.tools.convert import unpickle
unpickle._MIN_S, unpickle._MIN_BYTES = int(sys.argv[1]), 2**26
unpickle.limit_resources(Path("in.pt"))
unpickle.main("in.pt", "out.safetensors", "{}", "temporary")
"""


def convert(content=None, **options):
    """Run the command and return its exit code, output and errors; check that no file is new except its output."""
    if content is not None:
        torch.save(content, "in.pt", **options)
    before = set(os.listdir())
    command = [sys.executable, "-P", "-m", "lumen", "convert", "in.pt", "out.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert set(os.listdir()) == before | ({"out.safetensors"} if done.returncode == 0 else set())
    assert "Traceback" not in done.stderr, done.stderr
    return done


def make_repeated(value, times):
    """Return nested lists of ten names of one list, which JSON writes 10 ** times times."""
    for _ in range(times):
        value = [value] * 10
    return value


def make_nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_convert_imports_nothing_of_the_working_directory():
    torch.save(W, "in.pt")
    shadow_modules(*SHADOWS)
    assert convert().returncode == 0
    assert load_file("out.safetensors")["w"].tolist() == [1, 1]


def test_hyperparameters_are_bounded_in_size_and_depth():
    endless = {}
    endless["self"] = endless
    harmful = {
        "endless": endless, "deep": make_nested(400), "repeated": make_repeated("x", 9),
        "large": make_repeated("x" * 10_000, 3),
    }  # fmt: skip
    done = convert({"state_dict": W, "hyper_parameters": {"lr": 0.1, **harmful, "layers": [1, 2]}})
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == {"lr": 0.1, "layers": [1, 2]}
    assert f"not shown, since they are too large or no plain data: {', '.join(harmful)}\n" in done.stderr


def test_hyperparameters_that_are_no_dictionary_are_named():
    done = convert({"state_dict": W, "hyper_parameters": [1, 2, 3]})
    assert (done.returncode, done.stdout) == (0, "")
    assert "or no plain data: hyper_parameters\n" in done.stderr
    assert load_file("out.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("tensors", "sizes"),
    [
        ({"w": torch.empty(1).expand(3_000_000_000)}, ("12 GB", "w: 12 GB")),
        ({"a": torch.ones(1), "w": torch.empty(1).expand(200_000_000_000)}, ("800 GB", "w: 800 GB")),
        (dict.fromkeys(map(str, range(1500)), torch.ones(250_000)), ("1.5 GB", "0: 1 MB")),
    ],
    ids=["expanded", "larger-than-memory", "repeated"],
)
def test_tensors_that_are_repeated_are_bounded(tensors, sizes):
    done = convert({"state_dict": tensors})
    assert done.returncode == 1
    assert "tensors have {} without shared memory ({}). Lumen writes at most 1.0".format(*sizes) in done.stderr


def test_expanded_tensors_of_a_model_are_written():
    tensors = {"mask": torch.ones(1, 1).expand(64, 64), "tied": torch.eye(3)}
    assert convert({"state_dict": {**tensors, "again": tensors["tied"]}}).returncode == 0
    assert torch.equal(load_file("out.safetensors")["mask"], torch.ones(64, 64))


def convert_with_limits(least_s=1):
    words = [sys.executable, "-c", SMALLER, str(least_s)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, set(os.listdir())) == (0, {"in.pt"}), done.stderr
    return json.loads(done.stdout.splitlines()[-1])["refused"]


def test_time_of_the_processor_is_bounded():
    shared = dict.fromkeys(map(str, range(20_000)), torch.ones(1))
    torch.save(dict.fromkeys(map(str, range(20_000)), shared), "in.pt")
    assert "in.pt takes more than 1 s of CPU time" in convert_with_limits()


def test_memory_is_bounded():
    """A compressed pickle takes a thousand times its file in memory; torch writes none, but reads them."""
    torch.save({"a": W, "text": "x" * 400_000_000}, "large.pt")
    with zipfile.ZipFile("large.pt") as large, zipfile.ZipFile("in.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in large.namelist():
            small.writestr(name, large.read(name))
    Path("large.pt").unlink()
    assert Path("in.pt").stat().st_size < 1_000_000
    assert "memory" in convert_with_limits(least_s=60).lower()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_reader_ends_with_its_parent_and_leaves_nothing(number):
    torch.save({"w": torch.ones(1).expand(100_000_000)}, "in.pt")
    command = [sys.executable, "-P", "-m", "lumen", "convert", "in.pt", "out.safetensors"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        while not list(Path().glob("out.safetensors.tmp-*")):
            assert parent.poll() is None
        (child,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
        os.kill(child, signal.SIGSTOP)
        parent.send_signal(number)
        assert parent.wait() == -number
    os.kill(child, signal.SIGCONT)
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{child}/cwd").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert os.listdir() == ["in.pt"]
