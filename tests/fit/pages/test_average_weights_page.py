"""Programs and commands of docs/guides/average-weights.md: each one runs."""

import re

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.pages import find_programs
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401

PAGE = "docs/guides/average-weights.md"
TEXT = (ROOT / PAGE).read_text()


def test_programs_and_export_commands_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "page"}
    for number, program in enumerate(find_programs(PAGE)):
        exec(compile(program, f"{PAGE}, program {number}", "exec"), found)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if re.match(r"(True|None|last|best|torch)\b", line)][:1] == ["True False"]
    assert [line.split()[0] for line in said[-4:-1]] == ["None", "last:3", "best:2"]
    assert said[-1] == "torch.Size([2, 32])"
    assert main(["export", "runs/averaged", "--average", "SWA", "--output", "swa.safetensors"]) == 0
    assert main(["export", "runs/ema", "--average", "EMA", "--output", "ema.safetensors"]) == 0
    commands = re.findall(r"^lumen (export .*?)(?: +#.*)?$", TEXT, re.M)
    assert len(commands) == 2
    assert [main(command.split()) for command in commands] == [0, 0]


@pytest.mark.parametrize(("name", "argument", "value"), [("EMA", "decay", 0.99), ("SWA", "swa_lrs", 0.005)])
def test_averages_are_set_by_options_of_the_page(config_directory, name, argument, value):
    words = re.search(rf"`(--trainer\.callbacks\+={name} [^`]*)`", TEXT)[1].split()
    assert main(["fit", "--config", "line.yaml", *words, "--trainer.max_epochs=2"]) == 0
    (average,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == name)
    assert (average.decay if name == "EMA" else average.swa_lrs) == value
