"""Completion of a shell: a script completes the arguments of `lumen` without Python."""

import re
import sys

import pytest

from lumen.cli import main
from lumen.cli.commands import list_commands
from lumen.tools.completion import make_full_parser
from tests.helpers.shells import complete_line


@pytest.fixture(scope="module")
def parsers():
    """Return the parser of each command."""
    (commands,) = (action.choices for action in make_full_parser("a file")._actions if isinstance(action.choices, dict))
    assert [*commands] == list_commands()
    return commands


def options(parser):
    return {name: action for action in parser._actions for name in action.option_strings}


@pytest.mark.filterwarnings(r"ignore:\s*Hit failing import")  # a class that another test has left behind
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_completed_options_are_those_of_the_help(parsers, command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help", "all"])
    shown = {*re.findall(r"^  (?:-h, )?(--[\w.]+)", capsys.readouterr().out, re.MULTILINE)}
    several_at_once = {"--trainer", "--lookahead", "--lr_schedule", "--parameter_groups"}
    assert shown - several_at_once <= {*options(parsers[command])}


def test_names_of_strategies_classes_and_files_are_completed(parsers):
    fit, check = options(parsers["fit"]), options(parsers["check"])
    assert {"auto", "single", "ddp", "fsdp"} <= {*fit["--trainer.strategy"].choices}
    assert {"fp32", "bf16", "fp16", "bf16-true", "fp64"} < {*fit["--trainer.precision"].choices}
    assert {"auto", "cpu", "cuda", "gpu", "mps"} == {*fit["--trainer.accelerator"].choices}
    assert {"EarlyStopping", "ModelCheckpoint", "EMA"} < {*fit["--trainer.callbacks"].choices}
    assert {"AdamW", "SGD"} < {*fit["--optimizer"].choices}
    assert {"true", "false"} <= {*fit["--trainer.enable_progress_bar"].choices}
    assert fit["--config"].complete == check["--config"].complete == "a file"
    assert {*fit} < {*check}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_what_lumen_takes(shell, tmp_path, capsys):
    pytest.importorskip("shtab")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mine.yaml").touch()
    assert main(["completion", shell]) == 0
    script = tmp_path / f"completion.{shell}"
    script.write_text(capsys.readouterr().out)
    assert "# to install: " in script.read_text().splitlines()[1]
    typed = "lumen fi\t --con\t con\tmi\t --trainer.prec\t bf16-t\t --trainer.callb\t Early\t"
    assert complete_line(shell, typed, tmp_path, script).split() == [
        "lumen", "fit", "--config", "configs/mine.yaml", "--trainer.precision", "bf16-true",
        "--trainer.callbacks", "EarlyStopping",
    ]  # fmt: skip


def test_missing_shtab_names_the_install_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "Install it with: pip install 'lumen-train[completion]'" in capsys.readouterr().err
