"""Programs and commands of docs/guides/custom-command-line.md and export.md."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lumen.cli import main
from tests.helpers import ROOT

PAGE = (ROOT / "docs/guides/custom-command-line.md").read_text()
CONFIG = {}
SCRIPT, ALONE = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
EXPORT = (ROOT / "docs/guides/export.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True) for line in (PAGE + EXPORT).splitlines() if line.startswith(("python ", "lumen "))
]

pytestmark = pytest.mark.usefixtures("config_directory")


def start(words, monkeypatch):
    """Run the script with a command line in this process."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_the_script_and_its_commands_run(monkeypatch, capsys):
    first, again, validate, printed = [words[2:] for words in COMMANDS if words[0] == "python"]
    start(first, monkeypatch)
    start(again, monkeypatch)
    one, two = [re.fullmatch(r"(\w+): ([\d.]+)", line) for line in capsys.readouterr().out.splitlines()]
    assert (one[1], two[1], one[2]) == ("first", "again", two[2])
    start(validate, monkeypatch)
    assert "val_loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        start(printed, monkeypatch)
    assert capsys.readouterr().out == "stopping:\n  patience: 5\n"


@pytest.mark.slow
def test_the_commands_for_other_formats_run(monkeypatch, tmp_path):
    (tmp_path / "line.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "line", None)  # the import into this process is undone
    monkeypatch.delitem(sys.modules, "line")
    classes = ["--model=line.Line", "--data=line.Points", "--model.features=4", "--trainer.max_steps=1"]
    assert main(["fit", *classes, "--trainer.name=line"]) == 0
    torch.save({"state_dict": {"model.weight": torch.ones(2)}}, "old.ckpt")
    for words in (words[1:] for words in COMMANDS if words[0] == "lumen" and "runs/gpt2_finetune" not in words):
        assert main(words) == 0, words
    assert torch.export.load("line.pt2").module()(torch.ones(3, 4)).shape == (3, 1)
    assert load_file("line.safetensors")["layer.weight"].dtype == torch.bfloat16
    assert load_file("old.safetensors").keys() == {"weight"}


def test_without_commands_the_rest_is_the_scripts():
    names = {"__name__": "train"}
    exec(SCRIPT, names)
    exec(ALONE, names)
    assert names["cli"].trainer.global_step == 4
    assert Path("runs/line/config.yaml").is_file()
