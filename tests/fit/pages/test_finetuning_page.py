"""The programs of the page on fine-tuning print what it is about."""

import re

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.pages import snippets
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401


def test_the_programs_of_the_page_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found, said = {"__name__": "page"}, []
    for number, program in enumerate(snippets("docs/guides/finetuning.md")):
        exec(compile(program, f"docs/guides/finetuning.md, program {number}", "exec"), found)
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said == [
        "{'head': 4, 'backbone': 2}",
        "[None, 'epoch 2', 'epoch 4']",
        "True False",
        "3 torch.Size([2, 32])",
        "0 10",
    ]
    assert main(["export", "runs/averaged", "--average", "SWA", "--output", "swa.safetensors"]) == 0
    commands = re.findall(r"^lumen (export .*?)(?: +#.*)?$", (ROOT / "docs/guides/finetuning.md").read_text(), re.M)
    assert len(commands) == 2
    assert [main(command.split()) for command in commands] == [0, 0]


def test_swa_is_named_on_the_command_line(config_directory):
    page = (ROOT / "docs/guides/finetuning.md").read_text()
    words = re.search(r"`(--trainer\.callbacks\+=SWA [^`]*)`", page)[1].split()
    assert main(["fit", "--config", "line.yaml", *words, "--trainer.max_epochs=2"]) == 0
    (swa,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == "SWA")
    assert swa.swa_lrs == 0.005
