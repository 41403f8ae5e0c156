"""Programs and commands of the tutorials: each does what its tutorial says."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.documented_commands import run_in_shell
from tests.helpers.pages import find_programs

pytestmark = [pytest.mark.usefixtures("program_directory"), pytest.mark.time_limit(240)]


def read_losses(name):
    with open(f"runs/{name}/metrics.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def run_script(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_processes_and_torchrun_repeat_the_losses():
    (script,) = find_programs("docs/tutorials/several-gpus.md")
    Path("train.py").write_text(script)
    assert run_script("train.py") == "steps: 48\n"
    Path("train.py").write_text(script.replace("devices=1", "devices=2").replace('"one"', '"two"'))
    assert run_script("train.py").count("steps: 48\n") == 1
    Path("train.py").write_text(script.replace("    devices=1,\n", "").replace('"one"', '"torchrun"'))
    assert "steps: 48\n" in run_script("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    one = read_losses("one")
    assert len(one) == 48
    for name in ("two", "torchrun"):
        assert read_losses(name) == pytest.approx(one, rel=1e-5)


def test_language_model_is_tuned_and_exported():
    page = "docs/tutorials/language-model.md"
    base, module, read, adapter = find_programs(page)
    text = (ROOT / page).read_text()
    for name, content in {
        "base.py": base,
        "sums.py": module,
        "sums.yaml": re.search(r"```yaml\n(.*?)```", text, re.S)[1],
        "read.py": read,
        "adapter.py": adapter,
    }.items():
        Path(name).write_text(content)
    run_script("base.py")
    commands = re.findall(r"^lumen .*", text, re.M)
    assert [line.split()[1] for line in commands] == ["fit", "fit", "export"]
    shown = [run_in_shell(line) for line in commands]
    assert re.search(r"PeftModelForCausalLM +0\.168 M +11 %", shown[0])
    assert "max_epochs=9 reached" in shown[1]
    assert "from_pretrained reads bitwise identical values" in shown[2]
    losses = read_losses("sums")
    assert losses[0] > 5.5
    assert sum(losses[-7:]) / 7 < 2.9
    assert run_script("read.py").startswith("2+3=")
    run_script("adapter.py")
    assert Path("adapter/adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # a deprecated call
def test_packing_of_the_tutorial_keeps_losses():
    base, module, *_ = find_programs("docs/tutorials/language-model.md")
    found = {"__name__": "sums"}
    exec(base, found)
    exec(module, found)
    torch.manual_seed(0)
    task = found["Tuned"]().double().eval()
    task.log = lambda *_, **__: None
    for name, parameter in task.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    texts = [("1+2=", "3"), ("9+9=", "18"), ("5+0=", "5")]
    losses = [task.training_step(found["pack"]([text])) for text in texts]
    packed, count = task.training_step(found["pack"](texts))
    assert count == sum(weight for _, weight in losses) == 7
    assert packed.item() == pytest.approx(sum(loss.item() * weight for loss, weight in losses) / 7, abs=1e-12)
